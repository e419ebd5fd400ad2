"""CUDA graphs through torch: one side stream, one memory pool, captures that clean up after themselves."""

from __future__ import annotations

import gc
import math
import sys
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

from pygraph_train.graphs.cuda_graph import CudaGraph, finish_replays
from pygraph_train.graphs.engine import CaptureError
from pygraph_train.graphs.indirection import MovableInputs
from pygraph_train.graphs.one_capture import OneCapture
from pygraph_train.patches import not_collecting
from pygraph_train.problems import user_location
from pygraph_train.torch_private.cuda import (
    abandon_pool,
    allocating_in,
    clear_cublas_workspaces,
    expandable_segments,
)
from pygraph_train.torch_private.dispatch import TorchDispatchMode

T = TypeVar("T")


class _Allocating:
    """Context in which a thread makes tensors in a pool. Pools are destroyed afterwards, or torch ends the process."""

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._under_way = 0
        self._waiting: list[Any] = []

    def __enter__(self) -> None:
        with self._lock:
            self._under_way += 1

    def __exit__(self, *exc: object) -> None:
        with self._lock:
            self._under_way -= 1
            while self._waiting and not self._under_way:
                self._waiting.pop(0)

    def destroy(self, holder: dict[str, Any]) -> None:
        """Destroy what somebody holds who is gone, the last first, as soon as that is possible."""
        with self._lock:
            while holder:
                _, last = holder.popitem()
                self._waiting += [last] if self._under_way else []
                del last


_allocating = _Allocating()


class _Pool:
    """Memory of captures. The object keeps it while no graph uses it, with the gradients that live there.

    Attributes:
        id: of torch's pool.
        anchor: a small graph that stays in it, once there is one: torch's host allocator refuses a pool again that no
            graph uses any more (2.11: "use_count > 0").
    """

    def __init__(self) -> None:
        self.memory = torch.cuda.MemPool()
        self.id: tuple[int, int] = self.memory.id
        self.anchor: CudaGraph | None = None

    def __del__(self, destroy: Callable[[dict[str, Any]], None] = _allocating.destroy) -> None:
        destroy(vars(self))


_abandoned: list[tuple[torch.cuda.CUDAGraph, _Pool]] = []

_one_capture = OneCapture()  # CUDA allows one capture at a time in the caching allocator


class _Shared:
    """What all engines of one device share, for as long as one of them is open.

    A model that two of them train has one node for each parameter that adds up its gradients. The node belongs to the
    stream of the first capture that met it, and would break a capture on another one.

    Attributes:
        stream: captures.
        lasting: the pool of tensors that stay, once there are any.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self.lasting: _Pool | None = None


_shared: weakref.WeakValueDictionary[torch.device, _Shared] = weakref.WeakValueDictionary()

_RARELY = 50
"""A collection looks at everything where the last one that did is so many times longer ago than it took."""

_FIRST = 20.0
"""Seconds from the first capture of a process until a collection looks at everything."""

_YOUNG = 1
"""The generation up to which objects are looked at otherwise: those of a trace are among them."""


class _Garbage:
    """Collects what waits for the garbage collector, and what is old only now and then.

    It holds memory that no graph can use meanwhile. But traces of Dynamo and what libraries import are half a million
    objects: to look at all of them takes longer than the capture of a step, and one after the other would take most of
    a second for each shape of batches.
    """

    def __init__(self) -> None:
        self._due: float | None = None  # when everything is looked at

    def collect(self) -> None:
        """Collect before a capture."""
        now = time.perf_counter()
        if self._due is None:
            self._due = now + _FIRST
        if now < self._due:
            gc.collect(_YOUNG)
            return
        gc.collect()
        ended = time.perf_counter()
        self._due = ended + _RARELY * (ended - now)

    def expect(self) -> None:
        """Something large was given up: the next collection looks at everything."""
        self._due = -math.inf


_garbage = _Garbage()


class _WithoutGeneratorState(TorchDispatchMode):
    """Leaves out what torch writes to the random generator's state on the device when a capture begins."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is torch.ops.aten.fill_.Scalar else func(*args, **(kwargs or {}))


