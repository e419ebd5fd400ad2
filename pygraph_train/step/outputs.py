"""Results of a captured step: static inside the graph, ordinary tensors outside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pygraph_train.step.signature import map_leaves

__all__ = ["Outputs"]


class Outputs:
    """What a captured step returned. Build it inside the capture, call it after each replay.

    Scalars of one dtype are packed into one vector as the graph's last operation: however many values a
    step logs, one copy per replay makes them ordinary tensors that nobody overwrites.

    Args:
        tree: the step's results; its tensors have fixed addresses.
        static_leaves: the leaves that the step was called with.
    """

    def __init__(self, tree: Any, static_leaves: Sequence[Any]) -> None:
        self._tree = tree
        leaves: list[Any] = []
        map_leaves(leaves.append, tree)
        tensors = [leaf.detach() for leaf in leaves if isinstance(leaf, Tensor)]
        self._groups: list[tuple[Tensor, list[int], bool]] = []  # static tensor, leaf positions, packed
        # a result that is one of the arguments is taken from the call, not from the graph
        self._passed: dict[int, int] = {}
        inputs = {id(leaf): k for k, leaf in enumerate(static_leaves) if _has_identity(leaf)}
        scalars: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        tensor_of: dict[int, Tensor] = {}
        iterator = iter(tensors)
        for position, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                tensor_of[position] = next(iterator)
            if id(leaf) in inputs:
                self._passed[position] = inputs[id(leaf)]
            elif isinstance(leaf, Tensor):
                if leaf.dim() == 0:
                    scalars.setdefault((leaf.dtype, leaf.device), []).append(position)
                else:
                    self._groups.append((tensor_of[position], [position], False))
        for positions in scalars.values():
            if len(positions) == 1:
                self._groups.append((tensor_of[positions[0]], positions, False))
            else:
                self._groups.append((torch.stack([tensor_of[p] for p in positions]), positions, True))
        self._leaves = leaves

    def __call__(self, leaves: Sequence[Any]) -> Any:
        """The results of the last replay, as tensors of their own.

        Args:
            leaves: the leaves of the present call.
        """
        values = list(self._leaves)
        for static, positions, packed in self._groups:
            copy = static.clone()
            if packed:
                for position, value in zip(positions, copy.unbind(), strict=True):
                    values[position] = value
            else:
                values[positions[0]] = copy
        for position, source in self._passed.items():
            values[position] = leaves[source]
        iterator = iter(values)
        return map_leaves(lambda _: next(iterator), self._tree)


def _has_identity(leaf: Any) -> bool:
    """Interned values (None, small numbers) are the same object by chance."""
    return isinstance(leaf, Tensor) or (leaf is not None and not isinstance(leaf, (bool, int, float)))
