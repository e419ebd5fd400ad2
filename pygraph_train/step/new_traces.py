"""Traces of the kinds of calls that a step meets, with what is known before they begin."""

from __future__ import annotations

from pygraph_train.step.other_ways import OtherWays
from pygraph_train.step.training_run import TrainingRun
from pygraph_train.tracing.signature import Dims
from pygraph_train.tracing.trace import Trace

__all__ = ["new_trace", "traced_anew"]


def new_trace(training: TrainingRun, ways: OtherWays, dynamic: Dims | None) -> Trace:
    """A trace of calls that were not met before.

    Args:
        ways: of steps that went another way than their graph.
        dynamic: see `Trace`.
    """
    made = training.program.new_trace(dynamic)
    made.gaps.limit(training.config, ways.left)
    return made


def traced_anew(training: TrainingRun, ways: OtherWays, old: Trace) -> Trace:
    """A trace of the same calls, which knows what steps have shown since the old one began."""
    made = new_trace(training, ways, old.dynamic)
    made.gaps.islands = old.gaps.islands
    return made
