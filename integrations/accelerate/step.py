"""`accelerator.graphed_step(fn)`: a user's whole training step as one graph.

`fn` mixes what a graph can hold (forward, loss, backward, clipping, the optimizer) with what has to run in
Python (schedulers, the count of micro-batches). To take it apart, the calls that Accelerate knows are put
off while `fn` is traced: each only notes that it was made. Afterwards they are made in the same order, by
Python or by the graph. Where that would give something else than `fn` as it stands, for code between them
that looks at gradients or parameters, `fn` is left alone. The first calls are made for real, to find out.
"""

from __future__ import annotations

import functools
import logging
import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pygraph_train.boundary import STEP, Boundary, done, executes
from pygraph_train.graphs import make_engine
from pygraph_train.integrations.accelerate.by_hand import AccelerateByHand, why_not_by_hand
from pygraph_train.integrations.accelerate.calls import (
    CLIPS,
    Event,
    Script,
    after_backward,
    before_backward,
    clips,
    in_words,
    no_context,
    under_autocast,
)
from pygraph_train.integrations.accelerate.observation import Observation
from pygraph_train.integrations.accelerate.stubs import stubs
from pygraph_train.integrations.accelerate.taken_apart import NO_BACKWARD, SAME_CALLS, AtOnce, TakenApartTrace
from pygraph_train.integrations.loop import Loop
from pygraph_train.optimizers.preparation import OptimizerPreparation
from pygraph_train.optimizers.program import CLIPS_OTHERS
from pygraph_train.optimizers.scaling import Scaling
from pygraph_train.parallel.agreement import decline
from pygraph_train.parallel.replication import RECORDER, Alone, Replication
from pygraph_train.parallel.sharing import replication_of
from pygraph_train.patches import standing_in
from pygraph_train.problems import NotLegal, Problem, PyGraphError
from pygraph_train.report.step_report import Fallback, StepReport
from pygraph_train.step.flight import Replayed
from pygraph_train.step.not_copied import NotCopied
from pygraph_train.step.outputs import detached_results
from pygraph_train.step.phase_runner import Runner, runner_for
from pygraph_train.step.plan import PositionInAccumulation
from pygraph_train.step.program import Call, StepOfLoss, plain_call
from pygraph_train.torch_private.optim import count_optimizer_step
from pygraph_train.tracing.signature import Dims, map_leaves
from pygraph_train.tracing.trace import Trace

__all__ = ["GraphedStepFunction"]

log = logging.getLogger("pygraph_train")

_PATIENCE = 25
"""Steps by hand in which a graph has to come, besides the warm-up."""

_SERIOUS = 5
"""As many of them count for one of a kind that will have no graph."""

_REPLACED = Problem(
    "the optimizer inside of a prepared one was replaced (optimizer.optimizer = ...)",
    fix="Prepare the other optimizer, and make a graphed step that uses it",
)

_Update = Callable[[Callable[[], None]], None]


