"""From a call that may be captured to its graph: prepared runs, Inductor, the capture, the first replay."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, TypeVar

from pygraph_train.problems import NotLegal, Problem, PyGraphError
from pygraph_train.report.step_report import CaptureRecord
from pygraph_train.step.capture_maker import CaptureMaker
from pygraph_train.step.decisions import Decisions
from pygraph_train.step.flight import StepInFlight
from pygraph_train.step.lifecycle import LifeEvent
from pygraph_train.step.plan import PositionInAccumulation
from pygraph_train.step.program import Call, plain_call
from pygraph_train.step.together import Together
from pygraph_train.step.training_run import TrainingRun
from pygraph_train.step.updates import Updates
from pygraph_train.step.variants import Capture, Signatures, Variant, moved, same_memory
from pygraph_train.tracing.compiled_units import CompiledUnits
from pygraph_train.tracing.gradient_hooks import hooked
from pygraph_train.tracing.opened_trace import OpenedTrace
from pygraph_train.tracing.reasons import readable
from pygraph_train.tracing.refusals import compiler_problem, problem_of
from pygraph_train.tracing.trace import Trace
from pygraph_train.verification import Fingerprint, ScratchState

__all__ = ["Capturing"]

log = logging.getLogger("pygraph_train")

R = TypeVar("R")

_MOST_MICRO_BATCHES = 16
"""A capture waits this many micro-batches for one whose gradients are empty."""

MOST_RETRACES = 3
"""Changes of one kind that are taken part in before something counts as changing all the time."""

REPLAYS_PER_RETRACE = 50
"""Replays that pay for one more."""

_STATE_CHANGES = "the optimizer runs outside of the graph: its state is replaced again and again"

_HYPERPARAMETERS_CHANGE = (
    "the optimizer runs outside of the graph: a hyperparameter other than the learning rate changes again and again "
    "(betas or momentum under OneCycleLR, for example)"
)

_MEMORY_IN_USE = Problem(
    "memory of a tensor that is assigned (`.data = ...`) is in use elsewhere again and again",
    fix="Assign a copy of the value (.clone()), and keep no views of the tensor",
)

_ONE_CYCLE = "Use OneCycleLR(cycle_momentum=False) to keep the optimizer in the graph"


class Capturing:
    """Prepares, compiles, captures and compares.

    Args:
        training, updates, decisions, maker, signatures: of the runner.
        leave_update_outside: called with the reason why no graph of the step holds the update any more.
        together: of ranks that capture together; None for one process.
    """

    def __init__(
        self,
        training: TrainingRun,
        updates: Updates,
        decisions: Decisions,
        maker: CaptureMaker,
        signatures: Signatures,
        leave_update_outside: Callable[[StepInFlight, Problem], None],
        together: Together | None = None,
    ) -> None:
        self._training = training
        self._updates = updates
        self._decisions = decisions
        self._maker = maker
        self._signatures = signatures
        self._leave_update_outside = leave_update_outside
        self._together = together
        self._captured = False

    def prepared(self, step: StepInFlight, variant: Variant, run: Callable[[Call], R]) -> R:
        """Make the step with the kernels that its capture will hold."""
        result = self._prepared(step, variant, run)
        variant.meets(LifeEvent.RAN)
        return result

    def _prepared(self, step: StepInFlight, variant: Variant, run: Callable[[Call], R]) -> R:
        training, call = self._training, self._call_of(variant)

        def marked(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            result = call(fn, args, kwargs)
            training.clock.mark("B")
            return result

        with (
            self._updates.context(),
            self._maker.warm_up(fresh=step.position.fresh),
            training.clock.ungraphed(),
        ):
            result = run(marked)
        variant.seen_in_warmup(training.times.ungraphed)
        if step.position.update:
            self._updates.ran()
        return result

    def _call_of(self, variant: Variant) -> Call:
        """How the step is run where its graph's kernels are wanted.

        Through Dynamo's graph also with eager kernels: models look at whether a stream is capturing and
        take other branches then, so the function run anew in a capture need not be the one that was traced.
        The emulated engine records the function itself: its modes would make Dynamo trace again.
        """
        if variant.arm.compiled and variant.compiled is not None:
            return variant.compiled
        return variant.trace if self._training.engine.name == "cuda" else plain_call

    def _to_be_compiled(self, variant: Variant) -> Trace | CompiledUnits:
        """How the step is run with Inductor's kernels. The first run compiles them."""
        from pygraph_train.regions.inductor import compile_whole  # which imports much

        program = self._training.program
        if isinstance(variant.trace, OpenedTrace):
            return CompiledUnits(variant.trace, program.replication.units(), compile_whole)
        compiler = program.replication.in_pieces(compile_whole)
        return Trace(program.device, compiler=compiler, recorder=program.recorder)

    def compiled(
        self,
        step: StepInFlight,
        variant: Variant,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        run: Callable[[Call], R],
    ) -> R:
        """Make the step in which Inductor works. A failure costs its time, not the step.

        Raises:
            NotLegal: Inductor has failed, and the variant has other plans. Nothing was executed.
        """
        training, maker = self._training, self._maker
        training.announce("compiling the training step with Inductor, which may take a minute")
        variant.compile_next = False
        program = training.program
        compiled = variant.compiled = self._to_be_compiled(variant)
        gradients = maker.gradients(variant, args, kwargs, step.position)
        gradients.empty()
        before = gradients.snapshot()
        scratch = ScratchState(program.device, maker.beside_parameters(variant, args, kwargs))
        moves = maker.moves(variant, args, kwargs)
        gradients.isolate()
        put_back = program.scaling.notes()
        try:
            with training.clock.compiling():
                result = self._prepared(step, variant, run)
        except BaseException as error:
            problem = compiler_problem(error) if isinstance(error, Exception) else None
            if problem is None:
                variant.meets(LifeEvent.STALE)
                raise
            variant.compiled = None
            self._decisions.compiles = False
            moves.put_back()
            scratch.restore()
            gradients.restore(before)
            put_back()
            if variant.choice is not None:
                variant.meets(LifeEvent.STALE)
                raise NotLegal(problem) from error
            variant.arm = self._decisions.arms(variant, self._updates.plans())[0]
            training.note(problem)
            result = self._prepared(step, variant, run)
            variant.meets(LifeEvent.NOT_COMPILED)
            return result
        variant.meets(LifeEvent.RAN)
        for text in dict.fromkeys(compiled.left):
            training.report.note(text)
        return result

    def may_begin(self, variant: Variant, position: PositionInAccumulation) -> bool:
        """Whether nothing is worth waiting for: gradients that the graph would own, and the optimizer's state."""
        compiled = variant.arm.compiled
        if not self._training.program.replication.ready():
            return False
        if not position.fresh and not self._training.addresses.are_written(compiled=compiled):
            # the graph of the first micro-batch is to own the gradients, if there is one
            return variant.life.steps >= variant.lengths.prepared + _MOST_MICRO_BATCHES
        return not variant.arm.plan.fused or self._updates.has_state()

    def look_again(
        self,
        step: StepInFlight,
        variant: Variant,
        capture: Capture,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> None:
        """Drop captures that rest on something that has changed.

        Raises:
            NotLegal: it changes all the time.
        """
        if hooked(capture.gradients.parameters):
            return variant.forget_captures()
        program, updates = self._training.program, self._updates
        allowed = MOST_RETRACES + variant.replays // REPLAYS_PER_RETRACE
        tensors = variant.trace.tensors(program.function(), args, kwargs)
        anchors = self._maker.anchors
        at_home = anchors.adopt(capture.rebound) and anchors.bring_back(capture.kept)
        if not at_home or not same_memory(tensors, capture):
            variant.moves += 1
            places = dict(moved(tensors, capture))
            variant.forget_captures()
            for place, other in places.items():
                if variant.moves > 1 or not other:  # a tensor that is replaced once needs no copies for ever
                    variant.moving[place] = other or variant.moving.get(place, False)
            if variant.moves > allowed:
                name = readable(variant.trace.inputs[min(places)], program.function()) if places else ""
                raise NotLegal(_MEMORY_IN_USE if not places else _moves(name))
        elif not updates.state_is_that_of(capture):
            variant.forget_captures()
            updates.made = 0
            self._count_change(step, allowed, Problem(_STATE_CHANGES))
        elif not updates.hyperparameters_are_those_of(capture):
            variant.forget_captures()
            self._count_change(step, allowed, Problem(_HYPERPARAMETERS_CHANGE, fix=_ONE_CYCLE))

    def _count_change(self, step: StepInFlight, allowed: int, problem: Problem) -> None:
        self._updates.changes += 1
        if self._updates.changes > allowed:
            self._leave_update_outside(step, problem)

    def capture(
        self,
        step: StepInFlight,
        variant: Variant,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        leaves: list[Any],
    ) -> tuple[Capture, Fingerprint | None]:
        """Capture the step. Returns the capture, and what its first replay must reproduce (None without verification).

        Raises:
            NotLegal: it cannot be captured. Nothing was executed, Python state is as before.
        """
        started = time.perf_counter()
        training, updates, position = self._training, self._updates, step.position
        if not self._captured:
            self._captured = True
            training.announce(f"capturing the training step as {variant.arm.plan}")
        for text in dict.fromkeys(variant.trace.made_once):
            training.report.note(text)
        if variant.arm.plan.fused:
            assert updates.preparation is not None
            reason = updates.preparation.reason  # a hook was registered in mid-run
            reason = reason or training.program.why_update_stays_outside(updates.preparation)
            if reason is not None:
                self._leave_update_outside(
                    step, Problem(f"the optimizer runs outside of the graph: {reason}")
                )
            updates.preparation.settle()
        if len({p.constants for p, _, _ in variant.captures}) > MOST_RETRACES:
            raise NotLegal(
                Problem(f"Python values of the training loop change again and again: {position.constants}")
            )
        self._make_room(variant)
        capture, expected = self._maker.make(
            variant, self._call_of(variant), args, kwargs, leaves, position, updates.preparation
        )
        variant.captures[variant.capture_key(position)] = capture
        seconds = time.perf_counter() - started
        what = str(position if variant.arm.plan.fused else position.without_update())
        if variant.choice is None:
            training.report.runs_with(variant.arm.plan)
        training.report.captured(
            CaptureRecord(what, seconds, capture.graph.nodes, variant.arm.compiled, training.step)
        )
        training.clock.interrupted()
        log.info("pygraph: captured %s in %.2f s (%d nodes)", what, seconds, capture.graph.nodes)
        return capture, expected

    def compared(
        self,
        step: StepInFlight,
        variant: Variant,
        capture: Capture,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        expected: Fingerprint | None,
        replay: Callable[[], R],
    ) -> R:
        """Make a replay that must give what the step gives without a graph.

        Raises:
            NotLegal: it gives something else, and is undone.
        """
        started, training, maker = time.perf_counter(), self._training, self._maker
        try:
            if expected is None:
                # with the batch itself: what loads the graph's inputs is compared as well
                call, updates, sync = self._call_of(variant), capture.updates, step.position.sync
                expected = maker.reference(
                    variant, capture.gradients, call, args, kwargs, updates=updates, sync=sync
                )
            before = capture.gradients.snapshot()
            with maker.stage():
                backup = maker.backup(variant, capture, args, kwargs, self._updates.preparation)
        except PyGraphError:
            raise
        except Exception as error:  # nothing of the step was made: there may be no memory for a second run
            raise NotLegal(problem_of(error)) from error
        put_back = training.program.replication.notes()
        result = replay()
        left = [*capture.gradients.final, *training.program.left_behind()]
        found = Fingerprint.of(capture.loss, left)
        difference = expected.compare(found, bits=training.engine.name == "emulated")
        training.engine.trim()
        seconds = time.perf_counter() - started
        training.report.compared(seconds, audit=capture.verified)
        training.clock.interrupted()
        capture.audits.took(seconds, first=not capture.verified)
        problem = None
        if difference is not None:
            which = f"replay {variant.replays}" if capture.verified else "the first replay"
            problem = Problem(
                f"{which} of {step.position} differs from the step without a graph: {difference}",
                fix="Please report this as a bug. Steps of this kind are not replayed as a whole any more",
            )
            log.warning("pygraph: %s", problem)
        if self._together is not None:
            problem = self._together.confirm(problem)
        if problem is None:
            capture.verified = True
            return result
        backup.restore()
        put_back()
        capture.gradients.restore(before)
        training.replays -= 1
        training.clock.undone()
        raise NotLegal(problem)

    def _make_room(self, variant: Variant) -> None:
        """Release the least recently used captures above `max_signatures`.

        Raises:
            NotLegal: all of them were used a moment ago, and capturing again and again costs more than it gives.
        """
        most = self._training.config.max_signatures
        holders = [v for v in self._signatures.variants() if v.captures and v is not variant]
        if len(holders) < most:
            return
        oldest = min(holders, key=lambda v: v.last_used)
        if self._training.step - oldest.last_used < 4 * most:
            raise NotLegal(
                Problem(
                    f"{most} other input signatures are in use",
                    fix="Raise PyGraphConfig.max_signatures, or pad batches to fewer shapes",
                )
            )
        oldest.forget_captures()
        oldest.inputs = None


def _moves(name: str) -> Problem:
    return Problem(
        f"{name} lives at a new address again and again",
        fix=f"Write new values into {name} (`copy_`) in place of replacing it, and keep no views of it",
    )
