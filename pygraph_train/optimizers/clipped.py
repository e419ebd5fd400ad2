"""Which parameters are clipped where all of a model are, whoever optimizes them."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from pygraph_train.dict_versions import Versions, versions_are_known
from pygraph_train.identity import identities
from pygraph_train.optimizers.program import not_optimized

__all__ = ["ClippedParameters"]


class ClippedParameters:
    """The parameters of a model, as `clip_grad_norm_(model.parameters())` finds them in each step.

    Args:
        model: the module.
        optimizer: which may hold other parameters than the model has.
        fixed: whether the model keeps its parameters, whatever it seems to have.

    Attributes:
        changes: how often the model came to have other parameters, or the same ones in another order.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, *, fixed: bool) -> None:
        self.changes = 0
        self._model, self._optimizer, self._fixed = model, optimizer, fixed
        self._parameters: tuple[Tensor, ...] = ()
        self._others: list[Tensor] = []
        self._state: Callable[[], Any] = tuple
        self._before: Any = None
        self._look()

    def look(self) -> None:
        """Notice other parameters of the model. Hot path."""
        if not self._fixed and self._state() != self._before:
            before = identities(self._parameters)
            self._look()
            self.changes += identities(self._parameters) != before

    def compare(self) -> None:
        """Notice which of them the optimizer holds now."""
        self.look()
        self._others = not_optimized(self._model, self._optimizer)

    def others(self) -> bool:
        """Whether gradients count that the optimizer does not empty. Hot path."""
        return any(p.requires_grad or p.grad is not None for p in self._others)

    def _look(self) -> None:
        self._parameters = tuple(self._model.parameters())
        self._others = not_optimized(self._model, self._optimizer)
        modules = list(self._model.modules())
        tables = [table for m in modules for table in (m._parameters, m._modules)]
        if versions_are_known() and all(type(table) is dict for table in tables):
            self._state = Versions((), tables).read
        else:
            self._state = _Entries(tables)
        self._before = self._state()


class _Entries:
    """What tells the entries of dicts from all others."""

    def __init__(self, dicts: list[Any]) -> None:
        self._dicts = dicts
        self._kept: tuple[Any, ...] = tuple(
            self._values()
        )  # no other object gets the identity of one of them

    def _values(self) -> Any:
        return chain.from_iterable([d.values() for d in self._dicts])

    def __call__(self) -> bytes:
        return identities(tuple(self._values()))
