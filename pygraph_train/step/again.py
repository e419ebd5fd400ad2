"""A compiled backward that is differentiated itself: the same with eager kernels, made once more for it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from pygraph_train.random_state import OF_DEVICES, HostRandomState
from pygraph_train.torch_private.autocast import as_under, present
from pygraph_train.torch_private.memory import tensor_version

__all__ = ["Again"]


class Again:
    """One call of a compiled function, for a backward with `create_graph=True`.

    Args:
        eager: the function with eager kernels, None where there is none.
        args: of the call.
        checked: those of them that the call may change, or somebody else before the backward.
    """

    def __init__(self, eager: Callable[..., Any] | None, args: Sequence[Any], checked: Sequence[int]) -> None:
        self._eager = eager
        self._args = args
        self._checked = checked
        self._versions = self._now()
        self._autocast = present()
        self._places: list[tuple[int, int]] = []
        self._node: weakref.ref[Any] | None = None

    def ran(self, outputs: Sequence[Any], node: Any) -> None:
        """Note what the call gave, whose history is `node`."""
        found = [(k, x) for k, x in enumerate(outputs) if isinstance(x, Tensor) and x.grad_fn is not None]
        if self._now() != self._versions or any(x.grad_fn is not node for _, x in found):
            return self.forget()
        self._places = [(k, x.output_nr) for k, x in found]
        self._node = weakref.ref(node)

    def forget(self) -> None:
        """No backward is to come."""
        self._eager, self._args, self._checked = None, (), ()

    def gradients(self, given: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, ...] | None:
        """Gradients that can be differentiated, None where they may be others.

        Args:
            given: those of the compiled backward.
            tangents: what it was called with.
        """
        node = None if self._node is None else self._node()
        if self._eager is None or node is None or self._now() != self._versions:
            return None
        edges = [edge for edge, g in zip(node.next_functions, given, strict=True) if g is not None]
        wanted = [x for edge in edges if (x := self._argument(*edge)) is not None]
        if len(wanted) < len(edges):
            return None
        before = HostRandomState(("torch", OF_DEVICES))
        with torch.enable_grad(), as_under(self._autocast):
            outputs = self._eager(*self._args)
        if before.moved(HostRandomState(("torch", OF_DEVICES))):  # nobody knows where they were
            before.restore()
            return None
        pairs = [(outputs[k], tangents[j]) for k, j in self._places if tangents[j] is not None]
        found = iter(
            torch.autograd.grad(
                [output for output, _ in pairs],
                wanted,
                [tangent for _, tangent in pairs],
                create_graph=True,
                allow_unused=True,
            )
        )
        return tuple(None if g is None else next(found) for g in given)

    def _argument(self, node: Any, index: int) -> Tensor | None:
        """The one whose gradient goes along an edge."""
        for x in self._args:
            if isinstance(x, Tensor) and x.requires_grad:
                edge = get_gradient_edge(x)
                if edge.node is node and edge.output_nr == index:
                    return x
        return None

    def _now(self) -> list[int]:
        return [tensor_version(self._args[i]) for i in self._checked]
