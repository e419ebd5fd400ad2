"""What stands in for Lightning's methods while Dynamo looks at a `training_step` that optimizes by hand."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from lightning.pytorch import LightningModule

from pygraph_train.tracing.traced_code import guard_constants

__all__ = ["METHODS", "do_nothing", "stand_ins"]

METHODS = ("manual_backward", "toggle_optimizer", "untoggle_optimizer", "clip_gradients", "optimizers")
"""Methods of the module that stand-ins replace."""


def stand_ins(
    module: LightningModule, optimizers: Sequence[torch.optim.Optimizer]
) -> list[tuple[Any, str, Any]]:
    """What replaces which attribute of which object, as `standing_in` takes it."""
    found: list[tuple[Any, str, Any]] = [
        (module, "manual_backward", _Backward()),
        (module, "toggle_optimizer", do_nothing),
        (module, "untoggle_optimizer", do_nothing),
        (module, "clip_gradients", _clip_nothing),
        (module, "optimizers", _Optimizers([_Optimizer(optimizer) for optimizer in optimizers])),
    ]
    if hasattr(module, "toggled_optimizer"):
        found.append((module, "toggled_optimizer", _toggled))
    return found


class _Backward:
    """In the place of `manual_backward`: keeps the loss, so that what computes it is looked at."""

    def __init__(self) -> None:
        self.losses: list[Any] = []

    def __call__(self, loss: Any, *args: Any, **kwargs: Any) -> None:
        guard_constants((args, kwargs))
        self.losses.append(loss)


class _Optimizers:
    """In the place of `self.optimizers`."""

    def __init__(self, optimizers: list[_Optimizer]) -> None:
        self._optimizers = optimizers

    def __call__(self, use_pl_optimizer: bool = True) -> Any:
        if not use_pl_optimizer:
            raise NotImplementedError("a graph cannot hold optimizers(use_pl_optimizer=False)")
        return self._optimizers[0] if len(self._optimizers) == 1 else list(self._optimizers)


class _Optimizer:
    """In the place of one of Lightning's optimizers."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    def step(self, closure: Any = None, **kwargs: Any) -> None:
        if closure is not None or kwargs:
            raise NotImplementedError("a graph cannot hold step(closure)")

    def zero_grad(self, set_to_none: bool = True) -> None:
        guard_constants(set_to_none)

    def toggle_model(self, sync_grad: bool = True) -> AbstractContextManager[None]:
        return nullcontext()


def do_nothing(*args: Any, **kwargs: Any) -> None:
    """In the place of a method that only counts, or that only toggles parameters."""


def _clip_nothing(
    optimizer: Any, gradient_clip_val: Any = None, gradient_clip_algorithm: str | None = None
) -> None:
    guard_constants((gradient_clip_val, gradient_clip_algorithm))


def _toggled(optimizer: Any) -> AbstractContextManager[None]:
    return nullcontext()
