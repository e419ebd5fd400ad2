"""A training step that is a function of a loop: it has the graphs of the loop's modules and optimizers."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, ClassVar, NoReturn

from pygraph_train.boundary import STEP, executes, quietly, surely
from pygraph_train.report.step_report import StepReport
from pygraph_train.step.loop import Loop
from pygraph_train.trees import detached_results


class NotCopied:
    """Base of graphed steps. `copy.copy`, `copy.deepcopy` and `pickle` raise a TypeError that says what to do.

    This is so before the first step as well: `copy.deepcopy` leaves functions as they are, and the copied optimizer
    would wait for gradients that the function computes for the first model.
    """

    _made_by: ClassVar[str]  # what makes such steps

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        raise TypeError(
            "a graphed step cannot be copied or pickled: its graphs are for the tensors of one model and "
            "one optimizer. Copy the model and the optimizer together, copy.deepcopy((model, optimizer)), or save "
            f"their state_dict(), and make a new graphed step for the copies with {self._made_by}"
        )


class FunctionStep(NotCopied):
    """A function that makes one training step, or one micro-batch, as it is written.

    Args:
        fn: the step.
        loop: whose modules and optimizers `fn` uses.

    Attributes:
        fn, loop: as given.
        name: of the function.
    """

    def __init__(self, fn: Callable[..., Any], loop: Loop) -> None:
        own = ("__dict__",) * inspect.isfunction(fn)  # what an object holds would hide methods of this one
        functools.update_wrapper(self, fn, updated=own)
        self.fn, self.loop = fn, loop
        self.name = getattr(fn, "__name__", type(fn).__name__)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Make one step.

        Returns:
            What the function returns, detached: tensors of their own.
        """
        loop = self.loop
        if not loop.active:
            quietly(loop.report.step_began)
        before, loop.within_step = loop.within_step, True
        try:
            made = self.make(args, kwargs)
        finally:
            loop.within_step = before
        if loop.active:
            quietly(loop.step_ended)
        return surely(lambda: detached_results(made), STEP)

    def make(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The step itself."""
        executes(STEP)
        return self.fn(*args, **kwargs)

    def report(self) -> StepReport:
        """What became of the steps so far, and of the rest of the loop. Prints as a table."""
        return self.loop.report
