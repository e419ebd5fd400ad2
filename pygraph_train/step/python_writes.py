"""What a replayed step writes to Python: its trace makes the writes, with the tensors of the replay."""

from __future__ import annotations

from typing import Any

from pygraph_train.step.flight import Replayed
from pygraph_train.step.outputs import detached_results
from pygraph_train.step.program import StepProgram
from pygraph_train.step.variants import Capture, Variant
from pygraph_train.tracing.reproducing import ReproducingTrace

__all__ = ["PythonWrites"]


class PythonWrites:
    """Around the replays of steps that write to Python.

    Args:
        program: the step.
    """

    def __init__(self, program: StepProgram) -> None:
        self._program = program

    def load(
        self,
        variant: Variant,
        capture: Capture | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        leaves: list[Any],
    ) -> list[Any]:
        """Before a replay: the leaves of a call, and after them the tensors that the step reads and replaces.

        Tensors get the numbers of the call that they stand for.
        """
        trace, fn = variant.trace, self._program.function()
        if capture is not None and capture.writer is not None:
            capture.writer.fill(fn, args, kwargs, variant.ahead)
        if not trace.carried:
            return leaves
        assert isinstance(trace, ReproducingTrace)
        return [*leaves, *trace.carried_tensors(fn, args, kwargs)]

    def finished(
        self, capture: Capture, args: tuple[Any, ...], kwargs: dict[str, Any], replayed: Replayed
    ) -> Replayed:
        """A replay with all that its step does. For each step once, and after the replay is known to be right."""
        writer, program = capture.writer, self._program
        if writer is None:
            return replayed
        result, outputs = replayed.outputs
        with program.context():
            writer.write(program.function(), args, kwargs, outputs)
        return Replayed(detached_results(result) if program.detaches_results else result, replayed.updated)
