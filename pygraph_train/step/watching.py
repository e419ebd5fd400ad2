"""The steps of the warm-up: what Dynamo says of a step, and whether what happens agrees with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch import Tensor, nn

from pygraph_train.problems import NotLegal, Problem
from pygraph_train.step.capture_maker import CaptureMaker
from pygraph_train.step.flight import StepInFlight
from pygraph_train.step.lifecycle import Stage
from pygraph_train.step.program import Call, plain_call
from pygraph_train.step.rebinding import UNSEEN_MOVE, Moves
from pygraph_train.step.training_run import TrainingRun
from pygraph_train.step.updates import Updates
from pygraph_train.step.variants import Variant
from pygraph_train.torch_private.memory import tensor_version
from pygraph_train.tracing.opened import open_way_to
from pygraph_train.tracing.refusals import history, tensor_inside
from pygraph_train.tracing.trace import Trace

__all__ = ["Watching"]

R = TypeVar("R")


class Watching:
    """Runs steps through Dynamo with eager kernels: the cheap way to find out what they are made of.

    Args:
        training, updates, maker: of the runner.
    """

    def __init__(self, training: TrainingRun, updates: Updates, maker: CaptureMaker) -> None:
        self._training = training
        self._updates = updates
        self._maker = maker

    def __call__(
        self,
        step: StepInFlight,
        variant: Variant,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        leaves: list[Any],
        run: Callable[[Call], R],
    ) -> tuple[R, Problem | None]:
        """Make the step. Returns its result, and a reason against a graph of it."""
        training = self._training
        first = variant.life.stage is not Stage.WATCHED
        versions = _versions(leaves)
        with (
            self._updates.context(),
            self._maker.warm_up(fresh=step.position.fresh),
            training.clock.ungraphed(traced=first),
        ):
            result = run(self._watched(variant))
        if first and variant.family is not None:
            dynamic = bool(variant.trace.dynamic)
            variant.family.trace_returns.traced(training.times.ungraphed, dynamic=dynamic)
        variant.seen_in_warmup(training.times.ungraphed, compiled=False)
        problem = training.program.replication.not_called_once() or variant.trace.problem
        if problem is None and first:
            problem = self._read_leaves(variant, args, kwargs, leaves)
        if problem is None and versions != _versions(leaves):
            problem = Problem("the step changes its batch in place, and a replay would change a copy instead")
        return result, problem

    def _watched(self, variant: Variant) -> Call:
        """The trace, and whether forward writes parameters in place (Embedding(max_norm=...) does)."""
        model, clock = self._training.program.model, self._training.clock

        def call(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            parameters = list(model.parameters())
            others = [t for t in variant.trace.latest_tensors if isinstance(t, nn.Parameter)]  # of a teacher
            before = _versions([*parameters, *others])
            moves = Moves([*parameters, *model.buffers()])
            try:
                with variant.trace.branches.in_steps():
                    result = variant.trace(fn, args, kwargs)
                clock.mark("B")
            except NotLegal as refused:  # nothing was executed: the step goes on, what came before it is done
                variant.trace.problem = refused.problem
                return plain_call(fn, args, kwargs)
            changed = before != _versions([*parameters, *others])
            variant.writes_parameters |= changed or _writes_a_parameter(variant.trace, fn, args, kwargs)
            if moves.found() and not variant.trace.rebound and variant.trace.problem is None:
                variant.trace.problem = UNSEEN_MOVE
            return result

        return call

    def _read_leaves(
        self, variant: Variant, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: list[Any]
    ) -> Problem | None:
        """Which leaves the traced step reads; a tensor that hides inside another object is refused."""
        fn = self._training.program.function()
        try:
            reads = variant.trace.argument_tensors(fn, args, kwargs)
            state = variant.trace.tensors(fn, args, kwargs)
        except Exception as error:  # Dynamo's own names, for NumPy arrays and other things it converts
            return Problem(
                f"the step makes tensors from NumPy arrays or other objects ({error})",
                fix="Make these tensors before the step",
            )
        if (problem := history(variant.trace, state)) is not None:
            return problem
        known = {id(leaf) for leaf in leaves}
        hidden = [(expression, tensor) for expression, tensor in reads if id(tensor) not in known]
        if hidden:
            variant.opened = open_way_to([tensor for _, tensor in hidden], leaves)
            return tensor_inside(hidden[0][0])
        read = {id(tensor) for _, tensor in reads}
        variant.used = [isinstance(leaf, Tensor) and id(leaf) in read for leaf in leaves]
        places = {id(tensor): k for k, tensor in enumerate(state)}
        variant.anchored = [(i, places[id(leaf)]) for i, leaf in enumerate(leaves) if id(leaf) in places]
        return None


def _writes_a_parameter(
    trace: Trace, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    """Whether forward writes to parameters, trained or frozen, as far as the trace shows: not to buffers alone."""
    if not trace.written:
        return False
    try:
        tensors = dict(zip(trace.inputs, trace.tensors(fn, args, kwargs), strict=True))
        written = [tensors[expression] for expression in trace.written]
    except Exception:  # expressions that only Dynamo's own code understands
        return True
    return any(t.requires_grad or isinstance(t, nn.Parameter) for t in written)


def _versions(leaves: Sequence[Any]) -> list[int]:
    """Counters of in-place changes; inference tensors have none."""
    tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    return [0 if t.is_inference() else tensor_version(t) for t in tensors]
