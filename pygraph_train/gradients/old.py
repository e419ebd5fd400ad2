"""Gradients that exist when a training step begins: does the step read them, or drop them?"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from pygraph_train.torch_private.memory import tensor_version

__all__ = ["OldGradients"]


class OldGradients:
    """The gradients that exist when a step begins, and what becomes of them.

    Args:
        parameters: of all optimizers.

    Attributes:
        used: parameters whose old gradients were added to, clipped, or read by an optimizer.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._old = {p: (p.grad, tensor_version(p.grad)) for p in parameters if p.grad is not None}
        self.used: set[Tensor] = set()

    def dropped(self) -> set[Tensor]:
        """At the end of the step: parameters without their old gradients, which nothing has used."""
        self._look()
        return {p for p, (grad, _) in self._old.items() if p.grad is not grad} - self.used

    def _look(self) -> None:
        """Whether old gradients were changed in place since the step began."""
        for p, (grad, version) in self._old.items():
            if p.grad is grad and tensor_version(grad) != version:
                self.used.add(p)

    def looked_at_after(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        """A backward, after which gradients are looked at."""

        def backward(*args: Any, **kwargs: Any) -> Any:
            self._look()
            result = stock(*args, **kwargs)
            self._look()
            return result

        return backward

    def read_by(self, stock: Callable[..., Any]) -> Callable[..., Any]:
        """A function that reads the gradients of the optimizer that it is called with."""

        def read(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
            self.read_of(optimizer)
            return stock(optimizer, *args, **kwargs)

        return read

    def read_of(self, optimizer: torch.optim.Optimizer) -> None:
        """The gradients of this optimizer's parameters are read now."""
        for group in optimizer.param_groups:
            self.used |= {p for p in group["params"] if p in self._old and p.grad is self._old[p][0]}
