"""One step on the way from an unknown call to a replay: the stage of its life says which."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

from pygraph_train.parallel.agreement import Word
from pygraph_train.problems import NotLegal
from pygraph_train.step.capturing import MOST_RETRACES, REPLAYS_PER_RETRACE, Capturing
from pygraph_train.step.choice import Choice
from pygraph_train.step.decisions import Decisions
from pygraph_train.step.families import WithoutGraph
from pygraph_train.step.flight import Ran, Replayed, StepInFlight
from pygraph_train.step.lifecycle import LifeEvent, Stage, next_life
from pygraph_train.step.new_traces import new_trace
from pygraph_train.step.program import Call
from pygraph_train.step.python_writes import PythonWrites
from pygraph_train.step.refusing import Refusing
from pygraph_train.step.replays import Replays
from pygraph_train.step.shapes import Shapes
from pygraph_train.step.signatures import Signatures
from pygraph_train.step.together import Together
from pygraph_train.step.training_run import TrainingRun
from pygraph_train.step.ungraphed import UngraphedSteps
from pygraph_train.step.updates import Updates
from pygraph_train.step.variants import Capture, Signature, Variant
from pygraph_train.step.watching import Watching
from pygraph_train.tracing.changing_numbers import changing_numbers
from pygraph_train.tracing.refusals import OUT_OF_MEMORY, unsupported_leaf
from pygraph_train.tracing.reproducing import ReproducingTrace
from pygraph_train.verification import PlainRuns

__all__ = ["REPLAYS_BEFORE_COMPILING", "Advancing"]

R = TypeVar("R")

REPLAYS_BEFORE_COMPILING = 100
"""Signatures other than the first one prove with eager kernels that they are worth Inductor's time."""

_MOST_WAYS = 8
"""Graphs of steps whose way is decided by random numbers, where no number was asked for."""

_LONG = 20
"""Steps in a row that may not be traced, after which a row says why."""

_TRACED = (Stage.FIRST_LOOK, Stage.SECOND_LOOK, Stage.WATCHED)


