"""From a call that may be captured to its graph: prepared runs, Inductor, the capture, the first replay."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from typing import Any, TypeVar

from pygraph_train.boundary import put_back as put_all_back
from pygraph_train.graphs.engine import NumbersNotFound
from pygraph_train.optimizers.kernels import advice_on_numbers
from pygraph_train.problems import NotLegal, Problem
from pygraph_train.putting_back import ScratchState
from pygraph_train.report.step_report import CaptureRecord
from pygraph_train.step.capture_maker import CaptureMaker
from pygraph_train.step.comparing import Comparing
from pygraph_train.step.decisions import Decisions
from pygraph_train.step.flight import StepInFlight
from pygraph_train.step.lifecycle import LifeEvent
from pygraph_train.step.moving import MEMORY_IN_USE, moves
from pygraph_train.step.plan import PositionInAccumulation
from pygraph_train.step.program import Call, plain_call
from pygraph_train.step.python_writes import PythonWrites
from pygraph_train.step.room import Room
from pygraph_train.step.signatures import Signatures
from pygraph_train.step.together import Together
from pygraph_train.step.training_run import TrainingRun
from pygraph_train.step.updates import Updates
from pygraph_train.step.variants import Capture, Variant
from pygraph_train.step.where_tensors_lie import moved, same_memory
from pygraph_train.tracing.compiled_units import CompiledUnits
from pygraph_train.tracing.gradient_hooks import hooked
from pygraph_train.tracing.opened_trace import OpenedTrace
from pygraph_train.tracing.reasons import readable
from pygraph_train.tracing.refusals import compiler_problem
from pygraph_train.tracing.reproducing import ReproducingTrace
from pygraph_train.tracing.silent_call import SilentCall
from pygraph_train.tracing.trace import Trace
from pygraph_train.verification import PlainRuns

__all__ = ["Capturing"]

log = logging.getLogger("pygraph_train")
R = TypeVar("R")

_MOST_MICRO_BATCHES = 16
"""A capture waits this many micro-batches for one whose gradients are empty."""

MOST_RETRACES = 3
"""Changes of one kind that are taken part in before something counts as changing all the time."""

REPLAYS_PER_RETRACE = 50
"""Replays that pay for one more."""

_COMPILED_BRANCH = (
    "the step asks whether it is compiled ({}), and cannot be traced where it is not. Its graph has the branch of "
    "compiled code, whose results may differ in the last bits"
)

_STATE_CHANGES = "the optimizer runs outside of the graph: its state is replaced again and again"

_HYPERPARAMETERS_CHANGE = (
    "the optimizer runs outside of the graph: a hyperparameter other than the learning rate changes again and again "
    "(betas, momentum or weight decay under a scheduler, such as OneCycleLR)"
)


class Capturing:
    """Prepares, compiles, captures and compares.

    Args:
        training, updates, decisions, maker, signatures: of the runner.
        leave_update_outside: called with the reason why no graph of the step holds the update any more.
        together: of ranks that capture together; None for one process.

    Attributes:
        compared: makes a replay that must give what the step gives without a graph.
        makes_way, close_holes: see `Room`.
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
        self._training, self._writes = training, PythonWrites(training.program)
        self._updates = updates
        self._decisions = decisions
        self._maker = maker
        self._room = Room(training, signatures, alone=together is None)
        self.makes_way, self.close_holes = self._room.makes_way, self._room.close_holes
        self._leave_update_outside = leave_update_outside
        self._together = together
        self._captured = False
        self.compared = Comparing(training, updates, maker, self._silent_call_of, together)

    def prepared(self, step: StepInFlight, variant: Variant, run: Callable[[Call], R]) -> R:
        """Make the step with the kernels that its capture will hold."""
        result = self.timed(step, variant, run)
        variant.meets(LifeEvent.RAN)
        return result

    def has_room(self, variant: Variant | None) -> bool:
        """Whether another shape may have graphs now, or this one."""
        return self._training.program.replication.ready() and self._room.is_there(variant)

    def make_way(self, variant: Variant) -> None:
        """Release graphs of forward and backward when a plan without them is tried, where memory would grow.

        Beside them such a step would need its memory twice. They are captured again when their turn comes.
        """
        if variant.captures and not variant.arm.plan.forward_backward and self.makes_way(variant):
            variant.make_way()
            self._updates.release_graphs(variant.arm.plan, whole_steps=False)
            self._training.engine.trim()

    def timed(
        self, step: StepInFlight, variant: Variant, run: Callable[[Call], R], call: Call | None = None
    ) -> R:
        """Make a step with the kernels of a kind of call, or with the eager ones of `call`, and time it."""
        training, compiled = self._training, call is None and variant.arm.compiled
        call = call or self._call_of(variant)

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
        variant.seen_in_warmup(training.times.ungraphed, compiled=compiled)
        if step.position.update:
            self._updates.ran()
        return result

    def _call_of(self, variant: Variant, *, makes_step: bool = True) -> Call:
        """How the step is run where its graph's kernels are wanted.

        Through Dynamo's graph also with eager kernels: models ask whether a stream is capturing, so the function in a
        capture need not be what was traced. A graph with branches of compiled code, which may differ from plain
        training, makes no step. The emulated engine records the function: its modes would make Dynamo trace again.
        """
        if variant.arm.compiled and variant.compiled is not None:
            return variant.compiled
        plain = self._training.engine.name != "cuda" or (makes_step and variant.trace.branches.taken)
        return plain_call if plain else variant.trace

    def _silent_call_of(self, variant: Variant, *, reads: bool = False) -> Call:
        """How the step is run where no step is made: it leaves Python as it is, and reads nothing on the host."""
        trace = variant.compiled if variant.arm.compiled and variant.compiled is not None else variant.trace
        if isinstance(trace, ReproducingTrace) and trace.captured_as_traced:
            return SilentCall(trace, reads=reads)
        return self._call_of(variant, makes_step=False)

    def _to_be_compiled(self, variant: Variant) -> Trace | CompiledUnits:
        """How the step is run with Inductor's kernels. The first run compiles them."""
        from pygraph_train.regions.inductor import compile_whole  # which imports much

        program = self._training.program
        if isinstance(variant.trace, OpenedTrace):
            return CompiledUnits(variant.trace, program.replication.units(), compile_whole)
        compiler = program.replication.in_pieces(compile_whole)
        trace = ReproducingTrace(
            program.device, compiler=compiler, recorder=program.recorder, dynamic=variant.trace.dynamic
        )
        trace.ahead.ask_no_more_than(variant.trace.ahead)  # nothing else is looked at before a replay
        if isinstance(variant.trace, ReproducingTrace):
            trace.live.follow(variant.trace.live)
        return trace

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
        training.engine.trim()  # what steps with eager kernels have left does not come on top
        try:
            with training.clock.compiling():
                result = self.timed(step, variant, run)
        except BaseException as error:
            problem = compiler_problem(error) if isinstance(error, Exception) else None
            if problem is None:
                variant.meets(LifeEvent.STALE)
                raise
            variant.compiled = None
            self._decisions.compiles = False
            put_all_back(moves.put_back, scratch.restore, lambda: gradients.restore(before), put_back)
            if variant.choice is not None:
                variant.meets(LifeEvent.STALE)
                raise NotLegal(problem) from error
            variant.arm = self._decisions.arms(variant, self._updates.plans())[0]
            training.note(problem)
            # where only the backward has failed, Python has what the step writes
            written = isinstance(compiled, ReproducingTrace) and compiled.reproduces and compiled.runs > 0
            again = self._silent_call_of(variant, reads=True) if written else None
            result = self.timed(step, variant, run, again)
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

    @staticmethod
    def allowed(variant: Variant) -> int:
        """Changes of one kind that are taken part in, with so many replays."""
        return MOST_RETRACES + variant.replays // REPLAYS_PER_RETRACE

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
        allowed = self.allowed(variant)
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
                raise NotLegal(MEMORY_IN_USE if not places else moves(name))
        elif not updates.state_is_that_of(capture):
            variant.forget_captures()
            updates.made = 0
            self._count_change(step, allowed, Problem(_STATE_CHANGES))
        elif not updates.hyperparameters_are_those_of(capture):
            variant.forget_captures()
            advice = advice_on_numbers(program.optimizer)
            self._count_change(step, allowed, Problem(_HYPERPARAMETERS_CHANGE, fix=advice))

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
    ) -> tuple[Capture, PlainRuns | None]:
        """Capture the step. Returns the capture, and what its first replay must reproduce (None without verification).

        Raises:
            NotLegal: it cannot be captured. Nothing was executed, Python state is as before.
        """
        started, config = time.perf_counter(), self._training.config
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
            updates.preparation.settle(training.engine)
        if len({p.constants for p, _, _ in variant.captures}) > self.allowed(variant):
            raise NotLegal(
                Problem(
                    f"what the training loop sets around the step changes again and again{position.told()}"
                )
            )
        place, family, verify = variant.capture_key(position), variant.family, config.verify != "off"
        if variant.lead is None:
            self._room.make(variant)
            verify = verify and variant.is_compared(place, config.verify)
        elif family is not None:  # room was asked for when it had earned its captures
            verify = verify and family.is_compared(place, config.verify)
        self._room.capture_begins()
        call = self._silent_call_of(variant)
        if isinstance(call, SilentCall):  # in the capture it would be part of the graph
            call.trace.fill(training.program.function(), args, kwargs)
        leaves = self._writes.before_capture(training.engine, variant, args, kwargs, leaves)
        make = functools.partial(
            self._maker.make,
            variant,
            call,
            args,
            kwargs,
            leaves,
            position,
            updates.preparation,
            verify=verify,
        )
        try:
            capture, expected = make()
        except NumbersNotFound as error:
            assert updates.preparation is not None
            log.info("pygraph: hyperparameters stay in the graph of the step: %s", error)
            updates.preparation.numbers_stay()
            capture, expected = make()
        self._room.capture_ended()
        if (asked := variant.trace.branches.compiled) and not variant.arm.compiled:
            training.report.note(_COMPILED_BRANCH.format(asked))
        variant.captures[place] = capture
        training.report.shapes.got_graph(variant.key)
        seconds = time.perf_counter() - started
        variant.capture_seconds = seconds - (capture.audits.last if expected is not None else 0.0)
        if family is not None:
            family.captured(place, variant.capture_seconds if training.engine.name == "cuda" else None)
        what = str(position if variant.arm.plan.fused else position.without_update())
        if variant.choice is None:
            training.report.runs_with(variant.arm.plan)
        nodes = capture.graph.nodes
        training.report.captured(CaptureRecord(what, seconds, nodes, variant.arm.compiled, training.step))
        training.clock.interrupted()
        log.info("pygraph: captured %s in %.2f s (%d nodes)", what, seconds, nodes)
        return capture, expected
