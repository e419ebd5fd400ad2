"""How the processes of one training share its model: one process alone, or DistributedDataParallel's replicas."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from pygraph_train.problems import Problem
from pygraph_train.torch_private.distributed import (
    acts_in_python,
    begin_forward,
    buckets_are_settled,
    comm_hook,
    end_forward,
    exchange_buffers,
    first_step_is_over,
    has_delayed_parameters,
    has_run,
    rebuild_reducer,
    reset_reducer,
    stop_sampling,
)

__all__ = ["RECORDER", "Alone", "Replicas", "Replication", "beside_default_stream", "replication_of"]

RECORDER = ".seen_through.calls"
"""Suffix of the expression of the list that a trace writes to, once for each call of a wrapper."""


class Replication(Protocol):
    """What a step has to do for the other processes that train the same model."""

    group: Any
    """The process group of its collectives, None without one."""
    problem: Problem | None
    """Why no graph can hold its collectives, None where one may."""

    def seen_through(self) -> AbstractContextManager[None]:
        """Around traced calls and questions to their guards: a wrapper is no more than its module."""

    def around(self) -> AbstractContextManager[None]:
        """Around a traced call of the step's function: what the wrapper does before and after its module."""

    def not_called_once(self) -> Problem | None:
        """Why no graph can hold a step like the last one that was looked at."""

    def micro_batch(self, *, sync: bool) -> AbstractContextManager[None]:
        """Around forward and backward: whether gradients are exchanged in it."""

    def exchanging(self) -> bool:
        """Whether the next backward exchanges gradients, as far as the wrapper knows."""

    def uneven(self) -> bool:
        """Whether ranks may make different numbers of steps. Hot path."""

    def traceable(self) -> bool:
        """Whether the next step may be traced."""

    def ready(self) -> bool:
        """Whether the next step exchanges gradients as all later ones will."""

    def exchange_buffers(self) -> None:
        """Before a local forward: what the wrapper's forward would exchange. All ranks call it."""

    def local(self) -> AbstractContextManager[None]:
        """Around a forward and backward that is not part of training: nothing is exchanged."""

    def constants(self) -> tuple[Any, ...]:
        """What a capture of the next micro-batch bakes in of the one before."""

    def replayed(self, *, sync: bool) -> None:
        """A micro-batch came from a graph, in which gradients were exchanged or not."""

    def reduced(self, value: Tensor, *, mean: bool) -> Tensor:
        """The sum or mean of a value over all ranks. In a local forward, which exchanges nothing, the value itself."""

    def reduce(self, parameters: Iterable[Tensor]) -> None:
        """Exchange gradients of a local backward as the wrapper would have."""

    def reset(self) -> None:
        """After a capture that did not end on all ranks. All of them call it."""


_NO_CONTEXT = nullcontext()


class Alone:
    """One process, or several that share nothing."""

    group: Any = None
    problem: Problem | None = None

    def seen_through(self) -> AbstractContextManager[None]:
        """Nothing is wrapped."""
        return _NO_CONTEXT

    def around(self) -> AbstractContextManager[None]:
        """Nothing is wrapped."""
        return nullcontext()

    def not_called_once(self) -> Problem | None:
        """Nothing is wrapped."""
        return None

    def micro_batch(self, *, sync: bool) -> AbstractContextManager[None]:
        """Nothing is exchanged."""
        return nullcontext()

    def exchanging(self) -> bool:
        """There is nothing to be left out."""
        return True

    def uneven(self) -> bool:
        """Nobody waits for another one."""
        return False

    def traceable(self) -> bool:
        """Always."""
        return True

    def ready(self) -> bool:
        """Always."""
        return True

    def exchange_buffers(self) -> None:
        """Nothing is exchanged."""

    def local(self) -> AbstractContextManager[None]:
        """Nothing is exchanged."""
        return nullcontext()

    def constants(self) -> tuple[Any, ...]:
        """Nothing."""
        return ()

    def replayed(self, *, sync: bool) -> None:
        """Nothing to put in order."""

    def reduced(self, value: Tensor, *, mean: bool) -> Tensor:
        """The value itself."""
        return value

    def reduce(self, parameters: Iterable[Tensor]) -> None:
        """Nothing is exchanged."""

    def reset(self) -> None:
        """Nothing to put in order."""


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


