"""A step that shows what Inductor has to compile, and gives it to a process beside the training."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from pygraph_train.problems import NotLegal
from pygraph_train.step.capturing import Capturing
from pygraph_train.step.flight import StepInFlight
from pygraph_train.step.program import Call
from pygraph_train.step.training_run import TrainingRun
from pygraph_train.step.variants import Variant
from pygraph_train.tracing.reproducing import ReproducingTrace

__all__ = ["Ordering"]

R = TypeVar("R")


class Ordering:
    """Makes such steps, with eager kernels.

    Args:
        training, capturing: of the runner.
    """

    def __init__(self, training: TrainingRun, capturing: Capturing) -> None:
        self._training = training
        self._capturing = capturing

    def __call__(self, step: StepInFlight, variant: Variant, run: Callable[[Call], R]) -> R:
        """Make the step. Whatever fails on the way to an order costs no more than its time."""
        from pygraph_train.regions.later import compile_later  # which imports much
        from pygraph_train.torch_private.compile_beside import Order, why_not_beside

        training, beside = self._training, variant.beside
        assert beside is not None
        if (why := why_not_beside()) is not None:
            beside.fail(why)
            return self._capturing.timed(step, variant, run)
        order, failed, program = Order(), list[str](), training.program
        trace = ReproducingTrace(
            program.device,
            compiler=lambda gm, inputs, left: compile_later(gm, inputs, order, failed),
            recorder=program.recorder,
        )
        began = time.perf_counter()
        try:
            result = self._capturing.timed(step, variant, run, trace)
        except NotLegal as refused:  # nothing was executed
            failed.append(str(refused.problem))
            result = self._capturing.timed(step, variant, run)
        seconds = time.perf_counter() - began
        if failed:
            beside.fail(failed[0])
        elif order.graphs:
            beside.begin(order.dump())
        else:
            beside.nothing_to_do()
        training.report.compiled(seconds, in_step=True)
        return result