def begin_capture(graph: torch.cuda.CUDAGraph, pool: tuple[int, int] | None) -> None:
    """Begin a capture in the current stream, in which nothing is launched.

    torch launches two kernels there that set the generator's seed and offset (2.11). Nothing reads them before
    a replay, which sets them itself.
    """
    with _WithoutGeneratorState():
        graph.capture_begin(pool, capture_error_mode="thread_local")  # type: ignore[arg-type]


class CudaEngine:
    """Captures on the side stream of `device` into one private pool shared by all graphs of this engine.

    What its methods do is said in `graphs.engine.Engine`.

    Args:
        device: a CUDA device with an index.
    """

    name = "cuda"
    _pool: _Pool | None = None

    def __init__(self, device: torch.device) -> None:
        self.device = torch.device(
            "cuda", torch.cuda.current_device() if device.index is None else device.index
        )
        self._shared: _Shared | None = _shared.get(self.device) or _Shared(self.device)
        _shared[self.device] = self._shared
        self._pool = _Pool()

    @contextmanager
    def scratch_pool(self, pool: Any = None) -> Iterator[_Pool]:
        usual, self._pool = self._pool, pool or _Pool()
        try:
            yield self._pool
        finally:
            self._pool = usual

    @contextmanager
    def allocating_in(self, pool: Any) -> Iterator[None]:
        """On the stream of the captures, whose blocks no other one gets."""
        caller = torch.cuda.current_stream(self.device)
        self._stream.wait_stream(caller)
        try:
            with (
                _allocating,
                expandable_segments(),
                torch.cuda.stream(self._stream),
                allocating_in(self.device.index, pool.id),
            ):
                yield
        finally:
            clear_cublas_workspaces()
            caller.wait_stream(self._stream)

    @contextmanager
    def lasting_memory(self) -> Iterator[None]:
        shared = self._in_common()
        shared.lasting = shared.lasting or _Pool()
        memory = torch.cuda.use_mem_pool(shared.lasting.memory, self.device)
        with _allocating, expandable_segments(), memory:
            yield

    def _in_common(self) -> _Shared:
        if self._shared is None:
            raise RuntimeError("this engine was closed")
        return self._shared

    @property
    def _stream(self) -> torch.cuda.Stream:
        return self._in_common().stream

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def capture(self, fn: Callable[[], T]) -> tuple[CudaGraph, T]:
        with _allocating, _one_capture(), not_collecting():
            return self._capture(fn)

    def _capture(self, fn: Callable[[], T]) -> tuple[CudaGraph, T]:
        # Blocks that wait for the garbage collector or lie cached in the default pool cannot serve the
        # private pool: hand them back first, so that the capture does not come on top of them.
        self._tidy()
        if self._pool is None:
            raise RuntimeError("this engine was closed")
        with expandable_segments(), torch.cuda.stream(self._stream):
            self._anchor(self._pool)
        graph, under_way = torch.cuda.CUDAGraph(keep_graph=True), False
        caller = torch.cuda.current_stream(self.device)
        try:
            # A pool in fixed segments would keep what no longer fits together, for ever: 10 to 20% of it.
            with expandable_segments(), torch.cuda.stream(self._stream):
                # other threads (pinned memory, data loading) go on using CUDA: their calls are none of ours
                # a weight cast cached outside would go stale, one cached inside would outlive its memory
                torch.clear_autocast_cache()
                under_way = True
                begin_capture(graph, self._pool.id)
                try:
                    result = fn()
                finally:
                    failed = sys.exc_info()[1]
                    try:
                        with warnings.catch_warnings():  # that nothing was launched is no news to the user
                            warnings.filterwarnings("ignore", "The CUDA Graph is empty")
                            graph.capture_end()
                        under_way = False
                    except RuntimeError:
                        if failed is None:
                            raise
            return CudaGraph(graph), result
        except BaseException as error:
            self._clean_up(graph, under_way=under_way)
            if isinstance(error, torch.cuda.OutOfMemoryError) or not _is_cuda_error(error):
                raise
            raise CaptureError(_reason(error), user_location(error.__traceback__)) from error
        finally:
            torch.clear_autocast_cache()
            torch.cuda.set_stream(caller)

    def _anchor(self, pool: _Pool) -> None:
        if pool.anchor is not None:
            return
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        begin_capture(graph, pool.id)
        try:
            torch.zeros(1, device=self.device)
        finally:  # there may be no memory left for it
            graph.capture_end()
        pool.anchor = CudaGraph(graph)

    def _clean_up(self, graph: torch.cuda.CUDAGraph, *, under_way: bool) -> None:
        """Make stream, allocators and random generator usable again after a failed capture."""
        graph.reset()
        if not under_way:
            return
        # CUDA threw the capture away before torch could end it. torch's device allocator is told here; its
        # host allocator cannot be told and goes on asking the graph object whether an allocation is its
        # own: keep that object for ever, and its pool's name out of use.
        assert self._pool is not None
        abandon_pool(self.device.index, self._pool.id)
        _abandoned.append((graph, self._pool))
        self._pool = _Pool()
        self._in_common().stream = torch.cuda.Stream(self.device)  # the invalidated one may keep the error
        # torch leaves the generator marked as capturing, and the next dropout would raise. The end of a
        # capture that succeeds takes the mark off and does not touch the random state.
        mend = torch.cuda.CUDAGraph()
        with torch.cuda.stream(self._stream):
            begin_capture(mend, None)
            torch.zeros(1, device=self.device)
            mend.capture_end()
        mend.reset()

    def movable(self, inputs: Sequence[torch.Tensor]) -> MovableInputs:
        return MovableInputs(inputs)

    def trim(self) -> None:
        """Return cached blocks of the default pool to the device: replays have no use for them."""
        torch.cuda.synchronize(self.device)
        clear_cublas_workspaces()
        torch.cuda.empty_cache()

    def _tidy(self) -> None:
        _garbage.collect()
        self.trim()

    def peak_memory(self) -> int:
        return torch.cuda.max_memory_reserved(self.device)

    def room(self) -> int:
        return self.peak_memory() - torch.cuda.memory_reserved(self.device)

    def close(self) -> None:
        """Release the pools."""
        if self._pool is None:
            return
        finish_replays()
        if self._pool.anchor is not None:
            self._pool.anchor.close()
        if not _one_capture.anywhere:  # those of captures lie in the pool, and would keep its segments
            clear_cublas_workspaces()
        self._pool = self._shared = None
        _garbage.expect()  # inputs of its graphs lie in reference cycles, and keep segments of its pools

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing():  # a default, as `sys` may be gone by then
            self.close()


def _is_cuda_error(error: BaseException) -> bool:
    if not isinstance(error, RuntimeError):
        return False
    text = str(error)
    return any(
        sign in text
        for sign in ("CUDA error", "cudaError", "captur", "pinned", "CUBLAS_STATUS", "cuDNN error")
    )


def _is_of_backward(error: BaseException) -> bool:
    """Whether autograd's own threads have raised it: they have no frames of Python."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and frames[-1].f_code.co_filename == torch.autograd.graph.__file__


def _reason(error: BaseException) -> str:
    text = str(error).strip().partition("\n")[0]
    if "legacy stream" in text:
        return (
            "something of the step belongs to the default stream, which no capture can hold: a model in "
            "DistributedDataParallel that has made steps before pygraph-train met it, or results of an earlier step "
            "that somebody keeps with their autograd graph"
        )
    if "pinned" in text:
        return (
            "the step copies between the device and memory of the host that is not pinned (.tolist(), .cpu(), "
            ".to()), which a CUDA graph cannot hold"
        )
    part = "the backward of the step" if _is_of_backward(error) else "the step"
    return (
        f"{part} does something that a CUDA graph cannot hold (waits for the device, reads a value on the host, "
        f"or calls an operation that cannot be captured): {text}"
    )