class GraphedStepFunction(NotCopied):
    """A training step of an Accelerate loop that replays itself. Made by `accelerator.graphed_step`.

    Args:
        fn: the step.
        accelerator: whose `backward`, optimizers and schedulers `fn` uses.
        loop: what else of this training is graphed; steps that cannot be graphed as a whole run in it.
    """

    _made_by = "accelerator.graphed_step"

    def __init__(self, fn: Callable[..., Any], accelerator: Any, loop: Loop) -> None:
        functools.update_wrapper(self, fn)
        self._fn = fn
        self._accelerator = accelerator
        self._loop = loop
        self.name = getattr(fn, "__name__", type(fn).__name__)
        self._report = StepReport()
        self._boundary = Boundary(self._report.failed, lambda: self._leave(None))
        self._observed: dict[bool, Script] = {}
        self._hoists_accumulate = False
        self._micro_batch: int | None = None  # what Accelerate had counted before the present call
        self._by_hand = False
        self._lost = 0  # steps by hand without a replay, one after the other
        self._patience = _PATIENCE + 2 * loop.config.warmup_steps
        self._program: _StepFunctionProgram | AccelerateByHand | None = None
        self._used: list[tuple[Any, torch.optim.Optimizer]] = []
        self._runner: Runner | None = None
        self._rest: float = 0  # so many further steps are nothing but plain ones
        self._on = loop.active
        if self._on:
            loop.report.whole_step(self.name, self._report)
        else:
            self._report.note("graphs are off: steps run as you wrote them")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Make one step.

        Returns:
            What the function returns, detached: tensors of their own.
        """
        if not self._on:
            self._report.step_began(elsewhere=self._loop.active)
            return detached_results(self._fn(*args, **kwargs))
        if self._rest:
            return self._plain_step(args, kwargs)
        return self._boundary.make(
            lambda: self._make(args, kwargs), lambda: detached_results(self._plainly(args, kwargs))
        )

    def _plainly(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the function as it is."""
        executes(STEP)
        if (
            self._micro_batch is not None
        ):  # counted before something of ours failed; the function counts it again
            self._accelerator.step, self._micro_batch = self._micro_batch, None
        with self._loop.paused():
            return self._fn(*args, **kwargs)

    def _make(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._micro_batch = None
        if any(accelerated.optimizer is not optimizer for accelerated, optimizer in self._used):
            self._leave(_REPLACED)
            return detached_results(self._plainly(args, kwargs))
        if self._hoists_accumulate:
            self._micro_batch = self._accelerator.step
            self._accelerator._do_sync()  # the function does not, from here on
        script = self._observed.get(self._accelerator.sync_gradients)
        if script is None:
            return self._observe(args, kwargs)
        if self._runner is None:
            self._start()
        assert self._runner is not None and self._program is not None
        runner, program = self._runner, self._program
        position = program.at(script, sync=self._accelerator.sync_gradients)

        step = runner.begin(position)

        def run(call: Call) -> Any:
            return program.run(call, args, kwargs, position, step.update)

        with self._loop.paused():
            outcome = runner.make(step, args, kwargs, run)
            if isinstance(outcome, Replayed):
                result, number = outcome.outputs
                result = program.finish(result, number, step.update, updated=outcome.updated)
            else:
                result = outcome.result
            done(result)
            step.finish()
        if isinstance(program, AccelerateByHand):
            self._lost = 0 if step.replayed else self._lost + (_SERIOUS if step.given_up else 1)
        rest = 0 if step.replayed else runner.take_rest()
        if program.problem is not None:
            self._leave(program.problem)
        elif runner.stopped or runner.hopeless or rest == math.inf or self._lost >= self._patience:
            self._leave(None)
        else:
            self._rest = rest
        return result

    def _plain_step(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Make one step of which nothing has a graph, and nothing is looked at."""
        self._rest -= 1
        with self._loop.paused():
            result = detached_results(self._fn(*args, **kwargs))
        if self._runner is not None:
            self._runner.count(self._accelerator.sync_gradients)
        return result

    def report(self) -> StepReport:
        """What became of the steps so far. Prints as a table."""
        return self._report

    def parts(self) -> tuple[Callable[..., Any], Any, Loop]:
        """The function, its Accelerator, and what else of this training is graphed."""
        return self._fn, self._accelerator, self._loop

    def close(self) -> None:
        """Release all graphs. Later steps run as they are."""
        self._on = False
        if self._runner is not None:
            self._runner.close()
            self._runner = None

    def _start(self) -> None:
        accelerator = self._accelerator
        engine = make_engine(self._loop.config.engine, accelerator.device)
        assert engine is not None
        events = [event for script in self._observed.values() for event in script]
        used = [accelerator._optimizers[k] for k in sorted({e.index for e in events if e.name == "step"})]
        self._used = [(accelerated, accelerated.optimizer) for accelerated in used]
        for accelerated in used:
            self._loop.give_up_optimizer(accelerated.optimizer, to=self)
        if self._by_hand:
            self._program = AccelerateByHand(self._fn, accelerator, used)
            self._runner = runner_for(self._program, self._loop.config, engine, self._report)
            return
        optimizer = used[0] if used else None
        replication = self._replication()
        self._program = _StepFunctionProgram(
            self._fn, accelerator, optimizer, replication, accumulates_inside=self._hoists_accumulate
        )
        self._program.observed = self._observed
        self._runner = runner_for(self._program, self._loop.config, engine, self._report)

    def _observe(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the function for real and see whether it can be taken apart."""
        self._report.step_began()
        watch = Observation(self._accelerator, hoisted=self._hoists_accumulate)
        sync = self._replication().micro_batch(sync=_exchanges(self._accelerator))
        with watch.observing(), self._loop.paused(), sync:
            executes(STEP)
            result = self._fn(*args, **kwargs)
        done(detached_results(result))
        problem = watch.problem_with(result)
        if problem is not None and watch.may_be_by_hand and watch.problem_of_result(result) is None:
            self._by_hand = True
            problem = why_not_by_hand(self._accelerator, shared=bool(self._loop.shared))
        if problem is not None:
            self._leave(problem)
        else:
            self._hoists_accumulate |= watch.accumulated
            self._observed[self._accelerator.sync_gradients] = tuple(watch.events)
        return detached_results(result)

    def _replication(self) -> Replication:
        """How the models of the step are shared with other processes."""
        shared = list(self._loop.shared)
        if not shared:
            return Alone()
        replication = replication_of(shared[0], switches=True)
        if len(shared) > 1:
            replication.problem = Problem(
                f"several models are wrapped in {replication.name}, and a graphed step can call only one wrapped model"
            )
        return replication

    def _leave(self, problem: Problem | None) -> None:
        """Further steps run as they are, forward, backward and optimizer apart."""
        if self._runner is not None and self._program is not None:
            self._runner.close()
            self._runner = None
            for optimizer in self._program.optimizers_used():
                self._loop.take_back_optimizer(optimizer, self)
        elif problem is not None and self._on:
            group = self._replication().group
            if group is not None:  # other ranks may want to meet this one
                decline(group, str(problem))
        self._on = False
        if problem is None:
            return
        self._report.fell_back(Fallback(problem.reason, problem.where, problem.fix, self._report.steps))
        log.warning("pygraph: %s is not graphed as a whole: %s", self.name, problem)
        if self._loop.config.on_failure == "raise":
            raise PyGraphError(str(problem))


class _Held:
    """A tensor that is to be clipped and belongs to no model of the loop."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Held) and other._tensor is self._tensor

    def __hash__(self) -> int:
        return id(self._tensor)

    def __call__(self) -> Tensor | None:
        return self._tensor


class _Owned(NamedTuple):
    """Where a parameter is found. `torch.utils.swap_tensors` refuses tensors that have weak references."""

    owner: weakref.ref[nn.Module]
    name: str

    def __call__(self) -> Tensor | None:
        module = self.owner()
        return None if module is None else module._parameters.get(self.name)


_Noted = tuple[Script, tuple[int, ...], tuple[tuple[_Held | _Owned, ...], ...]]
"""Calls that were put off, which results are norms of theirs, and what each of them is to clip."""


class _StepFunctionProgram(StepOfLoss):
    """`StepProgram` over a function that makes a whole step of an Accelerate loop."""

    recorder: str | tuple[str, ...] | None = (".put_off", RECORDER)
    empties_first: bool = False
    detaches_results: bool = True

    def __init__(
        self,
        fn: Callable[..., Any],
        accelerator: Any,
        accelerated: Any,
        replication: Replication,
        *,
        accumulates_inside: bool,
    ) -> None:
        models = accelerator._models
        self.model: nn.Module = models[0] if len(models) == 1 else nn.ModuleList(models)
        self.replication = replication
        self.accelerated = accelerated
        self.optimizer: torch.optim.Optimizer | None = None if accelerated is None else accelerated.optimizer
        self.device = accelerator.device
        self.problem: Problem | None = None
        self.observed: dict[bool, Script] = {}
        self._fn = fn
        self._accelerator = accelerator
        self._accumulates_inside = accumulates_inside
        self._preparation: OptimizerPreparation | None = None
        self._put_off: list[tuple[Any, ...]] = []
        self._stubs = stubs(accelerator, self._put_off)
        self._scripts: list[_Noted] = []
        self._present: Script = ()
        self._norms: list[Tensor | None] = []
        self._making: AtOnce | None = None
        self._clipped: list[list[Tensor]] = []
        self._clips_others = False
        self.scaling = Scaling(accelerator.scaler, self.optimizer)

    def new_trace(self, dynamic: Dims | None = None) -> Trace:
        """See `StepOfLoss`. The norms that clipping returns are put into results later, and not into objects."""
        trace = self._new_trace(dynamic, TakenApartTrace)
        if isinstance(trace, TakenApartTrace):
            program = weakref.ref(self)
            trace.at_once = lambda: None if (known := program()) is None else known._making
        trace.objects.may_open = False
        return trace

    def at(self, script: Script, *, sync: bool) -> PositionInAccumulation:
        """Where the present micro-batch stands."""
        empties = sync and any(e.name == "zero_grad" for e in before_backward(script))
        owner = self.model if self.optimizer is None else None
        parameters = owner.parameters() if owner is not None else self._parameters()
        steps = self._accelerator.gradient_accumulation_steps
        return PositionInAccumulation(
            fresh=empties or all(p.grad is None for p in parameters),
            update=sync and any(e.name == "step" for e in script),
            constants=(steps, script, *self.replication.constants()),
            sync=_exchanges(self._accelerator) or self.replication.group is None,
        )

    def optimizers_used(self) -> list[torch.optim.Optimizer]:
        """What the step updates."""
        return [] if self.optimizer is None else [self.optimizer]

    # -- StepProgram --------------------------------------------------------------------------------

    def function(self) -> Callable[..., Any]:
        return self._fn

    @contextmanager
    def context(self) -> Iterator[None]:
        """Calls that Accelerate knows are put off."""
        self._put_off.clear()
        with standing_in(self._stubs), self.replication.seen_through():
            yield

    def forward(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Any]:
        loss, result, number = self._taken_apart(call, args, kwargs)
        if loss is None:
            raise NotLegal(self.problem or NO_BACKWARD)
        return loss, (result, number)

    def backward(self, loss: Tensor) -> None:
        (around,) = (event.arguments for event in self._present if event.name == "backward")
        with under_autocast(self.device, around):  # the block that the function calls it in is left by now
            self._accelerator.backward(loss)

    def transform_gradients(self, *, in_kernels: bool = True) -> None:
        clipped = clips(self._present)
        for event, norm, parameters in zip(clipped, self._norms, self._clipped, strict=True):
            self._clip(event, norm, parameters)
        if not clipped:  # clipping unscales
            self.scaling.unscale(in_kernels=in_kernels)

    def update(self) -> None:
        self.accelerated.step()

    @property
    def clips(self) -> bool:
        """See `StepProgram`."""
        return any(map(clips, self.observed.values()))

    @property
    def empties_gradients(self) -> bool:
        """See `StepProgram`. Calls that come after the backward are made for each replay."""
        before = [event for script in self.observed.values() for event in before_backward(script)]
        return any(event.name == "zero_grad" for event in before)

    def exchanges(self) -> bool:
        return self.replication.sharded and (self.scaling.on or self.clips)

    def why_update_stays_outside(self, preparation: OptimizerPreparation) -> str | None:
        self._preparation = preparation
        reason = self.scaling.why_update_stays_outside(preparation)
        return reason or (CLIPS_OTHERS if self._clips_others else None)

    def acts_before_backward(self) -> Problem | None:
        return None

    def acts_before_update(self) -> str | None:
        return None

    def extra_state(self) -> Iterable[Tensor]:
        return self.scaling.tensors()

    # -- the step without a graph, and the rest of a replayed one --------------------------------------

    def run(
        self,
        call: Call,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        position: PositionInAccumulation,
        update: _Update,
    ) -> Any:
        """The whole step without a graph: as it is, or traced and then put together again.

        Args:
            update: makes the optimizer's step.
        """
        if call is plain_call:
            sync = self.replication.micro_batch(sync=position.sync)
            with ExitStack() as outside, sync, standing_in(self._live_calls(outside, update)):
                outside.enter_context(self._as_outside())
                executes(STEP)
                return detached_results(self._fn(*args, **kwargs))
        for event in before_backward(position.constants[1]):
            self._make(event, update)
        with self.replication.micro_batch(sync=position.sync):
            try:
                loss, result, _ = self._taken_apart(call, args, kwargs, self._at_once(update))
            except BaseException as error:
                captures = self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()
                executed = not (captures or isinstance(error, NotLegal))
                if executed:  # otherwise the step is made anew
                    self._make_until_raised(update)
                raise
            if loss is None:  # the function ran as it is written
                return detached_results(result)
            self.backward(loss)
        for event in after_backward(self._present):
            self._make(event, update)
        return detached_results(result)

    def finish(self, result: Any, number: int, update: _Update, *, updated: bool) -> Any:
        """What remains to be done in Python after a replay, which has `updated` or leaves that to `update`."""
        script, norm_leaves, clipped = self._scripts[number]
        if updated:
            count_optimizer_step(self.accelerated)
        norms: list[Tensor] = []
        self._norms = []
        self._clipped = [] if updated else [[p for r in refs if (p := r()) is not None] for refs in clipped]
        for event in after_backward(script):
            if updated and (event.name in CLIPS or event.name == "step"):
                continue
            norm = self._make(event, update)
            if norm is not None:
                norms.append(norm)
        return _with_leaves(result, dict(zip(norm_leaves, norms, strict=False))) if norms else result

    def _taken_apart(
        self,
        call: Call,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        at_once: Callable[[ExitStack], AtOnce] | None = None,
    ) -> tuple[Any, Any, int]:
        """Run the function with its calls put off.

        Args:
            call: runs it.
            args, kwargs: of the function.
            at_once: makes its calls where they stand, if no trace can run it.
        Returns:
            The loss, the result, and the number of the script. Without a loss the function ran as it is written.
        """
        with ExitStack() as outside:
            outside.enter_context(self._as_outside())
            self._making = making = None if at_once is None else at_once(outside)
            try:
                with self.context(), self.replication.around(), making or nullcontext():
                    result = call(self._fn, args, kwargs)
            finally:
                self._making = None
            script, tensors = self._noted()
        expected = self.observed.get(self._accelerator.sync_gradients) or ()
        if making is not None and making.began:
            self.problem = making.problem
            script = tuple(Event(*made) for made in making.made)
            expected = tuple(Event(event.name, event.index) for event in expected)
        if script != expected:
            self.problem = Problem(
                f"the step makes other calls than in its first steps: {in_words(script)} instead of "
                f"{in_words(expected)}",
                fix=SAME_CALLS,
            )
        if "backward" not in tensors:
            return None, result, -1
        if self._clipped:
            self._clips_others = self._others_are_clipped()
        wanted = {id(norm) for norm in self._norms if norm is not None}
        leaves: list[Any] = []
        map_leaves(leaves.append, result)
        clipped = self._places_of_clipped()
        if self.replication.sharded and any(id(leaf) in wanted for leaf in leaves):
            self.problem = Problem("the step returns the norm of sharded gradients, which is no plain tensor")
        entry = (script, tuple(k for k, leaf in enumerate(leaves) if id(leaf) in wanted), clipped)
        if entry not in self._scripts:
            self._scripts.append(entry)
        return tensors["backward"], result, self._scripts.index(entry)

    def _noted(self) -> tuple[Script, dict[str, Tensor]]:
        """Take the calls that the function has put off. Returns them, and the loss."""
        put_off = list(self._put_off)
        self._put_off.clear()
        self._present = tuple(Event(name, index, arguments) for name, index, arguments, _, _ in put_off)
        self._norms = [tensor for name, _, _, tensor, _ in put_off if name in CLIPS]
        clipped_by = [clipped for name, _, _, _, clipped in put_off if name in CLIPS]
        self._clipped = list(map(self.replication.resting, clipped_by))
        return self._present, {name: tensor for name, _, _, tensor, _ in put_off if name == "backward"}

    def _make_until_raised(self, update: _Update) -> None:
        """The function has raised an exception: make what it has called from its backward on."""
        script, tensors = self._noted()
        if [event.name for event in script].count("backward") == 1:
            self.backward(tensors["backward"])
            for event in after_backward(script):
                self._make(event, update)

    def _make(self, event: Event, update: _Update) -> Tensor | None:
        """One of the calls, for real. Returns the norm of gradients that were clipped."""
        if event.name in CLIPS:
            waiting = self._norms.pop(0) if self._norms else None
            return self._clip(event, waiting, self._clipped.pop(0))
        if event.name == "step":
            if self._accelerator.sync_gradients:
                update(self.accelerated.step)
        elif event.name == "zero_grad":
            self._accelerator._optimizers[event.index].zero_grad(*event.arguments)
        elif event.name == "scheduler.step":
            with self._as_outside():
                self._accelerator._schedulers[event.index].step()
        return None

    def _clip(self, event: Event, norm: Tensor | None, parameters: list[Tensor]) -> Tensor | None:
        found = getattr(self._accelerator, event.name)(parameters, *event.arguments)
        if norm is not None and found is not None and not self.replication.sharded:
            norm.copy_(found)
        return found

    def _places_of_clipped(self) -> tuple[tuple[_Held | _Owned, ...], ...]:
        if not self._clipped:
            return ()
        owned = {
            id(p): _Owned(weakref.ref(module), name)
            for module in self.model.modules()
            for name, p in module._parameters.items()
        }
        return tuple(tuple(owned.get(id(p)) or _Held(p) for p in ps) for ps in self._clipped)

    def _others_are_clipped(self) -> bool:
        """Whether gradients count that the optimizer does not empty."""
        if self.optimizer is None:
            return False
        held = set(map(id, self._parameters()))
        clipped = [p for parameters in self._clipped for p in parameters if id(p) not in held]
        return any(p.requires_grad or p.grad is not None for p in clipped)

    def _parameters(self) -> list[Tensor]:
        assert self.optimizer is not None
        return [p for group in self.optimizer.param_groups for p in group["params"]]

    def _as_outside(self) -> AbstractContextManager[None]:
        """Learning rates that the function or a scheduler reads are the user's numbers, not tensors of ours."""
        return nullcontext() if self._preparation is None else self._preparation.suspended()

    def _at_once(self, update: _Update) -> Callable[[ExitStack], AtOnce] | None:
        """Makes what the function calls, each call at its place; None where other processes take part."""
        if self.replication.group is not None or self.replication.sharded:
            return None
        accelerator = self._accelerator
        calls: list[tuple[Any, str, str, int]] = [
            (accelerator, name, name, 0) for name in ("backward", *CLIPS)
        ]
        for index, optimizer in enumerate(accelerator._optimizers):
            calls += [(optimizer, name, name, index) for name in ("step", "zero_grad")]
        calls += [(s, "step", "scheduler.step", index) for index, s in enumerate(accelerator._schedulers)]
        real = [(*call, getattr(call[0], call[1])) for call in calls]

        def made(outside: ExitStack) -> AtOnce:
            routed = {
                id(owner): call for owner, name, call in self._live_calls(outside, update) if name == "step"
            }
            return AtOnce(
                (owner, name, kind, index, routed.get(id(owner), call) if name == "step" else call)
                for owner, name, kind, index, call in real
            )

        return made

    def _live_calls(self, outside: ExitStack, update: _Update) -> list[tuple[Any, str, Any]]:
        """For a plain run: the optimizer steps through the runner; micro-batches are counted already.

        Args:
            outside: holds the context of everything but the optimizer's step.
            update: makes that step.
        """
        calls: list[tuple[Any, str, Any]] = []
        if self._accumulates_inside:
            calls.append((self._accelerator, "accumulate", no_context))
        if self.accelerated is not None:
            step = self.accelerated.step

            def routed(closure: Any = None) -> None:
                if closure is None and self._accelerator.sync_gradients:
                    outside.close()
                    update(step)
                    outside.enter_context(self._as_outside())
                else:
                    step(closure)

            calls.append((self.accelerated, "step", routed))
        return calls


def _exchanges(accelerator: Any) -> bool:
    """Whether gradients are exchanged with other processes in this micro-batch, as `accumulate` decides it."""
    return bool(accelerator.sync_gradients or accelerator.gradient_state.plugin_kwargs.get("sync_each_batch"))


def _with_leaves(tree: Any, replaced: dict[int, Tensor]) -> Any:
    leaves: list[Any] = []
    map_leaves(leaves.append, tree)
    values = iter([replaced.get(k, leaf) for k, leaf in enumerate(leaves)])
    return map_leaves(lambda _: next(values), tree)
