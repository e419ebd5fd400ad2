"""Whole runs on the emulated engine with the times of a GPU: what each step, trace, capture and compilation takes.

What Inductor would compile runs with eager kernels, so that results can be compared bit for bit. Everything that
decides when a shape gets a graph is the library's own code, and is given these times.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

import pytest
import torch

from pygraph_train.problems import NotLegal
from pygraph_train.regions import inductor
from pygraph_train.step.capture_maker import CaptureMaker
from pygraph_train.step.capturing import Capturing
from pygraph_train.step.code_for_shapes import CodeForShapes
from pygraph_train.step.comparing import Comparing
from pygraph_train.step.decisions import Decisions
from pygraph_train.step.families import Family
from pygraph_train.step.program import Call, plain_call
from pygraph_train.step.runner import StepRunner
from pygraph_train.step.training_run import TrainingRun
from pygraph_train.step.ungraphed import UngraphedSteps
from pygraph_train.step.variants import Variant
from pygraph_train.tracing.trace import Trace

__all__ = ["Event", "SimulatedTimes"]


class Event(NamedTuple):
    """Something that takes time.

    Attributes:
        step: in which it happens.
        what: "step" without a graph, "replay", "capture", "comparison", "trace" or "Inductor".
        compiled: whether the kernels are Inductor's.
        seconds: it takes so long.
    """

    step: int
    what: str
    compiled: bool
    seconds: float


class SimulatedTimes:
    """Notes what happens in runs that begin after this, and gives it times: those of BERT with 6 layers on an H100.

    Args:
        monkeypatch: undoes all of it.
        code_up_to: Inductor's code is for lengths up to this one or for longer ones, whatever it is compiled for; None:
            for all of them.
        steps_in_all: how many steps training says that it will make; None where it does not know.
    """

    STEP: ClassVar = {False: 0.027, True: 0.0098}
    REPLAY: ClassVar = {False: 0.005, True: 0.0025}
    TRACE, FIRST_CAPTURE, CAPTURE, COMPARISON, INDUCTOR = 3.0, 1.4, 0.15, 0.15, 30.0

    def __init__(
        self, monkeypatch: pytest.MonkeyPatch, code_up_to: int | None = None, steps_in_all: int | None = None
    ) -> None:
        self.events: list[Event] = []
        self._patch = monkeypatch
        self._run: Any = None
        self._inside = 0  # of a run that no step is made of
        self._captures = 0
        self._code_up_to = code_up_to
        self._steps_in_all = steps_in_all
        self._note_events()
        self._give_times()
        self._stand_in_for_inductor()

    # -- what happened ------------------------------------------------------------------------------

    def steps_with(self, what: str, compiled: bool) -> list[int]:
        """The steps in which this happened."""
        return [e.step for e in self.events if e.what == what and e.compiled is compiled]

    def count(self, first: int, last: int) -> Counter[tuple[str, bool]]:
        """How often what happened from one step to another."""
        return Counter((e.what, e.compiled) for e in self.events if first <= e.step <= last)

    def seconds(self, first: int = 0, last: int = 1 << 62) -> float:
        """What it took from one step to another."""
        return sum(e.seconds for e in self.events if first <= e.step <= last)

    # -- how it is noted ----------------------------------------------------------------------------

    def _around(self, owner: type, name: str, make: Callable[..., Any]) -> None:
        """Let `make(original, self, ...)` stand for a method."""
        original = getattr(owner, name)
        self._patch.setattr(owner, name, lambda me, *args, **kwargs: make(original, me, *args, **kwargs))

    def _note(self, what: str, compiled: bool, seconds: float) -> None:
        step = 0 if self._run is None else self._run.step
        self.events.append(Event(step, what, compiled, seconds))

    def _note_events(self) -> None:
        def begins(made: Any, run: TrainingRun) -> None:
            made(run)
            self._run = run
            if self._steps_in_all is not None:
                run.steps_left = lambda: float(self._steps_in_all or 0) - run.step

        def timed(make: Any, me: Any, step: Any, variant: Variant, *rest: Any) -> Any:
            if not self._inside:
                self._note("step", _is_compiled(variant), self.STEP[_is_compiled(variant)])
            return make(me, step, variant, *rest)

        def with_code(make: Any, me: Any, step: Any, code: Trace, run: Any) -> Any:
            self._note("step", True, self.STEP[True])
            return run(plain_call)

        def plainly(make: Any, me: Any, run: Any) -> Any:
            self._note("step", False, self.STEP[False])
            return make(me, run)

        def replay(make: Any, me: Any, variant: Variant, *rest: Any) -> Any:
            self._note("replay", _is_compiled(variant), self.REPLAY[_is_compiled(variant)])
            return make(me, variant, *rest)

        def capture(make: Any, me: Any, step: Any, variant: Variant, *rest: Any) -> Any:
            made = make(me, step, variant, *rest)
            self._captures += 1
            seconds = self.FIRST_CAPTURE if self._captures == 1 else self.CAPTURE
            self._note("capture", _is_compiled(variant), seconds)
            return made

        def reference(make: Any, me: Any, *args: Any, **kwargs: Any) -> Any:
            self._inside += 1
            try:
                return make(me, *args, **kwargs)
            finally:
                self._inside -= 1

        def compared(make: Any, me: Any, step: Any, variant: Variant, *rest: Any) -> Any:
            made = make(me, step, variant, *rest)
            self._note("comparison", _is_compiled(variant), self.COMPARISON)
            if variant.family is not None:
                variant.family.costs.compares(self.COMPARISON)
            return made

        def traced(make: Any, me: Trace, *rest: Any) -> Any:
            if me._compiler is None:
                self._note("trace", False, self.TRACE)
            return make(me, *rest)

        def compiled(make: Any, me: Any, *args: Any) -> Any:
            self._note("Inductor", True, self.INDUCTOR)
            return make(me, *args)

        self._around(TrainingRun, "__post_init__", begins)
        self._around(Capturing, "timed", timed)
        self._around(UngraphedSteps, "with_code", with_code)
        self._around(UngraphedSteps, "plainly", plainly)
        self._around(StepRunner, "_replay", replay)
        self._around(Capturing, "capture", capture)
        self._around(CaptureMaker, "reference", reference)
        self._around(Comparing, "__call__", compared)
        self._around(Trace, "_backend", traced)
        self._around(Capturing, "compiled", compiled)

    def _give_times(self) -> None:
        def captured(make: Any, me: Family, place: Any, seconds: Any) -> None:
            make(me, place, self.CAPTURE if me.costs.captures else self.FIRST_CAPTURE)

        def ran(make: Any, me: Family, seconds: float, *, compiled: bool) -> None:
            make(me, self.STEP[compiled], compiled=compiled)

        def replayed(make: Any, me: Any, variant: Variant, replay: Any) -> Any:
            if variant.family is not None:
                kind = _is_compiled(variant)
                variant.family.costs.replayed(self.REPLAY[kind], compiled=kind)
            return make(me, variant, replay)

        def for_shapes(make: Any, me: Any, step: Any, signature: Any, lead: Any, *rest: Any) -> Any:
            made = make(me, step, signature, lead, *rest)
            lead.family.compile_seconds = self.INDUCTOR
            return made

        self._around(Family, "captured", captured)
        self._around(Family, "ran_without_graph", ran)
        self._around(Comparing, "_timed", replayed)
        self._around(CodeForShapes, "compile", for_shapes)

    def _stand_in_for_inductor(self) -> None:
        def with_inductor(make: Any, me: Any, *args: Any, **kwargs: Any) -> None:
            make(me, *args, **kwargs)
            me.compiles = True

        def compile_whole(graph: Any, inputs: Any, left: list[str]) -> Any:
            for value in inputs:
                if self._code_up_to is not None and isinstance(value, torch.SymInt):
                    bool(value <= self._code_up_to)  # a guard
            return graph

        def call_of(make: Any, me: Any, variant: Variant, **kwargs: Any) -> Call:
            trace = variant.compiled
            return guarded(trace) if _is_compiled(variant) and trace.traced else make(me, variant, **kwargs)

        def silent_call_of(make: Any, me: Any, variant: Variant) -> Call:
            return plain_call if _is_compiled(variant) else make(me, variant)

        # modes of the emulated engine would make Dynamo trace again
        def guarded(trace: Any) -> Call:
            def call(fn: Any, args: Any, kwargs: Any) -> Any:
                if not trace.holds(fn, args, kwargs):
                    raise NotLegal(trace.why_not(fn, args, kwargs))
                return plain_call(fn, args, kwargs)

            return call

        self._around(Decisions, "__init__", with_inductor)
        self._around(Capturing, "_call_of", call_of)
        self._around(Capturing, "_silent_call_of", silent_call_of)
        self._patch.setattr(inductor, "compile_whole", compile_whole)


def _is_compiled(variant: Variant) -> Any:
    return bool(variant.arm.compiled and variant.compiled is not None)
