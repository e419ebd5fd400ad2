"""`accelerator.graphed_step(fn)`: the body of a loop as one function, whose steps have a report of their own."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from pygraph_train.boundary import STEP, executes, quietly, surely
from pygraph_train.report.step_report import StepReport
from pygraph_train.step.loop import Loop
from pygraph_train.step.loss_program import NotCopied
from pygraph_train.trees import detached_results


class GraphedStepFunction(NotCopied):
    """A training step of an Accelerate loop. Made by `accelerator.graphed_step`.

    The function runs as it is written. Forwards and backwards of prepared models and steps of prepared optimizers come
    from graphs in it, as they do in a stock loop.

    Args:
        fn: the step.
        accelerator: whose `backward`, optimizers and schedulers `fn` uses.
        loop: what is graphed of this training.

    Attributes:
        fn, accelerator, loop: as given.
        name: of the function.
    """

    _made_by = "accelerator.graphed_step"

    def __init__(self, fn: Callable[..., Any], accelerator: Any, loop: Loop) -> None:
        functools.update_wrapper(self, fn)
        self.fn = fn
        self.accelerator = accelerator
        self.loop = loop
        loop.patience = 1  # a whole step has met its optimizer
        self.name = getattr(fn, "__name__", type(fn).__name__)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Make one step.

        Returns:
            What the function returns, detached: tensors of their own.
        """
        if not self.loop.active:
            quietly(self.loop.report.step_began)
        executes(STEP)
        loop = self.loop
        before, loop.within_step = loop.within_step, True
        try:
            made = self.fn(*args, **kwargs)
        finally:
            loop.within_step = before
        if loop.active:
            quietly(loop.step_ended)
        return surely(lambda: detached_results(made), STEP)

    def report(self) -> StepReport:
        """What became of the steps so far, and of the rest of the loop. Prints as a table."""
        return self.loop.report
