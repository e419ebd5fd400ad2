"""Making one capture of a step, and what its first replay is checked against."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor

from pygraph_train.boundary import put_back as put_all_back
from pygraph_train.boundary import rehearsal
from pygraph_train.gradients.of_steps import Gradients
from pygraph_train.graphs.engine import Graph, NumbersNotFound
from pygraph_train.identity import identities, picker
from pygraph_train.optimizers.preparation import OptimizerPreparation
from pygraph_train.optimizers.program import optimized
from pygraph_train.problems import NotLegal, Problem, PyGraphError
from pygraph_train.putting_back import HostCopy, ScratchState
from pygraph_train.step.inputs import StaticInputs
from pygraph_train.step.moving import CannotBeLoaded, LoadedTensors, homes
from pygraph_train.step.outputs import Outputs
from pygraph_train.step.plan import PositionInAccumulation
from pygraph_train.step.program import Call
from pygraph_train.step.rebinding import Anchors, Moves
from pygraph_train.step.together import Together, out_of_step
from pygraph_train.step.training_run import TrainingRun
from pygraph_train.step.variants import Capture, Variant
from pygraph_train.step.ways import undrawn
from pygraph_train.torch_private.hooks import hook_registrations
from pygraph_train.torch_private.sharding import local_tensor
from pygraph_train.tracing.compiled_units import CompiledUnits
from pygraph_train.tracing.gradient_hooks import backward_hook, hooked
from pygraph_train.tracing.refusals import BATCH_IN_STATE, check_copies, history, problem_of
from pygraph_train.tracing.reproducing import ReproducingTrace
from pygraph_train.tracing.signature import flattened
from pygraph_train.tracing.silent_call import SilentCall
from pygraph_train.tracing.trace import Trace
from pygraph_train.verification import Fingerprint, PlainRuns

__all__ = ["CaptureMaker"]

_OF_BATCH = Problem(
    "a tensor of the batch requires a gradient, and a graph would write the gradient to a copy of it",
    fix="Pass the tensor without a gradient, and let the step do x = x.detach().requires_grad_()",
)


class CaptureMaker:
    """Captures steps, all of those with the same kernels into the same gradient addresses.

    Args:
        training: of the runner.
        context: entered around every run that uses the kernels that graphs hold.
        together: of ranks that capture together; None for one process.

    Attributes:
        anchors: where tensors stay that steps give other memory.
    """

    def __init__(
        self,
        training: TrainingRun,
        context: Callable[[], AbstractContextManager[None]],
        together: Together | None = None,
    ) -> None:
        self.anchors = Anchors()
        self._program = training.program
        self._config = training.config
        self._training, self._engine = training, training.engine
        self._addresses = training.addresses
        self._context = context
        self._together = together

    def make(
        self,
        variant: Variant,
        call: Call,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        leaves: list[Any],
        position: PositionInAccumulation,
        optimizer: OptimizerPreparation | None,
        *,
        verify: bool,
    ) -> tuple[Capture, PlainRuns | None]:
        """Capture the step under the variant's arm.

        Args:
            call: how the step's function is run.
            verify: whether its first replay is compared with the step without a graph.
            leaves: of the arguments, and after them what `Variant.inputs` takes beside these.
        Returns:
            The capture, and what its first replay must reproduce (None without verification).
        Raises:
            NotLegal: it cannot be captured. Nothing was executed, Python state is as before.
            NumbersNotFound: the same, but it can be captured if the optimizer's numbers stay in the graph.
        """
        reads = variant.trace.tensors(self._program.function(), args, kwargs)
        moving = {} if self._program.replication.sharded else variant.movable()
        with self.stage():
            kept, loaded = homes(moving, reads, self.anchors, blind=self._config.verify == "off")
        make = functools.partial(
            self._make, variant, call, args, kwargs, leaves, position, optimizer, reads=reads, kept=kept
        )
        if loaded is None:
            return make(verify=verify, loaded=None)
        try:
            with loaded.at_home(reads):
                return make(verify=True, loaded=loaded)  # no other run shows that the step only reads these
        except CannotBeLoaded:
            variant.stay.update(loaded.places)
        return make(verify=verify, loaded=None)

    def _make(
        self,
        variant: Variant,
        call: Call,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        leaves: list[Any],
        position: PositionInAccumulation,
        optimizer: OptimizerPreparation | None,
        *,
        verify: bool,
        reads: Sequence[Tensor],
        kept: list[Tensor],
        loaded: LoadedTensors | None,
    ) -> tuple[Capture, PlainRuns | None]:
        """See `make`; loaded tensors lie in their homes."""
        updates = variant.arm.plan.fused and position.update
        program, replication = self._program, self._program.replication
        gradients = self.gradients(variant, args, kwargs, position)
        with self.stage():
            problem = history(variant.trace, reads)
            if problem is None and any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in leaves):
                problem = _OF_BATCH
            if problem is None and hooked(gradients.parameters):
                problem = backward_hook(program.model) or Problem("a parameter has a gradient hook")
            if problem is not None:
                raise NotLegal(problem)
        rebound = variant.trace.rebound_tensors(reads)
        self.anchors.begin([*rebound, *kept])
        gradients.begin()
        gradients.empty()  # as the step would; the memory of old gradients is wanted now
        before = gradients.snapshot()
        static_leaves: list[Any] = []
        writer = call.trace if isinstance(call, SilentCall) and call.trace.reproduces else None
        moves = self.moves(variant, args, kwargs)

        def body() -> tuple[Tensor, Outputs]:
            gradients.empty()
            with replication.micro_batch(sync=position.sync):
                loss, tree = program.forward(captured, static_args, static_kwargs)
                program.backward(loss)
            if updates:
                program.transform_gradients()
                with nullcontext() if numbers is None else numbers.marked():
                    program.update()
            gradients.settle()
            detached = program.detaches_results and writer is None
            results = tree if writer is None else (tree, writer.take_outputs())
            objects = variant.trace.objects
            outputs = Outputs(results, static_leaves, reads, detached=detached, objects=objects)
            if loaded is not None:
                loaded.check_results(outputs.tensors)
            batch = [leaf for leaf in static_leaves if isinstance(leaf, Tensor)]
            self.anchors.settle(moves, [*moves.tensors, *batch, *outputs.tensors])
            return loss.detach(), outputs

        numbers = optimizer.live_numbers(self._engine) if optimizer is not None and updates else None
        put_back, forget = program.scaling.notes(), replication.notes()
        graph: Graph | None = None
        exchanges = False
        try:
            with self.stage():
                if variant.inputs is None:
                    shared = None if variant.lead is None else variant.family
                    memory = None if shared is None else shared.inputs
                    variant.inputs = StaticInputs(leaves, variant.used, memory)
                fixed = reads if loaded is None else loaded.without(reads)
                written = variant.maybe_written(fixed)
                if written is not None and variant.inputs.lie_in(written, leaves):
                    raise NotLegal(BATCH_IN_STATE)
                variant.inputs.load(leaves)
                static_args, static_kwargs = variant.inputs.tree((args, kwargs))
                static_leaves += flattened((static_args, static_kwargs))[1] + variant.inputs.further
                captured = call
                if isinstance(call, SilentCall):
                    call = SilentCall(call.trace, variant.inputs.further)
                    captured = SilentCall(call.trace, variant.inputs.further, keep=writer is not None)
                trace = call.trace if isinstance(call, (CompiledUnits, SilentCall)) else call
                with program.context():
                    traced = trace if isinstance(trace, Trace) else variant.trace
                    given = program.function(), static_args, static_kwargs, static_leaves
                    check_copies(traced, *given, plain=traced is not trace)
                    if isinstance(traced, ReproducingTrace) and traced.ahead.takes:
                        traced.fill(*given[:3])
            expected, reference, started = None, variant.last_comparison(), time.perf_counter()
            around = nullcontext if loaded is None else functools.partial(loaded.only_read, reads)
            given_again = (variant, gradients, call, *variant.inputs.tree((args, kwargs)))
            run = functools.partial(  # its accumulators, in another stream, are none of the capture's
                self.reference, *given_again, updates=updates, sync=position.sync, around=around
            )
            if verify:
                expected, reference = PlainRuns(run()), time.perf_counter() - started
                while self._engine.shares_memory and self._together is None and expected.may_differ:
                    expected.add(run())  # later the graph's memory would come on top of that of a run
            watched = optimizer.state.none_is_made() if optimizer is not None and updates else nullcontext()
            exchanges = position.sync
            with (
                self.stage(),
                self._context(),
                watched,
                replication.capturing(),
                undrawn(variant.trace, traced, self._engine),
            ):
                graph, (loss, outputs) = self._engine.capture(body, gaps=variant.trace.gaps.left)
            if numbers is not None:
                graph = numbers.follow(graph, bool if self._together is None else self._together.anywhere)
        except BaseException as error:
            if graph is not None:  # another rank has none
                graph.close()
            put_all_back(lambda: gradients.restore(before), put_back)
            if exchanges and isinstance(error, Exception):
                replication.reset()
            as_it_is = PyGraphError | NumbersNotFound | CannotBeLoaded
            if not isinstance(error, Exception) or isinstance(error, as_it_is):
                raise  # Ctrl-C and the like: the caller's business, with everything in order
            raise NotLegal(problem_of(error, variant.trace, program.function())) from error
        finally:
            ends = functools.partial(self.anchors.end, [*rebound, *kept])
            put_all_back(forget, moves.put_back, ends)
        put_back()
        self._training.has_memory = True
        outputs.tensors.clear()
        try:
            gradients.claim()
        except Exception:
            gradients.restore(before)
            raise
        hyperparameters = None
        if optimizer is not None and numbers is not None:
            optimizer.remember()
            baked = numbers.baked(optimizer.hyperparameters())
            hyperparameters = baked, self._program.scaling.numbers()
        capture = Capture(
            graph=graph,
            loss=loss,
            outputs=outputs,
            gradients=gradients,
            updates=updates,
            hyperparameters=hyperparameters,
            optimizer_generation=optimizer.generation if optimizer is not None else 0,
            leaves=[t for t in reads if t.requires_grad],
            pick_leaves=picker([i for i, t in enumerate(reads) if t.requires_grad]),
            addresses=[local_tensor(t).data_ptr() for t in fixed],
            rebound=rebound,
            verified=not verify,
            hook_registrations=hook_registrations(),
            audits=variant.audits(self._config.verify, time.perf_counter(), reference),
            sync=position.sync,
            written=written,
            sharded=replication.sharded,
            number=0 if self._together is None else self._together.number,
            kept=kept,
            loaded=loaded,
            ids=list(map(id, reads)),
            writer=writer,
            optimized=identities(optimized(program.optimizer)),
        )
        return capture, expected

    def reference(
        self,
        variant: Variant,
        gradients: Gradients,
        call: Call,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        updates: bool,
        sync: bool,
        around: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> Fingerprint:
        """Loss and gradients of this step without a graph; everything else is put back.

        Gradients are exchanged after the backward, and not in it: nobody waits then for a rank that fails.

        Args:
            around: what it makes is entered around forward and backward.
        """
        with rehearsal():
            return self._reference(
                variant, gradients, call, args, kwargs, updates=updates, sync=sync, around=around
            )

    def _reference(
        self,
        variant: Variant,
        gradients: Gradients,
        call: Call,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        *,
        updates: bool,
        sync: bool,
        around: Callable[[], AbstractContextManager[None]],
    ) -> Fingerprint:
        replication = self._program.replication
        stage = out_of_step if replication.sharded else self.stage
        with self.stage():
            before = gradients.snapshot()
            moves = self.moves(variant, args, kwargs)
            scratch = ScratchState(self._program.device, self.beside_parameters(variant, args, kwargs))
            put_back = self._program.scaling.notes()
        try:
            replication.exchange_buffers()
            with self._context(), self._engine.warm_up(gradients.emptied):
                with (
                    stage(),
                    around(),
                    replication.micro_batch(sync=sync),
                    replication.local(),
                ):
                    gradients.empty()
                    gradients.isolate()
                    loss, _ = self._program.forward(call, args, kwargs)
                    self._program.backward(loss)
                if sync:
                    replication.reduce(gradients.parameters)
                with stage():
                    if updates:
                        self._program.transform_gradients(in_kernels=False)
                    left = [*gradients.snapshot(), *self._program.left_behind()]
                    return Fingerprint.of(loss.detach(), left)
        finally:
            put_all_back(moves.put_back, scratch.restore, lambda: gradients.restore(before), put_back)

    def stage(self) -> AbstractContextManager[None]:
        """Around what may fail on one rank, before others wait for it."""
        return nullcontext() if self._together is None else self._together.stage()

    def backup(
        self,
        variant: Variant,
        capture: Capture,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        optimizer: OptimizerPreparation | None,
    ) -> HostCopy:
        """Everything that a replay writes, besides gradients that it begins itself."""
        written = self.beside_parameters(variant, args, kwargs)
        if capture.updates and optimizer is not None:
            written += optimized(self._program.optimizer)
            written += optimizer.state_tensors()
        written += [p.grad for p in capture.gradients.carried if p.grad is not None]
        return HostCopy(self._program.device, written)

    def beside_parameters(
        self, variant: Variant, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> list[Tensor]:
        """Device tensors, other than parameters, that forward and backward may write in place.

        Frozen parameters are parameters: most of the model, where only adapters are trained.
        """
        reads = variant.trace.tensors(self._program.function(), args, kwargs)
        found = {id(t): t for t in self._program.model.buffers()}
        found |= {id(t): t for t in reads if not variant.is_unwritten_parameter(t)}
        found |= {id(t): t for t in self._program.extra_state()}
        return list(found.values())

    def moves(self, variant: Variant, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Moves:
        """From now on, of tensors that live longer than a step: a run that is undone must not leave them elsewhere."""
        model = self._program.model
        reads = variant.trace.tensors(self._program.function(), args, kwargs)
        found = [*reads, *model.parameters(), *model.buffers(), *optimized(self._program.optimizer)]
        return Moves(map(local_tensor, found) if self._program.replication.sharded else found)

    def warm_up(self, *, fresh: bool) -> AbstractContextManager[None]:
        """Around a run without a graph before a capture.

        Args:
            fresh: whether it begins with empty gradients.
        """
        return self._engine.warm_up(self.owned() if fresh else ())

    def owned(self) -> list[Tensor]:
        """Parameters whose gradients are emptied before a fresh micro-batch."""
        return list(optimized(self._program.optimizer) or self._program.model.parameters())

    def gradients(
        self,
        variant: Variant,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        position: PositionInAccumulation,
    ) -> Gradients:
        """The gradients that one step can reach: of what it reads, and of what the optimizer holds."""
        owned = self.owned()
        reads = variant.trace.tensors(self._program.function(), args, kwargs)
        reached = {id(t): t for t in (*owned, *(t for t in reads if t.requires_grad))}
        reached |= {id(t): t for t in self._program.replication.leaves(sync=position.sync)}
        # what zero_grad empties before a fresh micro-batch; other gradients go on accumulating
        emptied = self._program.emptied(variant.trace, owned) if position.fresh else ()
        return self._addresses.of_step(reached.values(), emptied, compiled=variant.arm.compiled)
