"""What a replayed step writes to Python: its trace makes the writes, with the tensors of the replay."""

from __future__ import annotations

import weakref
from typing import Any

from pygraph_train.graphs.engine import Engine
from pygraph_train.step.flight import Replayed
from pygraph_train.step.outputs import detached_results, without_graphs
from pygraph_train.step.program import StepProgram
from pygraph_train.step.variants import Capture, Variant
from pygraph_train.torch_private.side_effects import SideEffect
from pygraph_train.tracing.reproducing import ReproducingTrace

__all__ = ["PythonWrites"]


class PythonWrites:
    """Around the replays of steps that write to Python.

    Args:
        program: the step.
    """

    def __init__(self, program: StepProgram) -> None:
        self._program = program
        self._known: weakref.WeakSet[ReproducingTrace] = weakref.WeakSet()  # of which something was captured

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

    def before_capture(
        self,
        engine: Engine,
        variant: Variant,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        leaves: list[Any],
    ) -> list[Any]:
        """What `load` returns, once nothing that the step replaces keeps the autograd graph of an earlier step alive.

        That graph's nodes which add to gradients may belong to the default stream, and every later step would use
        them as long as they live: no capture can hold that. A replay leaves what is kept as it is left here, and
        nobody sees it before the step, replayed or not, replaces it.
        """
        trace, frame = variant.trace, {"fn": self._program.function(), "args": args, "kwargs": kwargs}
        if isinstance(trace, ReproducingTrace) and any(map(_may_keep, trace.effects)):
            changed = trace.exchange(frame, without_graphs)
            if (
                changed or trace not in self._known
            ):  # what Dynamo has looked at waits for the garbage collector
                engine.tidy()
            self._known.add(trace)
        return self.load(variant, None, args, kwargs, leaves)

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


def _may_keep(effect: SideEffect) -> bool:
    return not (effect.simple and effect.plain)
