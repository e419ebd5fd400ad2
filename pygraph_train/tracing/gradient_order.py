"""Whether gradients are added in the order of plain training where parts of a step have backwards of their own.

Autograd adds what arrives at a tensor one by one. A compiled part of the step hands over the sum of all its uses of
the tensor. Where it is the first one whose gradients arrive, that is the same sum. Behind others it is rounded in
another way, if the part has used the tensor more than once.

Autocast keeps a cast of each weight, which parts of a step share. A compiled part makes casts of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pygraph_train.torch_private.autograd import arrival_of, edges_in_order, is_cast, is_function_in_python

__all__ = ["GradientOrder", "casts_are_shared"]

_OTHER_ORDER = (
    "gradients of a tensor would be added in another order: a part of the step uses it several times, and a later "
    "part uses it as well"
)

_SHARED = "parts of the step share what one of them computes, such as a cast of a weight that autocast keeps"


class GradientOrder:
    """Looks at one step. Parts of it run with eager kernels, and others may run compiled.

    Attributes:
        anew: whether a part ran with eager kernels, so that it is to be asked `why_not`.
    """

    def __init__(self) -> None:
        self.anew = False
        self._parts = 0
        self._part_of: dict[Any, int] = {}
        self._ends: set[Any] = set()
        self._compiled: list[tuple[list[Any], set[tuple[Any, int]]]] = []
        self._shared = False

    @staticmethod
    def sources(inputs: Sequence[Any]) -> dict[int, tuple[Any, int]]:
        """By position, where the gradients of these inputs arrive. To be asked before the part runs."""
        return {i: arrival_of(x) for i, x in enumerate(inputs) if isinstance(x, Tensor) and x.requires_grad}

    def ran(self, sources: dict[int, tuple[Any, int]], outputs: Sequence[Any]) -> list[int]:
        """A part has run with eager kernels.

        Args:
            sources: of its inputs.
            outputs: what it returned.

        Returns:
            Which of its inputs it uses more than once.
        """
        self.anew = True
        self._parts += 1
        outside = {node for node, _ in sources.values()}
        made = [x.grad_fn for x in outputs if isinstance(x, Tensor) and x.grad_fn is not None]
        left, seen = [node for node in made if node not in outside], set[Any]()
        self._ends.update(left)
        uses = Counter[tuple[Any, int]]()
        while left:
            node = left.pop()
            if node in seen or node in outside or hasattr(node, "variable"):
                continue
            seen.add(node)
            self._shared |= self._part_of.setdefault(node, self._parts) != self._parts
            uses.update(edge for edge in node.next_functions if edge[0] is not None)
            left += [source for source, _ in node.next_functions if source is not None]
        return [i for i, source in sources.items() if uses[source] > 1]

    def ran_compiled(self, several: Sequence[Any], outputs: Sequence[Any]) -> None:
        """A part has run compiled.

        Args:
            several: inputs that it uses more than once.
            outputs: what it returned.
        """
        nodes = [x.grad_fn for x in outputs if isinstance(x, Tensor) and x.grad_fn is not None]
        self._compiled.append((nodes, set(self.sources(several).values())))

    def why_not(self, roots: Sequence[Tensor]) -> str | None:
        """Why the gradients of a backward from these would have other bits, None where they would not."""
        if self._shared:
            return _SHARED
        several = self._take_compiled()
        arrived: dict[tuple[Any, int], list[int | None]] = {}
        for node, target, place in edges_in_order(roots):
            part, inside = self._part_of.get(node), self._part_of.get(target)
            if inside is not None and inside != part and target not in self._ends:
                return _SHARED
            if inside is None or inside != part:
                twice = (target, place) in several.get(part, ())
                arrived.setdefault((target, place), []).extend([part] * (1 + twice))
        if several and torch.is_autocast_enabled(roots[0].device.type):
            weights = [found for (node, _), found in arrived.items() if hasattr(node, "variable")]
            if any(len(set(found)) > 1 for found in weights):
                return _SHARED
        return _OTHER_ORDER if any(map(_is_rounded_otherwise, arrived.values())) else None

    def _take_compiled(self) -> dict[int | None, set[tuple[Any, int]]]:
        """Note the nodes of compiled parts: by part, where several gradients of it arrive as their sum."""
        several: dict[int | None, set[tuple[Any, int]]] = {}
        for nodes, sources in self._compiled:
            self._parts += 1
            several[self._parts] = sources
            left = list(nodes)
            self._ends.update(nodes)
            while left:  # results may be views of what the function returned
                node = left.pop()
                if node in self._part_of or hasattr(node, "variable"):
                    continue
                self._part_of[node] = self._parts
                if not is_function_in_python(node):
                    left += [source for source, _ in node.next_functions if source is not None]
        return several


def casts_are_shared(roots: Sequence[Tensor]) -> bool:
    """Whether a step that ran in plain Python has used a cast of a weight more than once, as autocast lets it."""
    arrivals = Counter[Any](target for _, target, _ in edges_in_order(roots) if is_cast(target))
    weights = [node for node in arrivals if any(hasattr(of, "variable") for of, _ in node.next_functions)]
    return any(arrivals[node] > 1 for node in weights)


def _is_rounded_otherwise(parts: Sequence[int | None]) -> bool:
    """Whether sums of parts differ from the sum of what arrives one by one.

    Args:
        parts: where each gradient comes from, in order; None outside of all parts.
    """
    first = next((i for i, part in enumerate(parts) if part != parts[0]), len(parts))
    later = [part for part in parts[first:] if part is not None]
    return len(set(later)) < len(later) or (parts[0] is not None and parts[0] in later)
