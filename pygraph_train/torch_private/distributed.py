"""Private APIs of torch.distributed: its store, work that is done, and the reducer of DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor, distributed
from torch.nn.parallel import DistributedDataParallel

__all__ = [
    "acts_in_python",
    "begin_forward",
    "buckets_are_settled",
    "comm_hook",
    "compile_in_buckets",
    "default_store",
    "done",
    "end_forward",
    "exchange_buffers",
    "first_step_is_over",
    "group_timeout",
    "has_delayed_parameters",
    "has_run",
    "rebuild_reducer",
    "registered_hook",
    "reset_reducer",
    "stop_sampling",
    "waited_for",
]


def default_store() -> Any:
    """The key-value store that all ranks of the default process group share (torch 2.11, 2.13)."""
    return distributed.distributed_c10d._get_default_store()


def group_timeout(group: Any) -> timedelta:
    """How long the collectives of a process group wait for other ranks (torch 2.11, 2.13)."""
    for device in ("cuda", "cpu"):
        try:
            return group._get_backend(torch.device(device)).options._timeout
        except (RuntimeError, AttributeError):  # no backend for this device, or one without options
            continue
    return timedelta(minutes=30)


def done(tensors: Sequence[Tensor]) -> Any:
    """What a collective returns whose work is complete (torch 2.11, 2.13)."""
    from torch._C import _distributed_c10d as c10d

    future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
    future.set_result(list(tensors))
    return c10d._create_work_from_future(future).boxed()  # type: ignore[attr-defined]


def waited_for(tensor: Tensor) -> Tensor:
    """The result of a functional collective when it is there (torch 2.11, 2.13)."""
    result: Tensor = torch.ops._c10d_functional.wait_tensor(tensor)
    return result


def compile_in_buckets(
    ddp: DistributedDataParallel,
    gm: torch.fx.GraphModule,
    example_inputs: list[Any],
    compile: Callable[[torch.fx.GraphModule, list[Any]], Callable[..., Any]],
) -> Callable[..., Any]:
    """Cut a graph of Dynamo's where buckets of gradients end, and compile each piece (torch 2.11, 2.13).

    The backward of a graph that is one piece has all its gradients at its end. The backwards of pieces have theirs one
    after the other, and the reducer exchanges those of one while the next one runs.

    Args:
        ddp: has buckets.
        gm, example_inputs: from Dynamo, while it traces.
        compile: compiles one piece.
    """
    from torch._dynamo.backends.distributed import DDPOptimizer, has_higher_order_op

    if has_higher_order_op(gm):  # torch itself does not cut these
        return compile(gm, example_inputs)
    first = min(distributed._DEFAULT_FIRST_BUCKET_BYTES, ddp.bucket_bytes_cap)  # type: ignore[attr-defined]
    pieces = DDPOptimizer(ddp.bucket_bytes_cap, compile, first)  # type: ignore[arg-type]
    try:
        with _sources_are_not_copied():
            compiled: Callable[..., Any] = pieces.compile_fn(gm, example_inputs)
    except BaseException:
        tracing = torch._guards.TracingContext.try_get()
        if tracing is not None:  # what is compiled next would return fake tensors
            tracing.fakify_first_call, tracing.ddp_optimizer_ctx = False, None
        raise
    return compiled


@contextmanager
def _sources_are_not_copied() -> Iterator[None]:
    """Context: `deepcopy` takes what Dynamo knows of the origin of an input as it is.

    DDPOptimizer copies its pieces, and `deepcopy` cannot copy a default argument's origin (torch 2.11).
    """
    from torch._guards import Source

    if hasattr(Source, "__deepcopy__"):
        yield
        return
    Source.__deepcopy__ = lambda self, memo: self  # type: ignore[attr-defined]
    try:
        yield
    finally:
        del Source.__deepcopy__  # type: ignore[attr-defined]


def begin_forward(ddp: DistributedDataParallel) -> None:
    """What `ddp(...)` does before it calls its module, without the inputs (torch 2.11, 2.13)."""
    ddp._pre_forward(None)


def end_forward(ddp: DistributedDataParallel) -> None:
    """What `ddp(...)` does after it called its module, without the outputs (torch 2.11, 2.13)."""
    ddp._post_forward(None)


def exchange_buffers(ddp: DistributedDataParallel) -> None:
    """Give buffers the values of the first rank, where the next forward would (torch 2.11, 2.13)."""
    if ddp._check_sync_bufs_pre_fwd():
        ddp._sync_buffers()


def first_step_is_over(ddp: DistributedDataParallel) -> bool:
    """Whether a wrapper with `static_graph=True` knows its graph (torch 2.11, 2.13)."""
    return bool(ddp._static_graph_delay_allreduce_enqueued)


def buckets_are_settled(ddp: DistributedDataParallel) -> bool:
    """Whether the reducer has its final buckets: a step that rebuilds them broadcasts and reads on the host."""
    return bool(ddp._get_ddp_logging_data().get("has_rebuilt_buckets", 0))


def has_run(ddp: DistributedDataParallel) -> bool:
    """Whether a wrapper has been called (torch 2.11, 2.13)."""
    return bool(ddp._lazy_init_ran)


def rebuild_reducer(ddp: DistributedDataParallel) -> None:
    """Make the reducer of a wrapper that has made no step anew, in the present stream (torch 2.11, 2.13).

    The accumulators of gradients belong to the stream in which it is made. The new reducer gets the communication
    hooks of the old one that are written in Python.
    """
    del ddp.reducer, ddp.logger  # with them the accumulators go
    parameters, sparse = ddp._build_params_for_reducer()
    names = ddp._build_debug_param_to_name_mapping(parameters)
    ddp._ddp_init_helper(parameters, sparse, names, ddp.static_graph)
    for hook, state in ddp._comm_hooks:
        distributed._register_comm_hook(ddp.reducer, state, hook)  # type: ignore[attr-defined]
    if ddp.static_graph:
        ddp.reducer._set_static_graph()
        if ddp.logger is not None:
            ddp.logger._set_static_graph()


def stop_sampling(ddp: DistributedDataParallel) -> None:
    """Let the reducer measure no further iterations: it reads events on the host then (torch 2.11, 2.13).

    It does so in its first ten iterations and in every one whose number the sample rate divides. Iterations count
    calls of `prepare_for_forward`, and nothing but these measurements depends on their number.
    """
    ddp._set_ddp_runtime_logging_sample_rate(2**31 - 1)
    for _ in range(11):
        ddp.reducer.prepare_for_forward()


def reset_reducer(ddp: DistributedDataParallel) -> None:
    """Make the reducer usable after a backward that did not end. Every rank has to call it (torch 2.11, 2.13)."""
    ddp._has_rebuilt_buckets = False
    ddp.reducer._reset_state()


def comm_hook(ddp: DistributedDataParallel) -> str:
    """The name of what replaces the all-reduce, "" without such a hook (torch 2.11, 2.13)."""
    if ddp._comm_hooks:
        hook, _ = ddp._comm_hooks[0]
        return str(getattr(hook, "__qualname__", type(hook).__qualname__))
    return str(ddp._get_ddp_logging_data().get("comm_hook", ""))


def registered_hook(ddp: DistributedDataParallel) -> tuple[Any, Any] | None:
    """The communication hook of a wrapper that is written in Python, with its state (torch 2.11, 2.13)."""
    if not ddp._comm_hooks:
        return None
    hook, state = ddp._comm_hooks[0]
    return hook, state


def acts_in_python(ddp: DistributedDataParallel) -> tuple[bool, int, bool]:
    """What the forward and backward of a wrapper do in Python in the next step. Hot path (torch 2.11, 2.13).

    Returns:
        Whether buffers are exchanged, how many communication hooks there are, whether ranks may have joined.
    """
    return ddp.require_forward_param_sync, len(ddp._comm_hooks), ddp._join_config.enable


def has_delayed_parameters(ddp: DistributedDataParallel) -> bool:
    """Whether some parameters are reduced apart, in one call after the backward (torch 2.11, 2.13)."""
    return bool(ddp._delay_all_reduce_params)
