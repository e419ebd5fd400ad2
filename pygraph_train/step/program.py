"""What the runner needs to know of a training step, whoever wrote the loop around it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

from torch import Tensor

from pygraph_train.optimizers.program import UpdateProgram
from pygraph_train.parallel.replication import Replication
from pygraph_train.problems import Problem

__all__ = ["Call", "StepProgram", "plain_call"]

Call = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]
"""How the step's function is run: plainly, or through a `Trace`."""


def plain_call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the function as the user wrote it."""
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
