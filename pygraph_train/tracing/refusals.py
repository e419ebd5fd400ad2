"""Reasons not to capture that do not come from tracing: inputs, history, failures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pygraph_train.graphs.engine import CaptureError
from pygraph_train.problems import NotLegal, Problem, defined_at, first_line, is_user_file, user_location
from pygraph_train.torch_private.dynamo import raising_node
from pygraph_train.tracing.obstacles import BATCH_IN_STATE, kept_result
from pygraph_train.tracing.reading import reader
from pygraph_train.tracing.reasons import line_of, problem_of_guard, readable
from pygraph_train.tracing.signature import leaf_paths
from pygraph_train.tracing.trace import Trace

__all__ = [
    "ANOMALY",
    "BATCH_IN_STATE",
    "DISPATCH_MODE",
    "FUNCTION_MODE",
    "GLOBAL_HOOK",
    "OUT_OF_MEMORY",
    "SAVED_TENSORS_HOOKS",
    "check_copies",
    "compiler_problem",
    "history",
    "may_be_of_step",
    "problem_of",
    "tensor_inside",
    "unsupported_leaf",
    "unsupported_leaves",
]

_READ_LATER = "Return the tensor from the step, and read or print it after the step"

GLOBAL_HOOK = Problem(
    "a hook on all modules (register_module_forward_hook and the like) runs in Python, and a replay "
    "would not call it"
)
DISPATCH_MODE = Problem(
    "a TorchDispatchMode is active around the step and would see nothing of a replay, so the step runs "
    "without a graph"
)
FUNCTION_MODE = Problem(
    "a TorchFunctionMode is active around the step and would see nothing of a replay, so the step runs "
    "without a graph"
)
SAVED_TENSORS_HOOKS = Problem(
    "saved_tensors_hooks are active around the step and would see nothing of a replay, so the step runs "
    "without a graph"
)
OUT_OF_MEMORY = Problem(
    "out of memory during the capture", fix="Use a smaller batch, so that the graph's memory fits"
)
ANOMALY = Problem(
    "anomaly detection reads every gradient on the host", fix="Turn anomaly detection off (detect_anomaly)"
)


def history(trace: Trace, tensors: Sequence[Tensor]) -> Problem | None:
    """Backward would leave the step through a tensor that was computed outside of it."""
    for expression, tensor in zip(trace.inputs, tensors, strict=True):
        if tensor.requires_grad and not tensor.is_leaf:
            return Problem(
                f"{readable(expression)} was computed outside of the step and requires a gradient",
                fix="Compute the tensor inside the step, or detach it",
            )
    return None


def tensor_inside(name: str, where: str | None = None) -> Problem:
    """A tensor of the batch is no leaf of the arguments."""
    return Problem(
        f"{name} is a tensor inside an object that pygraph-train cannot open",
        where,
        "Pass batches as dicts, lists, tuples, dataclasses, or objects of a class that is written in Python",
    )


def check_copies(
    trace: Trace,
    fn: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    leaves: Sequence[Any],
    *,
    plain: bool,
) -> None:
    """Look at a call whose tensors are copies.

    Args:
        leaves: of this call.
        plain: whether the function itself is called, which asks anew whether a batch is the one that the model keeps.
    Raises:
        NotLegal: the trace does not hold for it, or reads tensors that are no copies, or reads some ahead that lie
            where the step writes.
    """
    frame = {"fn": fn, "args": args, "kwargs": kwargs}
    if not trace.holds(fn, args, kwargs):
        if not plain:
            raise NotLegal(trace.why_not(fn, args, kwargs))
        for guard, where in trace.failures(frame):
            if _is_of_batch_object(guard, frame):
                raise NotLegal(problem_of_guard(guard, where, fn))
    if not plain:
        trace.ahead.check_memory(frame)
    known = {id(leaf) for leaf in leaves}
    for name, tensor in Trace.argument_tensors(trace, fn, args, kwargs):
        if id(tensor) not in known:
            raise NotLegal(tensor_inside(name))


def _is_of_batch_object(guard: str, frame: dict[str, Any]) -> bool:
    """Whether a guard asks that two are one: parts of the batch, or an object of the batch and another one.

    Tensors of the batch that the model has as well are `Variant.anchored`.
    """
    sides = guard.split(" is ")
    of_batch = [side for side in sides if "L['args']" in side or "L['kwargs']" in side]
    if len(sides) != 2 or len(of_batch) != 1:
        return len(sides) == len(of_batch) == 2
    return not isinstance(reader({}, of_batch)(frame, {})[0][0], Tensor)


def unsupported_leaf(
    fn: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    leaves: Sequence[Any],
) -> Problem | None:
    """The first of `unsupported_leaves`."""
    return next(unsupported_leaves(fn, args, kwargs, leaves), None)


def unsupported_leaves(
    fn: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    leaves: Sequence[Any],
) -> Iterator[Problem]:
    """Arguments that cannot be kept in a static buffer. The line is that of the step's function, which gets them."""
    paths = leaf_paths(args, kwargs, ("args", "kwargs"))
    where = _definition(fn)
    for path, leaf in zip(paths, leaves, strict=True):
        if isinstance(leaf, np.ndarray):
            yield Problem(
                f"{path} is a NumPy {type(leaf).__name__}, and a graph takes tensors",
                where,
                "Pass torch.as_tensor(...) of the array",
            )
        if not isinstance(leaf, Tensor):
            continue
        if type(leaf) is not Tensor or leaf.is_nested:
            told = f"{path} is a {type(leaf).__name__}, and a graph would treat it as a plain tensor"
            yield Problem(told, where)
        elif leaf.requires_grad:
            yield Problem(
                f"{path} requires a gradient, and a graph would write the gradient to a copy of this tensor",
                where,
                "Pass the tensor without a gradient, and let the step do x = x.detach().requires_grad_()",
            )
        elif leaf.layout is not torch.strided:
            told = f"{path} is a {leaf.layout} tensor, and a graph takes strided tensors only"
            yield Problem(told, where)


