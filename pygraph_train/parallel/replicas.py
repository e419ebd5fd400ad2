"""A model in DistributedDataParallel: each process has a copy of it, and gradients are averaged."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, distributed
from torch.nn.parallel import DistributedDataParallel

from pygraph_train.parallel.replication import Alone, exchanged
from pygraph_train.parallel.settings import problem_of_settings
from pygraph_train.problems import Problem, first_line
from pygraph_train.torch_private.distributed import (
    acts_in_python,
    begin_forward,
    buckets_are_settled,
    comm_hook,
    compile_in_buckets,
    end_forward,
    exchange_buffers,
    first_step_is_over,
    has_delayed_parameters,
    has_run,
    rebuild_reducer,
    registered_hook,
    reset_reducer,
    stop_sampling,
)
from pygraph_train.torch_private.dynamo import dynamo_restart
from pygraph_train.tracing.trace import Compiler

__all__ = ["Replicas", "beside_default_stream"]

CALLED_AGAIN = "the step calls the model in DistributedDataParallel more than once"


class _SeenThrough:
    """Counts the calls of wrappers in traced steps. A trace may write to it: see `RECORDER`."""

    def __init__(self) -> None:
        self.calls: list[int] = []


seen_through = _SeenThrough()


def _through(wrapper: DistributedDataParallel, *args: Any, **kwargs: Any) -> Any:
    """Stands for `DistributedDataParallel.forward`, which cannot be traced."""
    if seen_through.calls:
        if torch.compiler.is_compiling():
            raise RuntimeError(CALLED_AGAIN)
        begin_forward(wrapper)  # the trace was refused: as without it
    seen_through.calls.append(1)
    return wrapper.module(*args, **kwargs)


class Replicas(Alone):
    """A model in DistributedDataParallel.

    Its module is traced, and its reducer is captured: the all-reduces are part of the graph of the backward.

    Args:
        wrapper: of the model.
        called: whether the step calls the wrapper itself. Otherwise the framework does so around the step.
    """

    name = "DistributedDataParallel"

    def __init__(self, wrapper: DistributedDataParallel, *, called: bool = True) -> None:
        self.wrapper = wrapper
        self.group = wrapper.process_group
        self.problem = _problem(wrapper)
        self._called = called
        self._quiet = self._local = False
        self._counted, self._calls = not called, int(not called)

    @contextmanager
    def seen_through(self) -> Iterator[None]:
        """See `Replication.seen_through`."""
        stock = DistributedDataParallel.forward
        seen_through.calls.clear()
        DistributedDataParallel.forward = _through  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            DistributedDataParallel.forward = stock  # type: ignore[method-assign]
            seen_through.calls.clear()

    @contextmanager
    def around(self) -> Iterator[None]:
        """See `Replication.around`. Gradients of a step that never calls the wrapper are not exchanged."""
        begin_forward(self.wrapper)
        with self.seen_through():
            yield
            self._calls = len(seen_through.calls) if self._called else 1
        if self._calls:
            end_forward(self.wrapper)

    def not_called_once(self) -> Problem | None:
        """See `Replication.not_called_once`."""
        if self._calls > 1:
            return Problem(CALLED_AGAIN)
        if self._calls == 1 or not self._counted:
            return None
        return Problem(
            "the step never calls the model in DistributedDataParallel: its gradients are not exchanged",
            fix="Call the wrapped model, and not its module",
        )

    @contextmanager
    def micro_batch(self, *, sync: bool) -> Iterator[None]:
        """See `Replication.micro_batch`. What `no_sync()` does where gradients are not exchanged."""
        before = self.wrapper.require_backward_grad_sync
        self.wrapper.require_backward_grad_sync = sync
        try:
            with nullcontext() if self._counted else self._counting():
                yield
        finally:
            self.wrapper.require_backward_grad_sync = before

    @contextmanager
    def _counting(self) -> Iterator[None]:
        """Around the first step, which runs as it is: how often does it call the wrapper?"""
        stock, calls = DistributedDataParallel.forward, []

        def forward(wrapper: DistributedDataParallel, *args: Any, **kwargs: Any) -> Any:
            calls.append(1)
            return stock(wrapper, *args, **kwargs)

        DistributedDataParallel.forward = forward  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            DistributedDataParallel.forward = stock  # type: ignore[method-assign]
        self._counted, self._calls = True, len(calls)

    def exchanges(self, *, update: bool) -> bool:
        """See `Replication.exchanges`: only with an update, and not inside of `no_sync()`."""
        return update and self.wrapper.require_backward_grad_sync

    def uneven(self) -> bool:
        """See `Replication.uneven`: inside of `torch.distributed.algorithms.Join`."""
        return acts_in_python(self.wrapper)[2]

    def traceable(self) -> bool:
        """See `Replication.traceable`. With `static_graph` the first step looks at what the wrapper returns."""
        return self._counted and (not self.wrapper.static_graph or first_step_is_over(self.wrapper))

    def ready(self) -> bool:
        """See `Replication.ready`. The reducer rebuilds its buckets once, and measures its first iterations."""
        _, hooks, _ = acts_in_python(self.wrapper)
        if (hooks and not _is_known(self.wrapper)) or not buckets_are_settled(self.wrapper):
            return False
        if not self._quiet:
            self._quiet = True
            stop_sampling(self.wrapper)
        return True

    def exchange_buffers(self) -> None:
        """See `Replication.exchange_buffers`."""
        exchange_buffers(self.wrapper)

    @contextmanager
    def local(self) -> Iterator[None]:
        """See `Replication.local`."""
        before = self.wrapper.require_forward_param_sync
        self.wrapper.require_forward_param_sync = False
        self._local = True
        try:
            with self.micro_batch(sync=False):
                yield
        finally:
            self._local = False
            self.wrapper.require_forward_param_sync = before

    def constants(self) -> tuple[Any, ...]:
        """See `Replication.constants`. What comes in mid-run (hooks, `Join`) has no capture, and gets none."""
        return acts_in_python(self.wrapper)

    def leave_default_stream(self) -> None:
        """Let gradients be accumulated in a stream of their own: kernels of the default stream cannot be captured.

        Only for a wrapper that has made no step, whose steps may be captured: buckets are rebuilt after the first one.
        """
        if self.problem is not None or has_run(self.wrapper):
            return
        if torch.cuda.is_available() and self.wrapper.device_type == "cuda":
            with beside_default_stream():
                rebuild_reducer(self.wrapper)

    def replayed(self, *, sync: bool) -> None:
        """See `Replication.replayed`: after gradients that are exchanged, buffers are, too."""
        self.wrapper.require_forward_param_sync = sync

    @torch.no_grad()
    def reduced(self, value: Tensor, *, mean: bool) -> Tensor:
        """See `Replication.reduced`."""
        if self._local:
            return value
        return exchanged(value, self.group, mean=mean)

    @torch.no_grad()
    def reduce(self, parameters: Iterable[Tensor]) -> None:
        """See `Replication.reduce`: the mean over all ranks, as the reducer or the communication hook computes it."""
        ids = {id(p) for p in self.wrapper.module.parameters()}
        ranks = distributed.get_world_size(self.group)
        hook = registered_hook(self.wrapper)
        for p in parameters:
            if id(p) not in ids or not p.requires_grad or p.grad is None:
                continue
            if hook is None:
                p.grad.mul_(1 / ranks)
                distributed.all_reduce(p.grad, group=self.group)
            else:
                sent = p.grad.to(_sent_as()[hook[0]] or p.grad.dtype).div_(ranks)
                distributed.all_reduce(sent, group=self.group)
                p.grad.copy_(sent)

    def notes(self) -> Callable[[], None]:
        """See `Replication.notes`: whether the next forward exchanges buffers, which all ranks have to know alike."""
        wrapper, before = self.wrapper, self.wrapper.require_forward_param_sync

        def put_back() -> None:
            wrapper.require_forward_param_sync = before

        return put_back

    def in_pieces(self, compiler: Compiler) -> Compiler:
        """See `Replication.in_pieces`: one for each bucket of the reducer."""

        def compile(gm: torch.fx.GraphModule, inputs: list[Any], left: list[str]) -> Callable[..., Any]:
            of_pieces: list[str] = []
            try:
                compiled = compile_in_buckets(
                    self.wrapper, gm, inputs, lambda gm, inputs: compiler(gm, inputs, of_pieces)
                )
            except dynamo_restart():  # not a failure: Dynamo traces once more
                raise
            except Exception as error:
                why = first_line(error)
            else:
                left.extend(of_pieces)
                return compiled
            left.append(
                f"gradients are exchanged after the backward: it could not be compiled in pieces: {why}"
            )
            return compiler(gm, inputs, left)

        return compile

    def reset(self) -> None:
        """See `Replication.reset`."""
        reset_reducer(self.wrapper)


@contextmanager
def beside_default_stream() -> Iterator[None]:
    """A stream of its own, in which a wrapper may be made whose steps are captured later."""
    present, stream = torch.cuda.current_stream(), torch.cuda.Stream()
    stream.wait_stream(present)
    with torch.cuda.stream(stream):
        yield
    present.wait_stream(stream)


@functools.cache
def _sent_as() -> dict[Any, torch.dtype | None]:
    """Communication hooks that do nothing in Python but launch operations, and as what they send gradients."""
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks  # not in every build of torch

    return {
        default_hooks.allreduce_hook: None,
        default_hooks.fp16_compress_hook: torch.float16,
        default_hooks.bf16_compress_hook: torch.bfloat16,
    }


def _is_known(wrapper: DistributedDataParallel) -> bool:
    """Whether the communication hook of a wrapper is one of these, in the process group of the wrapper."""
    hook, state = registered_hook(wrapper) or (None, None)
    return hook in _sent_as() and state in (None, wrapper.process_group)


def _problem(wrapper: DistributedDataParallel) -> Problem | None:
    """Why no graph can hold what the wrapper does."""
    if (problem := problem_of_settings(wrapper.process_group)) is not None:
        return problem
    if wrapper.find_unused_parameters and not wrapper.static_graph:
        return Problem(
            "DistributedDataParallel(find_unused_parameters=True) looks through each step on the host",
            fix="static_graph=True, or find_unused_parameters=False where all parameters are used",
        )
    if (name := comm_hook(wrapper)) and not _is_known(wrapper):
        return Problem(f"the communication hook {name} takes the place of the all-reduce")
    if wrapper.mixed_precision is not None:
        return Problem("DistributedDataParallel(mixed_precision=...) casts in hooks that run Python")
    if has_delayed_parameters(wrapper):
        return Problem("DistributedDataParallel(delay_all_reduce_named_params=...) acts in Python")
    if wrapper.device_ids and len(wrapper.device_ids) > 1:
        return Problem("DistributedDataParallel with several devices in one process is not supported")
    return None
