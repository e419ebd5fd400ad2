"""What the runner needs to know of a training step, whoever wrote the loop around it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from pygraph_train.optimizers.preparation import OptimizerPreparation
from pygraph_train.problems import Problem

__all__ = ["CLIPS_OTHERS", "Call", "StepProgram", "at_work", "not_optimized", "plain_call"]

Call = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""How the step's function is run: plainly, or through a `Trace`."""


def plain_call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the function as the user wrote it."""
    return fn(*args, **kwargs)


CLIPS_OTHERS = (
    "gradients of parameters that the optimizer does not hold count in the norm that is clipped, and a graph would "
    "not find them"
)
"""Reason against a graph of clipping, for where some of `not_optimized` have gradients."""


def not_optimized(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The parameters of `model` that `optimizer` does not hold."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return [p for p in model.parameters() if id(p) not in held]


def at_work(scaler: torch.amp.GradScaler | None) -> torch.amp.GradScaler | None:
    """The scaler, None for one that is switched off: all that it does is to call the optimizer."""
    return scaler if scaler is not None and scaler.is_enabled() else None


class StepProgram(Protocol):
    """The pieces of one training step, in the order in which they run.

    `forward`, `backward`, `transform_gradients` and `update` do only what can be captured: nothing that
    must happen in Python on every step.
    """

    device: torch.device
    recorder: str | None
    """See `legality.Trace`."""
    empties_first: bool
    """Whether gradients are emptied before `function` runs: a step that fails leaves none then."""
    detaches_results: bool
    """Whether the caller gets results without their history, also where no graph is replayed."""

    @property
    def model(self) -> nn.Module:
        """The module whose parameters are trained."""

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """What `update` steps, None when that is the caller's business."""

    def function(self) -> Callable[..., Any]:
        """The user's function that computes the loss (`training_step`); the one that is traced."""

    def context(self) -> AbstractContextManager[Any]:
        """The context in which `function` runs (autocast)."""

    def forward(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Any]:
        """Compute the loss.

        Returns:
            The loss with its autograd graph (0-dim), and a tree of everything that the outside wants
            back from a replay.
        """

    def backward(self, loss: Tensor) -> None:
        """Compute gradients into `.grad`."""

    def transform_gradients(self, *, in_kernels: bool = True) -> None:
        """Unscale and clip, before the optimizer.

        Args:
            in_kernels: leave out what the optimizer's kernels will do themselves. False where no update
                follows, to see the gradients that it would leave behind.
        """

    def update(self) -> None:
        """The optimizer's step and the scaler's update."""

    def why_update_stays_outside(self, preparation: OptimizerPreparation) -> str | None:
        """A reason, beside the optimizer's own, why `update` cannot be captured."""

    def acts_before_backward(self) -> Problem | None:
        """What runs in Python between forward and backward on every step, None when nothing does."""

    def acts_before_update(self) -> str | None:
        """What runs in Python between backward and the optimizer on every step, None when nothing does."""

    def abandon(self) -> None:
        """Forget Python-side notes of a step that was started and will not be finished."""

    def extra_state(self) -> Iterable[Tensor]:
        """Device tensors that `update` writes besides parameters, buffers and optimizer state."""
