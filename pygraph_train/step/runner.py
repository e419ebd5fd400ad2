"""The life of a training step: watched, proved legal, captured, verified, replayed, or left alone."""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from pygraph_train.config import PyGraphConfig
from pygraph_train.gradients.places import Source
from pygraph_train.graphs.engine import Engine
from pygraph_train.optimizers.kernels import is_unknown
from pygraph_train.optimizers.phase import OptimizerPhase
from pygraph_train.optimizers.preparation import OptimizerPreparation
from pygraph_train.optimizers.trial import OptimizerTrial
from pygraph_train.problems import NotLegal, Problem, PyGraphError
from pygraph_train.report.step_report import CaptureRecord, Fallback, StepReport
from pygraph_train.selection.arms import NOTHING, WHOLE, Arm, Phase, Plan
from pygraph_train.selection.controller import Switch
from pygraph_train.step.capture_maker import CaptureMaker
from pygraph_train.step.choice import Choice
from pygraph_train.step.clock import Clock
from pygraph_train.step.decisions import COMPILE_SECONDS, Decisions
from pygraph_train.step.launch_bound import LaunchBoundCheck
from pygraph_train.step.plan import PositionInAccumulation, legal_plans
from pygraph_train.step.program import Call, StepProgram, plain_call
from pygraph_train.step.rebinding import UNSEEN_MOVE, Moves
from pygraph_train.step.regions import Regions
from pygraph_train.step.times import Times
from pygraph_train.step.variants import Capture, Signature, Variant, same_memory
from pygraph_train.torch_private.hooks import (
    global_module_hook_tables,
    hook_registrations,
    saved_tensors_hooks_active,
)
from pygraph_train.torch_private.memory import tensor_version
from pygraph_train.torch_private.switches import function_modes, is_dispatch_watched, is_function_watched
from pygraph_train.tracing.gradient_hooks import backward_hook, hooked
from pygraph_train.tracing.reasons import readable
from pygraph_train.tracing.refusals import (
    ANOMALY,
    DISPATCH_MODE,
    FUNCTION_MODE,
    GLOBAL_HOOK,
    SAVED_TENSORS_HOOKS,
    compiler_problem,
    history,
    unsupported_leaf,
)
from pygraph_train.tracing.signature import Key, flatten, key_of
from pygraph_train.tracing.trace import Trace
from pygraph_train.verification import Fingerprint, ScratchState

__all__ = ["Ran", "Replayed", "StepRunner"]

log = logging.getLogger("pygraph_train")

R = TypeVar("R")

_RUNS_BEFORE_CAPTURE = 2
"""Runs with the kernels that will be captured: lazy initialisation and autotuning happen in them."""

_MOST_RETRACES = 3
"""New variants of one signature allowed before the step counts as changing all the time."""

_MOST_MICRO_BATCHES = 16
"""So long a capture waits for a micro-batch that starts from empty gradients."""

_REPLAYS_PER_RETRACE = 50
"""A variant that served this many replays has paid for one more."""

_REPLAYS_BEFORE_COMPILING = 100
"""Signatures other than the first one prove with eager kernels that they are worth Inductor's time."""

_MOST_SIGNATURES = 1024
"""Shapes remembered; the oldest are forgotten."""


_NO_GRAPH = Arm(NOTHING)


@dataclass(frozen=True)
class Replayed:
    """The step ran from a graph.

    Attributes:
        outputs: the program's tree of results, as ordinary tensors.
        updated: whether the optimizer's step was part of the graph.
    """

    outputs: Any
    updated: bool


@dataclass(frozen=True)
class Ran(Generic[R]):
    """The step ran without a graph; `result` is what the caller's `run` returned."""

    result: R


