"""What an adapter says of the update of the parameters: everything from the backward to the end of the step."""

from __future__ import annotations

from itertools import chain
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, nn

from pygraph_train.optimizers.preparation import OptimizerPreparation, outside_of_graphs
from pygraph_train.optimizers.scaling import Scaling
from pygraph_train.problems import Problem

CLIPS_OTHERS = (
    "gradients of parameters that the optimizer does not hold count in the norm that is clipped, and a graph would "
    "not find them"
)
"""Reason against a graph of clipping, for where some of `not_optimized` have gradients."""

_NO_SCALER = "Mixed precision with bf16 needs no GradScaler"

UNSCALED = Problem(
    "the optimizer gets no graph of its own: gradients are unscaled before its step (to clip them), and whether they "
    "overflowed is in a new tensor each time",
    fix=_NO_SCALER,
)

SCALED = Problem(
    "the optimizer gets no graph of its own: a GradScaler tells its kernels in a new tensor each time whether "
    "gradients have overflowed",
    fix=_NO_SCALER,
)


def optimized(optimizer: torch.optim.Optimizer | None) -> tuple[Tensor, ...]:
    """The parameters that an optimizer holds, in their order; () without one."""
    groups = () if optimizer is None else optimizer.param_groups
    return tuple(chain.from_iterable(map(itemgetter("params"), groups)))


def not_optimized(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """The parameters of `model` that `optimizer` does not hold."""
    held = set(map(id, optimized(optimizer)))
    return [p for p in model.parameters() if id(p) not in held]


def why_update_is_plain(program: UpdateProgram, preparation: OptimizerPreparation) -> Problem | None:
    """Why the update of such a step gets no graph."""
    reason = preparation.reason or program.why_update_stays_outside(preparation)
    return None if reason is None else outside_of_graphs(reason)


class UpdateProgram:
    """What a graph of the update has to know of a training step.

    Args:
        optimizer: what the update steps, None when that is the caller's business.
        device: of the parameters.
        scaler: of the loop, None where it has none.

    Attributes:
        optimizer, device: as given.
        scaling: what the loop's GradScaler does for the optimizer.
    """

    def __init__(self, optimizer: Any, device: torch.device, scaler: torch.amp.GradScaler | None) -> None:
        self.optimizer: torch.optim.Optimizer | None = optimizer
        self.device = device
        self.scaling = Scaling(scaler, optimizer)

    def why_update_stays_outside(self, preparation: OptimizerPreparation) -> str | None:
        """A reason, beside the optimizer's own, why the update cannot be captured."""
        return self.scaling.why_update_stays_outside(preparation)
