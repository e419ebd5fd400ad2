"""What the runner needs to know of a training step, whoever wrote the loop around it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from pygraph_train.boundary import STEP, executes
from pygraph_train.optimizers.program import UpdateProgram
from pygraph_train.parallel.replication import Replication

Call = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""How the step's function is run: plainly, or through `torch.compile`."""


def plain_call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the function as the user wrote it."""
    executes(STEP)
    return fn(*args, **kwargs)


class StepProgram(UpdateProgram):
    """A training step: what makes its update, and how its model is shared with other processes.

    Attributes:
        model: the module whose parameters are trained.
        replication: of its model.
        differentiates: whether code of the user between forward and backward may ask for gradients.
    """

    model: nn.Module
    replication: Replication
    differentiates = False