class StepRunner:
    """Runs training steps, from a graph where that is proved to be the same.

    Args:
        program: the step.
        config: options.
        engine: where graphs are made.
        report: filled while running.
        steps_left: how many steps training will still make, if known (weighs compile time).
        announce: shows the user what a long pause is for.
        on_decision: called when another plan is kept than before.
    """

    def __init__(
        self,
        program: StepProgram,
        config: PyGraphConfig,
        engine: Engine,
        report: StepReport,
        steps_left: Callable[[], float | None] = lambda: None,
        *,
        announce: Callable[[str], None] = lambda text: None,
        on_decision: Callable[[Switch], None] = lambda switch: None,
    ) -> None:
        self.program = program
        self.config = config
        self.engine = engine
        self.report = report
        self._announce = announce
        self._signatures: OrderedDict[Key, Signature] = OrderedDict()
        self._first: Signature | None = None
        self._optimizer: OptimizerPreparation | None = None
        self._phase: OptimizerPhase | None = None
        self._between: str | None = None  # what acts before it, and keeps it out of the graph of the backward
        self._begun = self._captured = False
        self._initialized = False
        self._off: Problem | None = None  # why no graph holds forward and backward
        self._stopped = False
        self._rest: Choice | None = None  # for steps whose forward and backward run without a graph
        # of the present step
        self._choice: Choice | None = None
        self._arm = Arm(NOTHING)
        self._position = PositionInAccumulation()
        self._replayed = False
        self._as_planned = True
        self._prepared_updates = 0
        self._optimizer_changes = 0
        self._maker = CaptureMaker(program, config, engine, self._optimizer_context)
        self._steps = 0
        self._global_hooks = global_module_hook_tables()
        self._times = times = Times()
        report.latest = times.latest
        self._clock = Clock(engine, report, times)
        self._regions = Regions(program, config, engine, report, announce, self._clock.compiled)
        self._decisions = Decisions(
            program, config, engine, report, times, steps_left, on_decision, self._release
        )
        self._launch_bound: LaunchBoundCheck | None = None
        if LaunchBoundCheck.wanted(config, engine.name):
            self._launch_bound = LaunchBoundCheck(
                engine.synchronize,
                None if config.compile is False else COMPILE_SECONDS,
                steps_left,
                lambda why: self._decisions.leave_alone(why, self._steps),
            )
        report.engine = engine.name
        if engine.name == "emulated" and config.compile is True:
            report.note("the emulated engine runs eager kernels: compile=True has no effect")

    # -- one step -----------------------------------------------------------------------------------

    def step(
        self,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        position: PositionInAccumulation,
        run: Callable[[Call], R],
    ) -> Replayed | Ran[R]:
        """Make one training step (or one micro-batch of it).

        Args:
            args, kwargs: what the step's function is called with.
            position: where the micro-batch stands in gradient accumulation.
            run: makes the whole step without a graph, calling the step's function through the `Call`
                that it is given, exactly once.
        """
        self._steps += 1
        self.report.steps += 1
        if self._stopped:
            return Ran(self._plainly(run))
        unit, self._choice = self._choice, None
        self._position, self._arm, self._replayed = position, _NO_GRAPH, False
        if torch.is_anomaly_enabled() or any(self._global_hooks):
            self._turn_off(ANOMALY if torch.is_anomaly_enabled() else GLOBAL_HOOK, everything=True)
            return Ran(self._plainly(run))
        if (
            saved_tensors_hooks_active()
            or is_dispatch_watched()
            or is_function_watched()
            or not self._initialized
        ):
            problem = self._watched_from_outside()
            if problem is not None:
                self._note_fallback(problem)
                return Ran(self._plainly(run))
        if self._launch_bound is not None:
            if not self._launch_bound.open:
                return Ran(self._launch_bound.run(lambda: self._plainly(run)))
            self._launch_bound = None
        if self._off is not None:
            return Ran(self._without_backward(run, unit))
        leaves: list[Any] = []
        structure = flatten((args, kwargs), leaves)
        key = key_of(structure, leaves)
        signature = self._signatures.get(key)
        if signature is not None and (no_graphs := signature.no_graphs) is not None and no_graphs.quiet:
            no_graphs.quiet -= position.fresh  # no graph of both is settled: nothing has to be checked
            self._arm = no_graphs.arm
            return Ran(self._as_the_arm_says(run))
        if signature is not None and signature.variants:
            with self.program.context():
                fn = self.program.function()
                for variant in signature.variants:
                    if not variant.trace.traced or variant.trace.holds(fn, args, kwargs):
                        break
                else:
                    variant = None
            if variant is not None:
                choice = variant.choice
                if choice is not None:
                    if choice.quiet and position.fresh:
                        choice.quiet -= 1
                    else:
                        self._take_turn(choice, unit)
                        variant.arm = choice.arm
                        settled_without = choice.controller.settled and not variant.arm.plan.forward_backward
                        signature.no_graphs = choice if settled_without else None
                self._arm = variant.arm
                if choice is not None and not variant.arm.plan.forward_backward:
                    return Ran(self._as_the_arm_says(run))
                capture = variant.captures.get(variant.capture_key(position))
                if capture is not None and not capture.gradients.fit():
                    return Ran(self._plainly(run))  # emptied in the middle of an accumulation
                if capture is not None and self._still_valid(variant, capture):
                    self._replayed = True
                    if variant.choice is None:
                        variant.choice = self._decisions.choice(variant, self._plans(), self._steps_made)
                    return self._replay(variant, capture, leaves, position)
                return self._advance(signature, variant, args, kwargs, leaves, position, run)
        return self._advance(self._meet(key), None, args, kwargs, leaves, position, run)

    def update(self, body: Callable[[], None], constants: Any = ()) -> None:
        """Make the optimizer phase of the present step, from its own graph where the plan says so.

        Args:
            body: the phase in Python: everything from here to the next step that a graph may hold.
            constants: Python values that a capture of `body` bakes in.
        """
        self._clock.mark("O")
        phase = self._phase
        if phase is None:
            return body()
        if not self._arm.plan.optimizer_alone:
            # all plans use the same kernels, and keep the state where these want it
            assert self._optimizer is not None
            with self._optimizer.prepared():
                return body()
        plan = self._arm.plan
        of_regions = (Phase.BACKWARD,) in plan.graphs
        source: Source = "graph" if plan.forward_backward else "regions" if of_regions else "autograd"
        phase.run(body, constants, source=source, step=self._steps)
        if phase.replayed:
            self.report.optimizer_steps_replayed += 1
        else:
            self._as_planned = False
        if phase.problem is not None:
            self._leave_optimizer_outside(phase.problem)

    def update_begins(self) -> None:
        """The optimizer phase begins, of a step whose adapter does not need `update`."""
        self._clock.mark("O")

    @property
    def graphs_update(self) -> bool:
        """Whether the optimizer phase of the present step has to go through `update`."""
        return self._phase is not None

    def finish(self) -> None:
        """The present step has ended, its update included."""
        choice = self._choice
        if choice is None:
            return
        choice.stop()
        plan = self._arm.plan
        if plan.regions:
            if (problem := self._regions.problem) is not None:
                self._choice = None
                self._note_fallback(problem)
                return choice.fail(str(problem))
            self._as_planned &= self._regions.as_planned()
        self._as_planned &= self._replayed or not plan.forward_backward
        if self._position.update or self.program.optimizer is None:
            self._choice = None
            choice.end(as_planned=self._as_planned)

    def _watched_from_outside(self) -> Problem | None:
        """Why this step, of which a replay would show nothing, has to run as it is."""
        if saved_tensors_hooks_active():
            return SAVED_TENSORS_HOOKS
        if is_dispatch_watched():
            return DISPATCH_MODE
        if function_modes():
            return FUNCTION_MODE
        if self._initialized:
            return None
        lazy = [name for name, p in self.program.model.named_parameters() if is_lazy(p)]
        if lazy:
            return Problem(f"{lazy[0]} has no shape yet: the first call of its module gives it one")
        self._initialized = True
        return None

    def _take_turn(self, choice: Choice, unit: Choice | None) -> None:
        """Count the step that begins; only a whole step, not a micro-batch, may switch to another arm.

        Args:
            choice: of the present micro-batch.
            unit: the choice whose step is under way, None when there is none.
        """
        if self._position.fresh or self.program.optimizer is None:
            if choice.quiet:
                choice.quiet -= 1
                return
            choice.begin()
            self._as_planned = True
        elif choice is not unit:
            return
        self._choice = choice
        choice.start()

    def _replay(
        self, variant: Variant, capture: Capture, leaves: Sequence[Any], position: PositionInAccumulation
    ) -> Replayed:
        """The hot path: inputs in, learning rate in, launch, results out."""
        assert variant.inputs is not None
        variant.inputs.load(leaves)
        capture.gradients.before_replay()
        if capture.updates and self._optimizer is not None:
            self._optimizer.sync()
        try:
            capture.graph.replay()
        except BaseException:
            if self.program.empties_first:  # as the step that fails would have left them
                capture.gradients.empty()
            raise
        capture.gradients.after_replay()
        capture.audits.left -= 1
        variant.last_used = self._steps
        variant.replays += 1
        if variant.replays == _REPLAYS_BEFORE_COMPILING:
            self._consider_compiling(variant)
        self._clock.replayed(self._steps)
        return Replayed(capture.outputs(leaves), capture.updates)

    def _still_valid(self, variant: Variant, capture: Capture) -> bool:
        """Everything that the guards do not cover: addresses, optimizer state, hyperparameters."""
        if not capture.verified:
            return False
        if capture.audits.left <= 0 and capture.audits.due(time.perf_counter()):
            return False
        if not same_memory(variant.trace.latest_tensors, capture):
            return False
        if capture.rebound and not self._maker.anchors.hold(capture.rebound):
            return False
        registrations = hook_registrations()
        if registrations != capture.hook_registrations:
            if hooked(capture.gradients.parameters):
                return False
            capture.hook_registrations = registrations
        optimizer = self._optimizer
        if capture.updates and optimizer is not None:
            return (
                capture.optimizer_generation == optimizer.generation
                and optimizer.state_unchanged()
                and optimizer.hyperparameters() == capture.hyperparameters
            )
        return True

    def _consider_compiling(self, variant: Variant) -> None:
        """A variant that is used a lot deserves the kernels that were asked for after all."""
        if variant.compiled is None and self._decisions.compiles and self.config.compile is True:
            variant.choice, variant.compile_next = None, True
            variant.forget_captures()

    # -- the way to a capture -----------------------------------------------------------------------

    def _meet(self, key: Key) -> Signature:
        signature = self._signatures.setdefault(key, Signature(key))
        self._signatures.move_to_end(key)
        if self._first is None:
            self._first = signature
        while len(self._signatures) > _MOST_SIGNATURES:  # shapes that never come back leave no trace
            oldest = next(k for k, s in self._signatures.items() if s is not self._first)
            for variant in self._signatures.pop(oldest).variants:
                variant.forget_captures()
        return signature

    def _advance(
        self,
        signature: Signature,
        variant: Variant | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        leaves: list[Any],
        position: PositionInAccumulation,
        run: Callable[[Call], R],
    ) -> Replayed | Ran[R]:
        """One step on the way from an unknown signature to a replayable capture."""
        signature.seen += 1
        if not self._begun and (problem := self._begin()) is not None:
            self._turn_off(
                problem, asked="off" in (self.config.forward, self.config.backward, self.config.fuse)
            )
            return Ran(self._without_backward(run, None))
        if signature.off is not None or (variant is not None and variant.off is not None):
            return Ran(self._plainly(run))
        if signature is not self._first and signature.seen <= self.config.warmup_steps:
            return Ran(self._plainly(run))  # it may never come back
        if variant is None:
            variant = self._new_variant(signature, args, kwargs, leaves)
            if variant is None:
                return Ran(self._plainly(run))
        if variant.watched < self.config.warmup_steps:
            return Ran(self._watch(signature, variant, args, kwargs, leaves, run))
        if self._optimizer is None and self.program.optimizer is not None:
            self._prepare_optimizer()
        if variant.choice is None:
            variant.arm = self._decisions.arms(variant, self._plans())[0]
            if not variant.arm.plan.forward_backward:  # an earlier run knew better than to capture
                variant.choice = self._decisions.choice(variant, self._plans(), self._steps_made)
        self._arm = variant.arm
        if not variant.arm.plan.forward_backward:
            return Ran(self._as_the_arm_says(run))
        capture = variant.captures.get(variant.capture_key(position))
        if capture is not None and hooked(capture.gradients.parameters):
            variant.forget_captures()
        elif capture is not None:
            self._check_moves(variant, capture, args, kwargs)
        if variant.off is not None:
            return Ran(self._plainly(run))
        place = variant.capture_key(position)
        if variant.arm.compiled and variant.compiled is None:
            return Ran(self._compile(variant, (args, kwargs), run, position))
        if place not in variant.captures and not self._ready_to_capture(variant, position):
            return Ran(self._run_prepared(variant, run, position))
        expected = None
        if place not in variant.captures:
            try:
                expected = self._capture(variant, args, kwargs, leaves, position)
            except NotLegal as refused:
                return Ran(self._give_up(variant, refused.problem, run))
        capture = variant.captures[variant.capture_key(position)]
        if capture.verified and not capture.audits.due(time.perf_counter()):
            return self._replay(variant, capture, leaves, position)
        return self._first_replay(variant, capture, args, kwargs, leaves, position, expected, run)

    def _give_up(self, variant: Variant, problem: Problem, run: Callable[[Call], R]) -> R:
        """The present arm cannot be kept. Makes the step without a graph."""
        self._arm, self._choice = _NO_GRAPH, None
        if variant.choice is None:
            variant.forget_captures()
            variant.off = problem
        else:
            variant.keep_captures_of(variant.choice.controller.best)
            variant.choice.fail(str(problem))
        return self._fall_back(problem, run)

    def _without_backward(self, run: Callable[[Call], R], unit: Choice | None) -> R:
        """A step whose forward and backward run without a graph: the optimizer may still have one."""
        if self._optimizer is None and self.program.optimizer is not None:
            self._prepare_optimizer()
        if self._rest is None:
            if self._regions.problem is None and not self._regions.found:
                return self._in_regions(run)
            if (problem := self._regions.problem) is not None:
                self.report.note(f"{problem.reason}" if not problem.fix else str(problem))
            plans = self._plans(forward_backward=False)
            if len(plans) == 1 and not plans[0].graphs:
                return self._plainly(run)
            self._rest = self._decisions.choice(None, plans, self._steps_made)
        self._take_turn(self._rest, unit)
        self._arm = self._rest.arm
        return self._as_the_arm_says(run)

    def _release(self, arm: Arm) -> None:
        """Let go of what only other arms than this one, which is settled, have used."""
        if self._phase is not None and not arm.plan.optimizer_alone:
            self._phase.close()
        captures = [place for s in self._signatures.values() for v in s.variants for place in v.captures]
        for compiled, gradients in self._maker.canonical_gradients.items():
            if not any(place[2] == compiled for place in captures):
                gradients.clear()

    def _steps_made(self) -> int:
        return self._steps

    def _plans(self, *, forward_backward: bool = True) -> tuple[Plan, ...]:
        return legal_plans(
            self.config,
            forward_backward=forward_backward,
            optimizer=self._phase is not None,
            between=self._between is not None,
            regions=self._regions.problem is None,
        )

    def _begin(self) -> Problem | None:
        """On the first step: why forward and backward cannot be in a graph at all."""
        self._begun = True
        config = self.config
        off = [f"{p}='off'" for p in ("forward", "backward") if getattr(config, p) == "off"]
        if off:
            return Problem(f"{', '.join(off)} was asked for: forward and backward share no graph")
        if config.fuse == "off":
            return Problem("fuse='off' was asked for: forward and backward share no graph")
        return self.program.acts_before_backward() or backward_hook(self.program.model)

    def _new_variant(
        self, signature: Signature, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: Sequence[Any]
    ) -> Variant | None:
        """A variant for a call that no trace of this signature holds for; None when there were too many."""
        problem = unsupported_leaf(args, kwargs, leaves)
        if problem is None and signature.variants:
            signature.retraces += 1
            paid = sum(v.replays for v in signature.variants) // _REPLAYS_PER_RETRACE
            if signature.retraces - paid > _MOST_RETRACES:
                with self.program.context():
                    problem = signature.variants[0].trace.why_not(self.program.function(), args, kwargs)
        if problem is not None:
            signature.off = problem
            if signature is self._first:
                self._turn_off(problem)
            else:
                self._note_fallback(problem)
            return None
        variant = Variant(Trace(self.program.device, recorder=self.program.recorder), key=signature.key)
        variant.compile_next = (
            self.config.compile is True and self._decisions.compiles and signature is self._first
        )
        signature.variants.insert(0, variant)
        return variant

    def _watch(
        self,
        signature: Signature,
        variant: Variant,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        leaves: list[Any],
        run: Callable[[Call], R],
    ) -> R:
        """Run through Dynamo with eager kernels: the cheap way to find out what the step is made of."""
        first = variant.watched == 0
        versions = _versions(leaves)
        with self._optimizer_context(), self._warm_up(), self._clock.ungraphed():
            result = run(self._watched(variant))
        variant.seen_in_warmup(self._times.ungraphed)
        problem = variant.trace.problem
        if problem is None and first:
            problem = self._read_leaves(variant, args, kwargs, leaves)
        if problem is None and versions != _versions(leaves):
            problem = Problem("the step changes its batch in place, which a replay would do to a copy")
        if problem is None:
            variant.watched += 1
        elif first and not variant.looked_twice:
            # first calls set things up (caches, hooks, flags): what the second one does counts
            variant.looked_twice = True
            variant.trace = Trace(self.program.device, recorder=self.program.recorder)
        else:
            variant.off = problem
            if signature is self._first:
                self._turn_off(problem)
            else:
                self._note_fallback(problem)
        return result

    def _read_leaves(
        self, variant: Variant, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[Any]
    ) -> Problem | None:
        """Which leaves the traced step reads; a tensor that hides inside another object is refused."""
        fn = self.program.function()
        try:
            reads = variant.trace.argument_tensors(fn, args, kwargs)
            state = variant.trace.tensors(fn, args, kwargs)
        except Exception as error:  # Dynamo's own names, for NumPy arrays and other things it converts
            return Problem(
                f"the step makes tensors of NumPy arrays or other objects ({error})",
                fix="Make tensors of them before the step",
            )
        if (problem := history(variant.trace, state)) is not None:
            return problem
        known = {id(leaf) for leaf in leaves}
        for expression, tensor in reads:
            if id(tensor) not in known:
                return Problem(
                    f"{expression} is a tensor inside an object that is not a dict, list, tuple or dataclass",
                    fix="Pass batches as plain containers of tensors",
                )
        read = {id(tensor) for _, tensor in reads}
        variant.used = [isinstance(leaf, Tensor) and id(leaf) in read for leaf in leaves]
        return None

    def _watched(self, variant: Variant) -> Call:
        """The trace, and whether forward writes parameters in place (Embedding(max_norm=...) does)."""

        def call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            parameters = list(self.program.model.parameters())
            before = _versions(parameters)
            moves = Moves([*parameters, *self.program.model.buffers()])
            try:
                result = variant.trace(fn, args, kwargs)
                self._clock.mark("B")
            except NotLegal as refused:  # nothing was executed: the step goes on, what came before it is done
                variant.trace.problem = refused.problem
                return fn(*args, **kwargs)
            variant.writes_parameters |= variant.trace.writes_state or before != _versions(parameters)
            if moves.found() and not variant.trace.rebound and variant.trace.problem is None:
                variant.trace.problem = UNSEEN_MOVE
            return result

        return call

    def _prepare_optimizer(self) -> None:
        """From the first legal step on, every optimizer step uses the kernels that graphs will hold."""
        assert self.program.optimizer is not None
        emulated = self.engine.name == "emulated"
        tried = is_unknown(self.program.optimizer)
        kind = OptimizerTrial if tried else OptimizerPreparation
        optimizer = kind(self.program.optimizer, emulated=emulated)
        self._optimizer = optimizer
        if self.config.optimizer == "off":
            optimizer.close()
            return
        reason = optimizer.reason or self.program.why_update_stays_outside(optimizer)
        if reason is not None:
            optimizer.close()
            if self._off is None:  # else nothing is in a graph, and that has its own reason
                self._note_fallback(Problem(f"the optimizer runs outside of the graph: {reason}"))
            return
        self._phase = OptimizerPhase(self.program, optimizer, self.engine, self.config, self.report)
        self._between = self.program.acts_before_update()
        if tried and self._between is None:
            self._between = (
                f"{type(self.program.optimizer).__qualname__} is none of torch.optim's, and is tried"
            )
        if self._fusable:
            optimizer.settle()
        elif self._off is None:
            self._note_fallback(Problem(f"the optimizer has a graph of its own: {self._between}"))

    @property
    def _fusable(self) -> bool:
        """Whether graphs of the backward may hold the optimizer's step."""
        return self._phase is not None and self._off is None and WHOLE in self._plans()

    def _warm_up(self) -> AbstractContextManager[None]:
        """Context of a run without a graph before a capture."""
        return self.engine.warm_up(self._maker.owned() if self._position.fresh else ())

    def _run_prepared(
        self, variant: Variant, run: Callable[[Call], R], position: PositionInAccumulation
    ) -> R:
        """An ordinary run with the kernels that the capture will use."""
        with self._optimizer_context(), self._warm_up(), self._clock.ungraphed():
            result = run(self._marked(self._call_of(variant)))
        variant.seen_in_warmup(self._times.ungraphed)
        variant.prepared_runs += 1
        if position.update and self._optimizer is not None:
            self._prepared_updates += 1
            self._optimizer.state.leave()
        return result

    def _marked(self, call: Call) -> Call:
        """`call`, with a mark where the backward begins."""

        def marked(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            result = call(fn, args, kwargs)
            self._clock.mark("B")
            return result

        return marked

    def _call_of(self, variant: Variant) -> Call:
        """How the step is run where its graph's kernels are wanted.

        Through Dynamo's graph also with eager kernels: models look at whether a stream is capturing and
        take other branches then, so the function run anew in a capture need not be the one that was traced.
        The emulated engine records the function itself: its modes would make Dynamo trace again.
        """
        if variant.arm.compiled and variant.compiled is not None:
            return variant.compiled
        return variant.trace if self.engine.name == "cuda" else plain_call

    def _ready_to_capture(self, variant: Variant, position: PositionInAccumulation) -> bool:
        if variant.prepared_runs < _RUNS_BEFORE_CAPTURE:
            return False
        if not position.fresh and not self._maker.canonical_gradients[variant.arm.compiled]:
            # the graph of the first micro-batch is to own the gradients, if there is one
            return variant.prepared_runs >= _RUNS_BEFORE_CAPTURE + _MOST_MICRO_BATCHES
        if not variant.arm.plan.fused:
            return True
        assert self._optimizer is not None
        return self._prepared_updates > 0 and self._optimizer.state.as_left()  # the optimizer's state exists

    def _compile(
        self,
        variant: Variant,
        fn_args: tuple[Any, Any],
        run: Callable[[Call], R],
        position: PositionInAccumulation,
    ) -> R:
        """The step in which Inductor works. A failure costs its time, not the step."""
        self._announce("compiling the training step with Inductor, which may take a minute")
        variant.compile_next = False
        variant.prepared_runs = 0
        from pygraph_train.regions.inductor import compile_whole  # which imports much

        variant.compiled = Trace(self.program.device, compiler=compile_whole, recorder=self.program.recorder)
        gradients = self._maker.gradients(variant, *fn_args, position)
        gradients.empty()
        before = gradients.snapshot()
        scratch = ScratchState(self.program.device, self._maker.beside_parameters(variant, *fn_args))
        moves = self._maker.moves(variant, *fn_args)
        gradients.isolate()
        try:
            with self._clock.compiling():
                result = self._run_prepared(variant, run, position)
        except Exception as error:
            problem = compiler_problem(error)
            if problem is None:
                raise
            variant.compiled = None
            self._decisions.compiles = False
            moves.put_back()
            scratch.restore()
            gradients.restore(before)
            self.program.abandon()
            if variant.choice is not None:
                return self._give_up(variant, problem, run)
            variant.arm = self._decisions.arms(variant, self._plans())[0]
            self._note_fallback(problem)
            return self._run_prepared(variant, run, position)
        for text in variant.compiled.left:
            self.report.note(text)
        return result

    def _capture(
        self,
        variant: Variant,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        leaves: list[Any],
        position: PositionInAccumulation,
    ) -> Fingerprint | None:
        """Capture the step. Returns what the first replay must reproduce, None without verification.

        Raises:
            NotLegal: it cannot be captured. Nothing was executed, Python state is as before.
        """
        started = time.perf_counter()
        if not self._captured:
            self._captured = True
            self._announce(f"capturing the training step as {variant.arm.plan}")
        if variant.arm.plan.fused:
            assert self._optimizer is not None
            reason = self._optimizer.reason  # a hook was registered in mid-run
            reason = reason or self.program.why_update_stays_outside(self._optimizer)
            if reason is not None:
                self._leave_optimizer_outside(Problem(f"the optimizer runs outside of the graph: {reason}"))
            self._optimizer.settle()
        if len({p.constants for p, _, _ in variant.captures}) > _MOST_RETRACES:
            raise NotLegal(
                Problem(f"Python values of the training loop change again and again: {position.constants}")
            )
        self._make_room(variant)
        capture, expected = self._maker.make(
            variant, self._call_of(variant), args, kwargs, leaves, position, self._optimizer
        )
        variant.captures[variant.capture_key(position)] = capture
        seconds = time.perf_counter() - started
        what = str(position if variant.arm.plan.fused else position.without_update())
        if variant.choice is None:
            self.report.plan = str(variant.arm.plan)
        self.report.captured(
            CaptureRecord(what, seconds, capture.graph.nodes, variant.arm.compiled, self._steps)
        )
        self._clock.interrupted()
        log.info("pygraph: captured %s in %.2f s (%d nodes)", what, seconds, capture.graph.nodes)
        return expected

    def _first_replay(
        self,
        variant: Variant,
        capture: Capture,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        leaves: list[Any],
        position: PositionInAccumulation,
        expected: Fingerprint | None,
        run: Callable[[Call], R],
    ) -> Replayed | Ran[R]:
        """A replay that must give what the step gives without a graph; else it is undone."""
        started = time.perf_counter()
        if expected is None:
            # with the batch itself: what loads the graph's inputs is compared as well
            expected = self._maker.reference(
                variant, capture.gradients, self._call_of(variant), args, kwargs, updates=capture.updates
            )
        before = capture.gradients.snapshot()
        backup = self._maker.backup(variant, capture, args, kwargs, self._optimizer)
        replayed = self._replay(variant, capture, leaves, position)
        found = Fingerprint.of(capture.loss, capture.gradients.final)
        difference = expected.compare(found, bits=self.engine.name == "emulated")
        self.engine.trim()
        seconds = time.perf_counter() - started
        self.report.verify_seconds += seconds
        self._clock.interrupted()
        capture.audits.took(seconds, first=not capture.verified)
        self.report.audits += capture.verified
        if difference is None:
            capture.verified = True
            return replayed
        backup.restore()
        capture.gradients.restore(before)
        self._clock.undone()
        which = f"replay {variant.replays}" if capture.verified else "the first replay"
        problem = Problem(
            f"{which} of {position} differs from the step without a graph: {difference}",
            fix="Please report this; the step runs without a graph",
        )
        log.warning("pygraph: %s", problem)
        return Ran(self._give_up(variant, problem, run))

    # -- changes that captures do not survive -------------------------------------------------------

    def _check_moves(
        self, variant: Variant, capture: Capture, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Drop captures that rest on something that has changed; stop when it changes all the time."""
        optimizer = self._optimizer
        allowed = _MOST_RETRACES + variant.replays // _REPLAYS_PER_RETRACE
        tensors = variant.trace.tensors(self.program.function(), args, kwargs)
        lent = not self._maker.anchors.adopt(capture.rebound)
        if lent or not same_memory(tensors, capture):
            variant.moves += 1
            leaves = set(map(id, capture.leaves))
            moved = next(
                (
                    expression
                    for expression, tensor, address in zip(
                        variant.trace.inputs, tensors, capture.addresses, strict=True
                    )
                    if tensor.data_ptr() != address or (tensor.requires_grad and id(tensor) not in leaves)
                ),
                None,
            )
            variant.forget_captures()
            if variant.moves > allowed:
                fn = self.program.function()
                variant.off = (
                    Problem(
                        "memory of a tensor that the step rebinds (`.data = ...`) is held again and again"
                    )
                    if moved is None
                    else Problem(f"{readable(moved, fn)} lives at a new address again and again")
                )
                self._note_fallback(variant.off)
        elif capture.updates and optimizer is not None:
            if capture.optimizer_generation != optimizer.generation or not optimizer.state_unchanged():
                variant.forget_captures()
                self._prepared_updates = 0
                self._optimizer_changes += 1
                if self._optimizer_changes > allowed:
                    self._leave_optimizer_outside(
                        Problem(
                            "the optimizer runs outside of the graph: its state is replaced again and again"
                        )
                    )
            elif optimizer.hyperparameters() != capture.hyperparameters:
                variant.forget_captures()
                self._optimizer_changes += 1
                if self._optimizer_changes > allowed:
                    self._leave_optimizer_outside(
                        Problem(
                            "the optimizer runs outside of the graph: a hyperparameter other than the learning "
                            "rate changes again and again (betas or momentum under OneCycleLR, for example)",
                            fix="OneCycleLR(cycle_momentum=False) keeps it in the graph",
                        )
                    )

    def _leave_optimizer_outside(self, problem: Problem) -> None:
        self._close_optimizer()
        self._rest = self._choice = None
        self._arm = _NO_GRAPH
        self.report.start_over()
        for signature in self._signatures.values():
            for variant in signature.variants:
                variant.forget_captures()
                variant.choice, variant.arm = None, self._decisions.arms(variant, self._plans())[0]
        if self._off is None:
            self.report.plan = str(self._plans()[0])
        self._note_fallback(problem)

    def _make_room(self, variant: Variant) -> None:
        """Release the least recently used captures above `max_signatures`.

        Raises:
            NotLegal: all of them were used a moment ago; capturing in turn would cost more than it gives.
        """
        holders = [
            v for s in self._signatures.values() for v in s.variants if v.captures and v is not variant
        ]
        if len(holders) < self.config.max_signatures:
            return
        oldest = min(holders, key=lambda v: v.last_used)
        if self._steps - oldest.last_used < 4 * self.config.max_signatures:
            raise NotLegal(
                Problem(
                    f"{self.config.max_signatures} other input signatures are in use",
                    fix="Raise PyGraphConfig.max_signatures, or pad batches to fewer shapes",
                )
            )
        oldest.forget_captures()
        oldest.inputs = None

    # -- without a graph ----------------------------------------------------------------------------

    def _plainly(self, run: Callable[[Call], R]) -> R:
        with self._optimizer_context():
            return run(plain_call)

    def _as_the_arm_says(self, run: Callable[[Call], R]) -> R:
        """A step whose forward and backward share no graph."""
        return self._in_regions(run) if self._arm.plan.regions else self._plainly(run)

    def _in_regions(self, run: Callable[[Call], R]) -> R:
        with self._optimizer_context():
            return self._regions.run(run, watched=self._choice is not None)

    def _fall_back(self, problem: Problem, run: Callable[[Call], R]) -> R:
        self._note_fallback(problem)
        return self._plainly(run)

    def _note_fallback(self, problem: Problem, *, asked: bool = False) -> None:
        """Note it; what was asked for is no failure."""
        if self.report.fell_back(Fallback(problem.reason, problem.where, problem.fix, self._steps)):
            wanted = "on" in (
                self.config.forward,
                self.config.backward,
                self.config.optimizer,
                self.config.fuse,
            )
            level = logging.WARNING if wanted else logging.INFO
            log.log(level, "pygraph: step %d runs without a graph: %s", self._steps, problem)
        if self.config.on_failure == "raise" and not asked:
            raise PyGraphError(str(problem))

    def _turn_off(self, problem: Problem, *, everything: bool = False, asked: bool = False) -> None:
        """No graph of forward and backward from now on, and with `everything` none of the optimizer."""
        self._off = problem
        self.report.start_over()
        if everything:
            self._stopped = True
            self._close_optimizer()
        self._note_fallback(problem, asked=asked)

    def _optimizer_context(self) -> AbstractContextManager[None]:
        return self._optimizer.prepared() if self._optimizer is not None and self._fusable else nullcontext()

    def _close_optimizer(self) -> None:
        if self._phase is not None:
            self._phase.close()
            self._phase = None
        if self._optimizer is not None:
            self._optimizer.close()

    @property
    def stopped(self) -> bool:
        """Whether every further step runs without a graph of forward and backward."""
        return self._off is not None

    def stop(self, problem: Problem) -> None:
        """Run every further step without a graph, and say why."""
        self._turn_off(problem, everything=True)

    def close(self) -> None:
        """Release every graph and give the optimizer back as it was."""
        for signature in self._signatures.values():
            for variant in signature.variants:
                variant.forget_captures()
        self._signatures.clear()
        self._regions.close()
        self._close_optimizer()
        self._off = self._off or Problem("the runner was closed")
        self._stopped = True
        self.engine.close()


def _versions(leaves: Sequence[Any]) -> list[int]:
    """Counters of in-place changes; inference tensors have none."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    return [0 if t.is_inference() else tensor_version(t) for t in tensors]
