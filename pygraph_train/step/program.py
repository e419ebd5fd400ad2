"""What the runner needs to know of a training step, whoever wrote the loop around it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from pygraph_train.boundary import STEP, executes
from pygraph_train.optimizers.program import UpdateProgram
from pygraph_train.parallel.replication import Replication
from pygraph_train.problems import Problem
from pygraph_train.tracing.opened_trace import OpenedTrace
from pygraph_train.tracing.reproducing import ReproducingTrace
from pygraph_train.tracing.signature import Dims
from pygraph_train.tracing.trace import Trace

__all__ = ["Call", "StepOfLoss", "StepProgram", "plain_call"]

Call = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""How the step's function is run: plainly, or through a `Trace`."""


def plain_call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the function as the user wrote it."""
    executes(STEP)
    return fn(*args, **kwargs)


class StepProgram(UpdateProgram, Protocol):
    """The pieces of one training step: those that make gradients, before those of the update.

    `forward` and `backward` do only what can be captured: nothing that must happen in Python on every step.
    """

    recorder: str | tuple[str, ...] | None
    """See `Trace`."""
    replication: Replication
    """How the model is shared with other processes."""
    empties_first: bool
    """Whether gradients are emptied before `function` runs: a step that fails leaves none then."""
    detaches_results: bool
    """Whether the caller gets results without their history, also where no graph is replayed."""
    by_hand: bool
    """Whether `function` makes backwards and updates itself. `forward` makes the whole step then, and `backward` and
    `update` do nothing; gradients are what they were when the step began."""

    @property
    def clips(self) -> bool:
        """Whether functions of `torch.nn.utils` clip the gradients for each update."""

    @property
    def empties_gradients(self) -> bool:
        """Whether a replay empties gradients in the place of `zero_grad` of the optimizer."""

    def new_trace(self, dynamic: Dims | None = None) -> Trace:
        """A trace for one kind of call of `function`.

        Args:
            dynamic: see `Trace`. A program whose trace is bound to sizes has none.
        """

    def emptied(self, trace: Trace, owned: list[Tensor]) -> list[Tensor]:
        """Parameters whose gradients a step that begins an accumulation drops before anything reads them.

        Args:
            trace: of the kind of call.
            owned: the parameters that the step updates.
        """

    def left_behind(self) -> list[Tensor]:
        """What a step without a graph and a replay must agree in, beside the loss and gradients."""

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

    def acts_before_backward(self) -> Problem | None:
        """What runs in Python between forward and backward on every step, None when nothing does."""


class StepOfLoss:
    """What all programs share whose function computes a loss, and leaves the rest of the step to the library."""

    by_hand: bool = False
    device: torch.device
    replication: Replication
    recorder: str | tuple[str, ...] | None

    @property
    def clips(self) -> bool:
        """See `StepProgram`."""
        return False

    @property
    def empties_gradients(self) -> bool:
        """See `StepProgram`."""
        return True

    def new_trace(self, dynamic: Dims | None = None) -> Trace:
        """A trace for one kind of call. Modules with hooks of torch's own are opened for it."""
        return self._new_trace(dynamic, ReproducingTrace)

    def _new_trace(self, dynamic: Dims | None, kind: type[ReproducingTrace]) -> Trace:
        if self.replication.sharded:
            return OpenedTrace(self.device, self.replication.opened, recorder=self.recorder)
        trace = kind(self.device, recorder=self.recorder, dynamic=dynamic)
        alone = self.replication.group is None
        trace.ahead.of_buffers = alone  # others have them from the first process
        trace.gaps.allowed = alone
        return trace

    def emptied(self, trace: Trace, owned: list[Tensor]) -> list[Tensor]:
        """All of them: the loop calls `zero_grad`."""
        return owned

    def left_behind(self) -> list[Tensor]:
        """Nothing: what the update does follows from the gradients."""
        return []
