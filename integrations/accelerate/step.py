"""`accelerator.graphed_step(fn)`: the body of a loop as one function."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pygraph_train.step.function_step import FunctionStep
from pygraph_train.step.loop import Loop


class GraphedStepFunction(FunctionStep):
    """A training step of an Accelerate loop. Made by `accelerator.graphed_step`.

    Args:
        fn, loop: see `FunctionStep`.
        accelerator: whose `backward`, optimizers and schedulers `fn` uses.

    Attributes:
        accelerator: as given.
    """

    _made_by = "accelerator.graphed_step"

    def __init__(self, fn: Callable[..., Any], accelerator: Any, loop: Loop) -> None:
        super().__init__(fn, loop)
        self.accelerator = accelerator
        loop.patience = 1  # a whole step has met its optimizer