class Replicas:
    """A model in DistributedDataParallel.

    Its module is traced, and its reducer is captured: the all-reduces are part of the graph of the backward.

    Args:
        wrapper: of the model.
        called: whether the step calls the wrapper itself. Otherwise the framework does so around the step.
    """

    def __init__(self, wrapper: DistributedDataParallel, *, called: bool = True) -> None:
        self.wrapper = wrapper
        self.group: Any = wrapper.process_group
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

    def exchanging(self) -> bool:
        """See `Replication.exchanging`: not inside of `no_sync()`."""
        return self.wrapper.require_backward_grad_sync

    def uneven(self) -> bool:
        """See `Replication.uneven`: inside of `torch.distributed.algorithms.Join`."""
        return acts_in_python(self.wrapper)[2]

    def traceable(self) -> bool:
        """See `Replication.traceable`. With `static_graph` the first step looks at what the wrapper returns."""
        return self._counted and (not self.wrapper.static_graph or first_step_is_over(self.wrapper))

    def ready(self) -> bool:
        """See `Replication.ready`. The reducer rebuilds its buckets once, and measures its first iterations."""
        _, hooks, _ = acts_in_python(self.wrapper)
        if hooks or not buckets_are_settled(self.wrapper):
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

        Only for a wrapper that has made no step: buckets are rebuilt after the first one.
        """
        if torch.cuda.is_available() and self.wrapper.device_type == "cuda" and not has_run(self.wrapper):
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
        value = value.clone()
        averages = mean and distributed.get_backend(self.group) != "gloo"
        op = distributed.ReduceOp.AVG if averages else distributed.ReduceOp.SUM
        distributed.all_reduce(value, op=op, group=self.group)
        return value.div_(distributed.get_world_size(self.group)) if mean and not averages else value

    @torch.no_grad()
    def reduce(self, parameters: Iterable[Tensor]) -> None:
        """See `Replication.reduce`: the mean over all ranks, as the reducer computes it."""
        ids = {id(p) for p in self.wrapper.module.parameters()}
        ranks = distributed.get_world_size(self.group)
        for p in parameters:
            if id(p) in ids and p.requires_grad and p.grad is not None:
                p.grad.mul_(1 / ranks)
                distributed.all_reduce(p.grad, group=self.group)

    def reset(self) -> None:
        """See `Replication.reset`."""
        reset_reducer(self.wrapper)


_SETTINGS = (
    (
        "NCCL_GRAPH_REGISTER",
        ("0",),
        "NCCL registers the memory of graphs, which hangs with memory that grows",
    ),
    ("TORCH_NCCL_BLOCKING_WAIT", ("0", ""), "collectives wait on the host, which a capture forbids"),
    (
        "TORCH_DISTRIBUTED_DEBUG",
        ("OFF", "INFO"),
        "each collective is checked on the host, which a capture forbids",
    ),
)
"""Environment variables of NCCL and torch, the values that are allowed (the default first), and why."""


@contextmanager
def beside_default_stream() -> Iterator[None]:
    """A stream of its own, in which a wrapper may be made whose steps are captured later."""
    present, stream = torch.cuda.current_stream(), torch.cuda.Stream()
    stream.wait_stream(present)
    with torch.cuda.stream(stream):
        yield
    present.wait_stream(stream)


def replication_of(model: nn.Module) -> Replication:
    """How this model is shared with other processes."""
    if isinstance(model, DistributedDataParallel):
        return Replicas(model)
    wrapper = next((m for m in model.modules() if isinstance(m, DistributedDataParallel)), None)
    if wrapper is None:
        return Alone()
    replicas = Replicas(wrapper)
    replicas.problem = Problem("a part of the model, and not the whole model, is in DistributedDataParallel")
    return replicas


def _problem(wrapper: DistributedDataParallel) -> Problem | None:
    """Why no graph can hold what the wrapper does."""
    if distributed.get_backend(wrapper.process_group) == "nccl":
        os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
        for name, allowed, why in _SETTINGS:
            setting = os.environ.get(name, allowed[0])
            if setting.upper() not in allowed:
                return Problem(f"{name}={setting} is set: {why}", fix=f"Leave {name} out")
    if wrapper.find_unused_parameters and not wrapper.static_graph:
        return Problem(
            "DistributedDataParallel(find_unused_parameters=True) looks through each step on the host",
            fix="static_graph=True, or find_unused_parameters=False where all parameters are used",
        )
    if name := comm_hook(wrapper):
        return Problem(f"the communication hook {name} takes the place of the all-reduce")
    if wrapper.mixed_precision is not None:
        return Problem("DistributedDataParallel(mixed_precision=...) casts in hooks that run Python")
    if has_delayed_parameters(wrapper):
        return Problem("DistributedDataParallel(delay_all_reduce_named_params=...) acts in Python")
    if wrapper.device_ids and len(wrapper.device_ids) > 1:
        return Problem("DistributedDataParallel with several devices in one process is not supported")
    return None
