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

from pygraph_train import torch_internals
from pygraph_train.config import PyGraphConfig
from pygraph_train.diagnose.report import CaptureRecord, Fallback, StepReport
from pygraph_train.graphs.engine import Engine
from pygraph_train.step.clock import Clock
from pygraph_train.step.gradients import Gradients
from pygraph_train.step.inputs import StaticInputs
from pygraph_train.step.legality import NotLegal, Problem, Trace, backward_hook, hooked, readable
from pygraph_train.step.optimizer import OptimizerPreparation
from pygraph_train.step.outputs import Outputs
from pygraph_train.step.plan import NOTHING, WHOLE, Plan, PositionInAccumulation, plan_of
from pygraph_train.step.program import Call, StepProgram, plain_call
from pygraph_train.step.refusals import (
    ANOMALY,
    GLOBAL_HOOK,
    compiler_problem,
    history,
    problem_of,
    unsupported_leaf,
)
from pygraph_train.step.signature import Key, flatten, key_of
from pygraph_train.step.variants import Capture, Signature, Variant, picker, same_memory
from pygraph_train.step.verify import Fingerprint, HostCopy, ScratchState

__all__ = ["PyGraphError", "Ran", "Replayed", "StepRunner"]

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


class PyGraphError(RuntimeError):
    """A step could not run from a graph and `on_failure="raise"` was asked for."""


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
    """

    def __init__(
        self,
        program: StepProgram,
        config: PyGraphConfig,
        engine: Engine,
        report: StepReport,
        steps_left: Callable[[], float | None] = lambda: None,
    ) -> None:
        self.program = program
        self.config = config
        self.engine = engine
        self.report = report
        self._steps_left = steps_left
        self._signatures: OrderedDict[Key, Signature] = OrderedDict()
        self._first: Signature | None = None
        self._optimizer: OptimizerPreparation | None = None
        self._plan: Plan | None = None
        self._off: Problem | None = None
        self._prepared_updates = 0
        self._hyperparameter_changes = 0
        self._canonical_gradients: dict[Tensor, Tensor] = {}
        self._compiles = engine.name == "cuda"
        self._steps = 0
        self._global_hooks = torch_internals.global_module_hook_tables()
        self._clock = Clock(engine, report)
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
        if self._off is not None:
            return Ran(self._plainly(run))
        if torch.is_anomaly_enabled() or any(self._global_hooks):
            self._turn_off(ANOMALY if torch.is_anomaly_enabled() else GLOBAL_HOOK)
            return Ran(self._plainly(run))
        leaves: list[Any] = []
        structure = flatten((args, kwargs), leaves)
        key = key_of(structure, leaves)
        signature = self._signatures.get(key)
        if signature is not None and signature.variants:
            with self.program.context():
                fn = self.program.function()
                for variant in signature.variants:
                    if not variant.trace.traced or variant.trace.holds(fn, args, kwargs):
                        break
                else:
                    variant = None
            if variant is not None:
                capture = variant.captures.get(position)
                if capture is not None and not capture.gradients.fit():
                    return Ran(self._plainly(run))  # emptied in the middle of an accumulation
                if capture is not None and self._still_valid(variant, capture):
                    return self._replay(variant, capture, leaves, position)
                return self._advance(signature, variant, args, kwargs, leaves, position, run)
        return self._advance(self._meet(key), None, args, kwargs, leaves, position, run)

    def _replay(
        self, variant: Variant, capture: Capture, leaves: Sequence[Any], position: PositionInAccumulation
    ) -> Replayed:
        """The hot path: inputs in, learning rate in, launch, results out."""
        assert variant.inputs is not None
        variant.inputs.load(leaves)
        capture.gradients.before_replay()
        if capture.updates and self._optimizer is not None:
            self._optimizer.sync()
        capture.graph.replay()
        capture.gradients.after_replay()
        variant.last_used = self._steps
        variant.replays += 1
        if variant.replays == _REPLAYS_BEFORE_COMPILING:
            self._consider_compiling(variant)
        self._clock.replayed(self._steps)
        return Replayed(capture.outputs(leaves), capture.updates)

    def _still_valid(self, variant: Variant, capture: Capture) -> bool:
        """Everything that the guards do not cover: addresses, optimizer state, hyperparameters."""
        if not capture.verified or self.config.verify == "always":
            return False
        if not same_memory(variant.trace.latest_tensors, capture):
            return False
        registrations = torch_internals.hook_registrations()
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
        """A variant that is used a lot may deserve Inductor's kernels after all."""
        if variant.compiled is not None or not self._compiles or self.config.compile is False:
            return
        if self.config.compile is True or self._clock.compiling_pays(self._steps_left()):
            variant.compile_next = True
            variant.forget_captures()

    # -- the way to a capture -----------------------------------------------------------------------

    def _meet(self, key: Key) -> Signature:
        signature = self._signatures.setdefault(key, Signature())
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
        if self._plan is None and (problem := self._begin()) is not None:
            self._turn_off(problem)
        if (
            self._off is not None
            or signature.off is not None
            or (variant is not None and variant.off is not None)
        ):
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
        if (capture := variant.captures.get(position)) is not None and hooked(capture.gradients.parameters):
            variant.forget_captures()
        elif capture is not None:
            self._check_moves(variant, capture, args, kwargs)
        if variant.off is not None:
            return Ran(self._plainly(run))
        if variant.compile_next:
            return Ran(self._compile(variant, (args, kwargs), run, position))
        if position not in variant.captures and not self._ready_to_capture(variant, position):
            return Ran(self._run_prepared(variant, run, position))
        expected = None
        if position not in variant.captures:
            try:
                expected = self._capture(variant, args, kwargs, leaves, position)
            except NotLegal as refused:
                variant.forget_captures()
                variant.off = refused.problem
                return Ran(self._fall_back(refused.problem, run))
        capture = variant.captures[position]
        if capture.verified and self.config.verify != "always":
            return self._replay(variant, capture, leaves, position)
        return self._first_replay(variant, capture, args, kwargs, leaves, position, expected, run)

    def _begin(self) -> Problem | None:
        """Decide the plan on the first step. Returns why nothing can be graphed at all."""
        self._plan = plan_of(self.config, optimizer_capturable=self.program.optimizer is not None)
        if self._plan == NOTHING:
            off = [f"{p}='off'" for p in ("forward", "backward") if getattr(self.config, p) == "off"]
            return Problem(
                f"{', '.join(off or ['fuse=' + repr('off')])} was asked for, and forward and backward are "
                "captured together or not at all"
            )
        return backward_hook(self.program.model)

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
        variant = Variant(Trace(self.program.device, recorder=self.program.recorder))
        variant.compile_next = self.config.compile is True and self._compiles and signature is self._first
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
        with self._optimizer_context(), self.engine.warm_up(), self._clock.ungraphed():
            result = run(self._watched(variant))
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
            try:
                result = variant.trace(fn, args, kwargs)
            except NotLegal as refused:  # nothing was executed: the step goes on, what came before it is done
                variant.trace.problem = refused.problem
                return fn(*args, **kwargs)
            variant.writes_parameters |= before != _versions(parameters)
            return result

        return call

    def _prepare_optimizer(self) -> None:
        """From the first legal step on, every optimizer step uses the kernels that graphs will hold."""
        assert self.program.optimizer is not None
        optimizer = OptimizerPreparation(self.program.optimizer, emulated=self.engine.name == "emulated")
        reason = optimizer.reason or self.program.why_update_stays_outside(optimizer)
        self._plan = plan_of(self.config, optimizer_capturable=reason is None)
        self._optimizer = optimizer
        if self._plan == WHOLE:
            optimizer.settle()
        else:
            optimizer.close()
            if self.config.optimizer != "off":
                self._note_fallback(Problem(f"the optimizer runs outside of the graph: {reason}"))

    @property
    def _updates(self) -> bool:
        """Whether graphs hold the optimizer's step."""
        return self._plan == WHOLE and self._optimizer is not None

    def _run_prepared(
        self, variant: Variant, run: Callable[[Call], R], position: PositionInAccumulation
    ) -> R:
        """An ordinary run with the kernels and the stream that the capture will use."""
        with self._optimizer_context(), self.engine.warm_up(), self._clock.ungraphed():
            result = run(self._call_of(variant))
        variant.prepared_runs += 1
        self._prepared_updates += position.update
        return result

    def _call_of(self, variant: Variant) -> Call:
        """How the step is run where its graph's kernels are wanted.

        Through Dynamo's graph also with eager kernels: models look at whether a stream is capturing and
        take other branches then, so the function run anew in a capture need not be the one that was traced.
        The emulated engine records the function itself: its modes would make Dynamo trace again.
        """
        if variant.compiled is not None:
            return variant.compiled
        return variant.trace if self.engine.name == "cuda" else plain_call

    def _ready_to_capture(self, variant: Variant, position: PositionInAccumulation) -> bool:
        if variant.prepared_runs < _RUNS_BEFORE_CAPTURE:
            return False
        if not position.fresh and not self._canonical_gradients:
            # the graph of the first micro-batch is to own the gradients, if there is one
            return variant.prepared_runs >= _RUNS_BEFORE_CAPTURE + _MOST_MICRO_BATCHES
        return not self._updates or self._prepared_updates > 0  # the optimizer's state exists

    def _compile(
        self,
        variant: Variant,
        fn_args: tuple[Any, Any],
        run: Callable[[Call], R],
        position: PositionInAccumulation,
    ) -> R:
        """The step in which Inductor works. A failure costs its time, not the step."""
        variant.compile_next = False
        variant.forget_captures()
        variant.compiled = Trace(self.program.device, inductor=True, recorder=self.program.recorder)
        gradients = self._gradients(variant, *fn_args, position)
        gradients.empty()
        before = gradients.snapshot()
        scratch = ScratchState(self.program.device, self._beside_parameters(variant, *fn_args))
        gradients.isolate()
        try:
            with self._clock.compiling():
                return self._run_prepared(variant, run, position)
        except Exception as error:
            problem = compiler_problem(error)
            if problem is None:
                raise
            variant.compiled = None
            scratch.restore()
            gradients.restore(before)
            self.program.abandon()
            self._note_fallback(problem)
            return self._run_prepared(variant, run, position)

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
        if self._updates:
            assert self._optimizer is not None
            if (reason := self._optimizer.reason) is not None:  # a hook was registered in mid-run
                self._leave_optimizer_outside(Problem(f"the optimizer runs outside of the graph: {reason}"))
            self._optimizer.settle()
        call = self._call_of(variant)
        updates = self._updates and position.update
        program = self.program
        reads = variant.trace.tensors(program.function(), args, kwargs)
        gradients = self._gradients(variant, args, kwargs, position)
        problem = history(variant.trace, reads)
        if problem is None and hooked(gradients.parameters):
            problem = backward_hook(program.model) or Problem("a parameter has a gradient hook")
        if len({p.constants for p in variant.captures}) > _MOST_RETRACES:
            problem = Problem(
                f"Python values of the training loop change again and again: {position.constants}"
            )
        if problem is not None:
            raise NotLegal(problem)
        gradients.begin()
        gradients.empty()  # as the step would; the memory of old gradients is wanted now
        before = gradients.snapshot()
        static_leaves: list[Any] = []

        def body() -> tuple[Tensor, Outputs]:
            gradients.empty()
            loss, tree = program.forward(call, static_args, static_kwargs)
            program.backward(loss)
            if updates:
                program.transform_gradients()
                program.update()
            gradients.settle()
            return loss.detach(), Outputs(tree, static_leaves, reads)

        try:
            if variant.inputs is None:
                variant.inputs = StaticInputs(leaves, variant.used)
            variant.inputs.load(leaves)
            static_args, static_kwargs = variant.inputs.tree((args, kwargs))
            flatten((static_args, static_kwargs), static_leaves)
            if isinstance(call, Trace):
                with program.context():
                    if not call.holds(program.function(), static_args, static_kwargs):
                        raise NotLegal(call.why_not(program.function(), static_args, static_kwargs))
            expected = None
            if self.config.verify != "off":
                expected = self._reference(
                    variant, gradients, call, static_args, static_kwargs, updates=updates
                )
            self._make_room(variant)
            with self._optimizer_context():
                graph, (loss, outputs) = self.engine.capture(body)
        except BaseException as error:
            gradients.restore(before)
            program.abandon()
            if not isinstance(error, Exception):
                raise  # Ctrl-C and the like: the caller's business, with everything in order
            raise NotLegal(problem_of(error)) from error
        program.abandon()
        gradients.claim()
        optimizer = self._optimizer
        if optimizer is not None:
            optimizer.remember()
        variant.captures[position] = Capture(
            graph=graph,
            loss=loss,
            outputs=outputs,
            gradients=gradients,
            updates=updates,
            hyperparameters=optimizer.hyperparameters() if optimizer is not None and updates else None,
            optimizer_generation=optimizer.generation if optimizer is not None else 0,
            leaves=[t for t in reads if t.requires_grad],
            pick_leaves=picker([i for i, t in enumerate(reads) if t.requires_grad]),
            addresses=list(map(Tensor.data_ptr, reads)),
            verified=self.config.verify == "off",
            hook_registrations=torch_internals.hook_registrations(),
        )
        seconds = time.perf_counter() - started
        self.report.plan = str(self._plan)
        self.report.captured(
            CaptureRecord(str(position), seconds, graph.nodes, variant.compiled is not None, self._steps)
        )
        self._clock.interrupted()
        log.info("pygraph: captured %s in %.2f s (%d nodes)", position, seconds, graph.nodes)
        return expected

    def _reference(
        self,
        variant: Variant,
        gradients: Gradients,
        call: Call,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        updates: bool,
    ) -> Fingerprint:
        """Loss and gradients of this step without a graph; everything else is put back."""
        before = gradients.snapshot()
        scratch = ScratchState(self.program.device, self._beside_parameters(variant, args, kwargs))
        try:
            with self._optimizer_context(), self.engine.warm_up():
                gradients.empty()
                gradients.isolate()
                loss, _ = self.program.forward(call, args, kwargs)
                self.program.backward(loss)
                if updates:
                    self.program.transform_gradients(in_kernels=False)
                return Fingerprint.of(loss.detach(), gradients.snapshot())
        finally:
            scratch.restore()
            gradients.restore(before)
            self.program.abandon()

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
        assert variant.inputs is not None
        if expected is None:
            variant.inputs.load(leaves)
            static_args, static_kwargs = variant.inputs.tree((args, kwargs))
            call = self._call_of(variant)
            expected = self._reference(
                variant, capture.gradients, call, static_args, static_kwargs, updates=capture.updates
            )
        before = capture.gradients.snapshot()
        written = self._beside_parameters(variant, args, kwargs)
        if capture.updates and self._optimizer is not None:
            written += self._optimized()
            written += self._optimizer.state_tensors()
        written += [p.grad for p in capture.gradients.carried if p.grad is not None]
        backup = HostCopy(self.program.device, written)
        replayed = self._replay(variant, capture, leaves, position)
        difference = expected.compare(Fingerprint.of(capture.loss, capture.gradients.final))
        self.engine.trim()
        if difference is None:
            capture.verified = True
            return replayed
        backup.restore()
        capture.gradients.restore(before)
        self._clock.undone()
        problem = Problem(
            f"the first replay of {position} differs from the step without a graph: {difference}",
            fix="Please report this; the step runs without a graph",
        )
        log.warning("pygraph: %s", problem)
        variant.forget_captures()
        variant.off = problem
        return Ran(self._fall_back(problem, run))

    # -- changes that captures do not survive -------------------------------------------------------

    def _check_moves(
        self, variant: Variant, capture: Capture, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """Drop captures that rest on something that has changed; stop when it changes all the time."""
        optimizer = self._optimizer
        allowed = _MOST_RETRACES + variant.replays // _REPLAYS_PER_RETRACE
        tensors = variant.trace.tensors(self.program.function(), args, kwargs)
        if not same_memory(tensors, capture):
            variant.moves += 1
            leaves = set(map(id, capture.leaves))
            moved = next(
                expression
                for expression, tensor, address in zip(
                    variant.trace.inputs, tensors, capture.addresses, strict=True
                )
                if tensor.data_ptr() != address or (tensor.requires_grad and id(tensor) not in leaves)
            )
            variant.forget_captures()
            if variant.moves > allowed:
                variant.off = Problem(f"{readable(moved)} lives at a new address again and again")
                self._note_fallback(variant.off)
        elif capture.updates and optimizer is not None:
            if capture.optimizer_generation != optimizer.generation or not optimizer.state_unchanged():
                variant.forget_captures()
                self._prepared_updates = 0
            elif optimizer.hyperparameters() != capture.hyperparameters:
                variant.forget_captures()
                self._hyperparameter_changes += 1
                if self._hyperparameter_changes > allowed:
                    self._leave_optimizer_outside(
                        Problem(
                            "the optimizer runs outside of the graph: a hyperparameter other than the learning "
                            "rate changes again and again (betas or momentum under OneCycleLR, for example)",
                            fix="OneCycleLR(cycle_momentum=False) keeps it in the graph",
                        )
                    )

    def _leave_optimizer_outside(self, problem: Problem) -> None:
        self._plan = plan_of(self.config, optimizer_capturable=False)
        self.report.plan = str(self._plan)
        for signature in self._signatures.values():
            for variant in signature.variants:
                variant.forget_captures()
        self._close_optimizer()
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

    def _fall_back(self, problem: Problem, run: Callable[[Call], R]) -> R:
        self._note_fallback(problem)
        return self._plainly(run)

    def _note_fallback(self, problem: Problem) -> None:
        if self.report.fell_back(Fallback(problem.reason, problem.where, problem.fix, self._steps)):
            asked = "on" in (
                self.config.forward,
                self.config.backward,
                self.config.optimizer,
                self.config.fuse,
            )
            level = logging.WARNING if asked else logging.INFO
            log.log(level, "pygraph: step %d runs without a graph: %s", self._steps, problem)
        if self.config.on_failure == "raise":
            raise PyGraphError(str(problem))

    def _turn_off(self, problem: Problem) -> None:
        self._off = problem
        self._close_optimizer()
        self._note_fallback(problem)

    def _optimizer_context(self) -> AbstractContextManager[None]:
        return self._optimizer.prepared() if self._optimizer is not None and self._updates else nullcontext()

    def _close_optimizer(self) -> None:
        if self._optimizer is not None:
            self._optimizer.close()

    def _beside_parameters(
        self, variant: Variant, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[Tensor]:
        """Device tensors, other than parameters, that forward and backward may write in place."""
        reads = variant.trace.tensors(self.program.function(), args, kwargs)
        found = {id(t): t for t in self.program.model.buffers()}
        found |= {id(t): t for t in reads if not t.requires_grad or variant.writes_parameters}
        found |= {id(t): t for t in self.program.extra_state()}
        return list(found.values())

    def _optimized(self) -> list[Tensor]:
        """The optimizer's parameters."""
        optimizer = self.program.optimizer
        return [] if optimizer is None else [p for group in optimizer.param_groups for p in group["params"]]

    def _gradients(
        self,
        variant: Variant,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        position: PositionInAccumulation,
    ) -> Gradients:
        """The gradients that one step can reach: of what it reads, and of what the optimizer holds."""
        owned = self._optimized() or list(self.program.model.parameters())
        reads = variant.trace.tensors(self.program.function(), args, kwargs)
        reached = {id(t): t for t in (*owned, *(t for t in reads if t.requires_grad))}
        # what zero_grad empties before a fresh micro-batch; other gradients go on accumulating
        return Gradients(reached.values(), owned if position.fresh else (), self._canonical_gradients)

    @property
    def stopped(self) -> bool:
        """Whether every further step runs without a graph."""
        return self._off is not None

    def stop(self, problem: Problem) -> None:
        """Run every further step without a graph, and say why."""
        self._turn_off(problem)

    def close(self) -> None:
        """Release every graph and give the optimizer back as it was."""
        for signature in self._signatures.values():
            for variant in signature.variants:
                variant.forget_captures()
        self._signatures.clear()
        self._close_optimizer()
        self._off = self._off or Problem("the runner was closed")
        self.engine.close()


def _versions(leaves: Sequence[Any]) -> list[int]:
    """Counters of in-place changes; inference tensors have none."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    return [0 if t.is_inference() else torch_internals.tensor_version(t) for t in tensors]
