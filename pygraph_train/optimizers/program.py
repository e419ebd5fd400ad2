"""What an adapter says of the update of the parameters: everything from the backward to the end of the step."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Protocol

import torch
from torch import Tensor, nn

from pygraph_train.optimizers.preparation import OptimizerPreparation
from pygraph_train.optimizers.scaling import Scaling
from pygraph_train.problems import Problem

__all__ = ["CLIPS_OTHERS", "UNSCALED", "UpdateProgram", "not_optimized", "optimized"]

CLIPS_OTHERS = (
    "gradients of parameters that the optimizer does not hold count in the norm that is clipped, and a graph would "
    "not find them"
)
"""Reason against a graph of clipping, for where some of `not_optimized` have gradients."""

UNSCALED = Problem(
    "the optimizer gets no graph of its own: gradients are unscaled before its step (to clip them), and whether they "
    "overflowed is in a new tensor each time",
    fix="Mixed precision with bf16 needs no GradScaler",
)


def optimized(optimizer: torch.optim.Optimizer | None) -> tuple[Tensor, ...]:
    """The parameters that an optimizer holds, in their order; () without one."""
    groups = () if optimizer is None else optimizer.param_groups
    return tuple(chain.from_iterable([group["params"] for group in groups]))


def not_optimized(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The parameters of `model` that `optimizer` does not hold."""
    held = set(map(id, optimized(optimizer)))
    return [p for p in model.parameters() if id(p) not in held]


class UpdateProgram(Protocol):
    """What a graph of the update has to know of a training step."""

    device: torch.device
    scaling: Scaling
    """What the loop's GradScaler does for the optimizer."""

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """What the update steps, None when that is the caller's business."""

    def why_update_stays_outside(self, preparation: OptimizerPreparation) -> str | None:
        """A reason, beside the optimizer's own, why the update cannot be captured."""

    def extra_state(self) -> Iterable[Tensor]:
        """Device tensors that the update writes besides parameters, buffers and optimizer state."""