class Advancing:
    """Makes steps that are not replayed yet.

    Args:
        training, updates, decisions, signatures, ungraphed, refusing, watching, capturing: of the runner.
        replays: of the runner, too.
        together: of ranks that replay together; None for one process.

    Attributes:
        make_way: see `Capturing`.
    """

    def __init__(
        self,
        training: TrainingRun,
        updates: Updates,
        decisions: Decisions,
        signatures: Signatures,
        ungraphed: UngraphedSteps,
        refusing: Refusing,
        watching: Watching,
        capturing: Capturing,
        replays: Replays,
        together: Together | None = None,
    ) -> None:
        self._training, self._updates = training, updates
        self._decisions, self._signatures = decisions, signatures
        self._ungraphed, self._refusing = ungraphed, refusing
        self._watching = watching
        self._capturing, self.make_way = capturing, capturing.make_way
        self._shapes = Shapes(training, updates, decisions, signatures, ungraphed, capturing)
        self._replays = replays
        self._together = together
        self._writes = PythonWrites(training.program)
        self._begun, self._untraceable = False, 0  # steps in a row

    def __call__(
        self,
        step: StepInFlight,
        signature: Signature,
        variant: Variant | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        leaves: list[Any],
        run: Callable[[Call], R],
    ) -> Replayed | Ran[R]:
        """Make the step; see `StepRunner.make`.

        Args:
            signature, variant: what kind of call it is; None where no trace is for it.
            leaves: of the arguments.
        """
        if not self._begun:
            self._begun = True
            self._refusing.ask_for_reasons()
        served: Variant | WithoutGraph | None = variant
        if signature.family is not None and signature.other_way is None and self._refusing.off is None:
            served = self._shapes.served(step, signature, variant, args, kwargs, leaves)
        if isinstance(served, WithoutGraph):
            return Ran(self._shapes.without_graph(step, served, args, kwargs, run))
        variant = served
        life = signature.life if variant is None else variant.life
        if self._refusing.off is not None or life.stage is Stage.REFUSED:
            if self._together is None:
                signature.is_refused_again()
            return Ran(self._ungraphed.with_the_best_plan(step, run))
        if not self._training.program.replication.traceable():
            self._untraceable += 1
            if self._untraceable == _LONG:
                self._training.note(self._training.program.replication.why_not_traceable())
            return Ran(self._ungraphed.plainly(run))
        self._untraceable = 0
        if life.stage is Stage.MET:
            signature.life = next_life(life, LifeEvent.RAN, self._signatures.lengths)
            return Ran(self._shapes.plainly(signature.family, run))
        if variant is None:
            variant = self._new_variant(step, signature, args, kwargs, leaves)
        if variant is None:
            return Ran(self._ungraphed.plainly(run))
        if variant.life.stage in _TRACED:
            return Ran(self._watched(step, signature, variant, args, kwargs, leaves, run))
        self._updates.prepare()
        if variant.lead is not None:
            variant.arm = self._shapes.arm_of(variant, args, kwargs)
        elif variant.choice is None:
            variant.arm = self._decisions.arms(variant, self._updates.plans())[0]
            if not variant.arm.plan.forward_backward:
                variant.choice = self.compare_plans(variant)
        step.arm = variant.arm
        self._updates.serve(variant.arm.plan)
        if not variant.arm.plan.forward_backward:
            return Ran(self._ungraphed.as_its_arm_says(step, run))
        return self._graphed(step, signature, variant, args, kwargs, leaves, run)

    def _graphed(
        self,
        step: StepInFlight,
        signature: Signature,
        variant: Variant,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        leaves: list[Any],
        run: Callable[[Call], R],
    ) -> Replayed | Ran[R]:
        """A step that is, or will be, one graph of forward and backward."""
        capturing = self._capturing
        try:
            capture = variant.captures.get(variant.capture_key(step.position))
            if capture is not None:
                capturing.look_again(step, variant, capture, args, kwargs)
            if variant.arm.compiled and variant.compiled is None:
                variant.meets(LifeEvent.WANTS_INDUCTOR)
                return Ran(capturing.compiled(step, variant, args, kwargs, run))
            capture, expected = variant.captures.get(variant.capture_key(step.position)), None
            if capture is None:
                if variant.life.stage is Stage.PREPARED or not capturing.may_begin(variant, step.position):
                    return Ran(capturing.prepared(step, variant, run))
                if not self._all_capture(variant, step):
                    return Ran(capturing.prepared(step, variant, run))
                if variant.trace.dynamic and variant.lead is None and not capturing.has_room(variant):
                    # its trace goes on serving others, and its shape has to earn a graph
                    self._signatures.drop(variant)
                    return Ran(self._ungraphed.plainly(run))
                with self._making():
                    capture, expected = capturing.capture(step, variant, args, kwargs, leaves)
                if capture.verified:  # with verify="off", or where graphs of the same kernels were compared
                    return self._replayed(step, variant, capture, args, kwargs, leaves, run)
            elif (word := self._all_replay(variant, capture)) is not Word.AUDIT:
                if word is Word.PLAIN:
                    return Ran(self._ungraphed.plainly(run))
                return self._replayed(step, variant, capture, args, kwargs, leaves, run)
            return self._compared(step, variant, capture, args, kwargs, leaves, expected)
        except NotLegal as refused:
            if variant.lead is not None and refused.problem is OUT_OF_MEMORY:
                step.give_up()
                self._signatures.drop(variant)  # it was known for long that this may happen: no failure
            else:
                made = self._ungraphed.before_refusal(step, refused, run)
                if made is not None and variant.excuses():
                    return made
                self._refusing.calls(step, signature, variant, refused.problem)
                self._shapes.failed(variant, refused.problem)
                if made is not None:
                    return made
        return Ran(self._ungraphed.plainly(run))

    def audited(
        self,
        step: StepInFlight,
        signature: Signature,
        variant: Variant,
        capture: Capture,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        leaves: list[Any],
        run: Callable[[Call], R],
    ) -> Replayed | Ran[R]:
        """A replay that another rank wants to be compared with a plain step."""
        try:
            return self._compared(step, variant, capture, args, kwargs, leaves, None)
        except NotLegal as refused:
            self._refusing.calls(step, signature, variant, refused.problem)
        return Ran(self._ungraphed.plainly(run))

    def _compared(
        self,
        step: StepInFlight,
        variant: Variant,
        capture: Capture,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        leaves: list[Any],
        expected: PlainRuns | None,
    ) -> Replayed:
        loaded = self._writes.load(variant, capture, args, kwargs, leaves)
        with self._making():
            replayed = self._capturing.compared(
                step,
                variant,
                capture,
                args,
                kwargs,
                expected,
                lambda: self._replays.alone(variant, capture, loaded),
            )
        return self._writes.finished(capture, args, kwargs, replayed)

    def _replayed(
        self,
        step: StepInFlight,
        variant: Variant,
        capture: Capture,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        leaves: list[Any],
        run: Callable[[Call], R],
    ) -> Replayed | Ran[R]:
        loaded = self._writes.load(variant, capture, args, kwargs, leaves)
        made = self._replays(step, variant, capture, args, kwargs, loaded)
        return made if isinstance(made, Replayed) else self._refusing.taken_back(step, run)

    def _making(self) -> AbstractContextManager[None]:
        return nullcontext() if self._together is None else self._together.making()

    def _all_capture(self, variant: Variant, step: StepInFlight) -> bool:
        """Whether every rank captures this step now."""
        if self._together is None:
            return True
        fused = variant.arm.plan.fused
        position = step.position if fused else step.position.without_update()
        return self._together.captures(position, fused=fused, compiled=variant.arm.compiled)

    def _all_replay(self, variant: Variant, capture: Capture) -> Word:
        """What all ranks do with this capture: `REPLAY`, `AUDIT` or `PLAIN`."""
        audit = not capture.verified or capture.audits.due(time.perf_counter())
        if self._together is not None:
            return self._together.replays(capture, audit=audit)
        return Word.AUDIT if audit else Word.REPLAY

    def _watched(
        self,
        step: StepInFlight,
        signature: Signature,
        variant: Variant,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        leaves: list[Any],
        run: Callable[[Call], R],
    ) -> R:
        try:
            result, problem = self._watching(step, variant, args, kwargs, leaves, run)
        except BaseException:
            if variant.way is not None and not variant.trace.traced:  # the way of a check that has failed
                self._close_way(signature, variant, variant.way)
            raise
        if variant.opened:
            self._signatures.forget(signature)  # the next call has another key
            return result
        variant.meets(LifeEvent.RAN if problem is None else LifeEvent.UNFIT)
        if problem is not None and variant.life.stage is Stage.SECOND_LOOK:
            variant.trace = new_trace(self._training, variant.trace.dynamic)
        elif problem is not None and variant.trace.dynamic:
            self._shapes.refused(variant)
        elif problem is not None and variant.way is not None:
            self._close_way(signature, variant, variant.way)
            self._training.note(problem)
        elif problem is not None:
            self._refusing.calls(step, signature, variant, problem)
        return result

    def _close_way(self, signature: Signature, variant: Variant, way: tuple[Any, ...]) -> None:
        """One of the ways of a step has no graph. The others keep theirs."""
        signature.ways.close(way)
        signature.variants = [other for other in signature.variants if other is not variant]

    def _new_variant(
        self,
        step: StepInFlight,
        signature: Signature,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        leaves: Sequence[Any],
    ) -> Variant | None:
        """A variant for a call that no trace of this signature holds for; None when there were too many."""
        training, program = self._training, self._training.program
        self._signatures.traces(signature)
        problem = (
            unsupported_leaf(program.function(), args, kwargs, leaves)
            or program.replication.not_called_once()
        )
        other_way = signature.other_way
        if problem is None and other_way is not None:
            ways, most = signature.ways, training.config.max_signatures or _MOST_WAYS
            ways.took(other_way)
            training.report.note(ways.told(signature.variants))
            problem = ways.too_many(signature.variants, compiled=training.config.compile is True)
            if problem is None and not ways.returns(other_way, signature.variants, most, training.step):
                return None
        elif problem is None and signature.variants:
            signature.retraces += 1
            paid = sum(v.replays for v in signature.variants) // REPLAYS_PER_RETRACE
            if signature.retraces - paid > MOST_RETRACES:
                with program.context():
                    problem = signature.variants[0].trace.why_not(program.function(), args, kwargs)
        if problem is not None:
            self._refusing.calls(step, signature, None, problem)
            return None
        # ways are counted, and shapes apart from them
        family = None if other_way is not None else signature.family
        trace = new_trace(training, None if family is None else family.dynamic)
        if isinstance(trace, ReproducingTrace) and other_way is None:
            known = [other.trace for other in signature.variants]
            with program.context():
                trace.take_as_inputs(*changing_numbers(known, program.function(), args, kwargs))
        variant = Variant(
            trace,
            self._signatures.lengths,
            signature.key,
            last_used=training.step,
            family=family,
            way=other_way,
        )
        if family is not None:
            family.traced(variant)
        wanted = training.config.compile is True and self._decisions.compiles and other_way is None
        soon = family is not None and not family.steps_before_compiling(training.step)
        variant.compile_next = wanted and (soon or self._signatures.is_first(signature))
        signature.variants.insert(0, variant)
        return variant

    def compare_plans(self, variant: Variant) -> Choice:
        """A comparison of the plans of this kind of call, from the next step on."""
        plans, made = self._updates.plans(), self._training.steps_made
        return self._decisions.choice(variant, plans, made, self._capturing.makes_way)

    def consider_compiling(self, variant: Variant) -> None:
        """A variant that is used a lot deserves the kernels that were asked for after all."""
        if variant.compiled is None and self._decisions.compiles and self._training.config.compile is True:
            self._shapes.wants_inductor(variant)