def compiler_problem(error: BaseException) -> Problem | None:
    """The sentence for a failure of the compiler, None for any other exception."""
    if isinstance(error, NotLegal):
        told = f"Inductor could not compile the step: {error.problem.reason}. The graphs hold eager kernels"
        return Problem(told, error.problem.where)
    if type(error).__module__.startswith(("torch._dynamo", "torch._inductor", "torch._functorch", "triton")):
        return Problem(
            f"Inductor could not compile the step: {first_line(error)}. The graphs hold eager kernels"
        )
    return None


def problem_of(error: Exception, trace: Trace | None = None, fn: Any = None) -> Problem:
    """The sentence for what went wrong with a graph.

    Args:
        error: says it.
        trace, fn: of the step, and its function, where they are known.
    """
    if isinstance(error, NotLegal):
        return error.problem
    if isinstance(error, CaptureError):
        kept = "keeps with their autograd graph" in error.reason and trace is not None and error.where is None
        if kept and (found := kept_result(trace.effects, fn, error.reason)):  # type: ignore[union-attr]
            return found
        where = error.where or _place_in_graph(error.__cause__) or _definition(fn)
        return Problem(error.reason, where, _READ_LATER if "on the host" in error.reason else "")
    if isinstance(error, torch.OutOfMemoryError):
        return OUT_OF_MEMORY
    first = (str(error).strip().splitlines() or [""])[0]
    where = user_location(error.__traceback__) or _place_in_graph(error) or _definition(fn)
    return Problem(f"the capture failed with {type(error).__name__}: {first}", where)


def may_be_of_step(refused: NotLegal) -> bool:
    """Whether an exception was the reason that the step itself may raise, for a bad batch."""
    error = refused.__cause__
    return isinstance(error, Exception) and not isinstance(
        error, NotLegal | CaptureError | torch.OutOfMemoryError
    )


def _definition(fn: Any) -> str | None:
    where = defined_at(fn)
    return where if where is not None and is_user_file(where) else None


def _place_in_graph(error: BaseException | None) -> str | None:
    """`file:line` of the operation of a traced graph that failed. No frame of the user's runs there."""
    node = None if error is None else raising_node(error)
    return None if node is None else line_of(node)
