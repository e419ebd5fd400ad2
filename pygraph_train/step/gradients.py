"""Gradients of captured steps: one set of fixed addresses for all graphs of a step."""

from __future__ import annotations

import operator
from collections.abc import Iterable

import torch
from torch import Tensor, nn

__all__ = ["Gradients"]

Snapshot = list[Tensor | None]


class Gradients:
    """The `.grad` of every parameter, and the canonical tensors that graphs write them to.

    The first capture that starts from empty gradients owns them: autograd allocates them inside its
    graph, which costs nothing. Graphs captured later copy theirs there as their last operation, so
    whatever was replayed, `p.grad` is the same tensor with the gradients of the last step, and graphs of
    accumulating micro-batches find each other's sums.
    """

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        self.parameters = list(parameters)
        self._static: dict[nn.Parameter, Tensor] = {}

    @property
    def exist(self) -> bool:
        """True once a capture has set the canonical tensors."""
        return bool(self._static)

    def snapshot(self) -> Snapshot:
        """The present `.grad` objects (not their contents)."""
        return [p.grad for p in self.parameters]

    def restore(self, snapshot: Snapshot) -> None:
        """Put `.grad` objects back."""
        for p, grad in zip(self.parameters, snapshot, strict=True):
            p.grad = grad

    @staticmethod
    def clear(parameters: Iterable[nn.Parameter]) -> None:
        """Empty gradients, as `zero_grad(set_to_none=True)` does."""
        for p in parameters:
            p.grad = None

    def are(self, expected: Snapshot) -> bool:
        """True when every `.grad` is the expected object."""
        return all(map(operator.is_, [p.grad for p in self.parameters], expected))

    def adopt(self) -> None:
        """Move present gradients into the canonical tensors, so that a graph can add to them."""
        for p in self.parameters:
            if p.grad is None:
                continue
            static = self._static.setdefault(p, p.grad)
            if static is not p.grad:
                static.copy_(p.grad)
                p.grad = static

    def settle(self) -> None:
        """Inside a capture, after the last use of `.grad`: leave the gradients in the canonical tensors."""
        sources, targets = [], []
        for p in self.parameters:
            if p.grad is None or (p in self._static and self._static[p] is p.grad):
                continue
            if p in self._static:
                sources.append(p.grad)
                targets.append(self._static[p])
        if targets:
            torch._foreach_copy_(targets, sources)
        for p in self.parameters:
            if p.grad is not None and p in self._static:
                p.grad = self._static[p]

    def claim(self) -> Snapshot:
        """After a successful capture: new tensors become canonical. Returns the graph's gradients."""
        for p in self.parameters:
            if p.grad is not None:
                self._static.setdefault(p, p.grad)
        return self.snapshot()
