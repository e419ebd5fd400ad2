"""Traces of the kinds of calls that a step meets, with what is known before they begin."""

from __future__ import annotations

from pygraph_train.step.training_run import TrainingRun
from pygraph_train.tracing.signature import Dims
from pygraph_train.tracing.trace import Trace

__all__ = ["new_trace"]


def new_trace(training: TrainingRun, dynamic: Dims | None) -> Trace:
    """A trace of calls that were not met before.

    Args:
        dynamic: see `Trace`.
    """
    made = training.program.new_trace(dynamic)
    made.gaps.limit(training.config)
    return made
