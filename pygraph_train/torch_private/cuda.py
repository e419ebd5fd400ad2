"""Private APIs of CUDA graphs, pools and streams."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from pygraph_train.torch_private.dispatch import TorchDispatchMode
from pygraph_train.torch_private.names import private


def abandon_pool(device: int, pool: tuple[int, int]) -> None:
    """End an allocation to a graph pool that a failed capture left open (torch 2.11, 2.13)."""
    try:
        torch._C._cuda_endAllocateToPool(device, pool)
    except RuntimeError:
        return  # it was closed after all
    torch._C._cuda_releasePool(device, pool)


@contextmanager
def allocating_in(device: int, pool: tuple[int, int]) -> Iterator[None]:
    """Tensors of the current stream are made in this pool, whatever thread makes them. (2.11, 2.13)"""
    torch._C._cuda_beginAllocateCurrentStreamToPool(device, pool)
    try:
        yield
    finally:
        torch._C._cuda_endAllocateToPool(device, pool)
        torch._C._cuda_releasePool(device, pool)


clear_cublas_workspaces: Callable[[], None] = private("torch._C._cuda_clearCublasWorkspaces")
"""Free cuBLAS workspaces of all streams; the next product allocates its own. (2.11, 2.13)"""


def cuda_graph_nodes(graph: torch.cuda.CUDAGraph) -> int:
    """Number of nodes of a captured graph, -1 without cuda-bindings (torch 2.11, cuda-bindings 13)."""
    try:
        from cuda.bindings import driver
    except ImportError:
        return -1
    answer: Any = driver.cuGraphGetNodes(driver.CUgraph(graph.raw_cuda_graph()))
    return int(answer[-1]) if int(answer[0]) == 0 else -1  # (status, nodes, count)


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


def driver_version() -> str | None:
    """The newest CUDA version that the driver of this machine can run, None without a driver. (2.13)"""
    asked = getattr(torch._C, "_cuda_getDriverVersion", None)  # builds without CUDA lack it
    version = 0 if asked is None else int(asked())
    return f"{version // 1000}.{version % 1000 // 10}" if version else None


@contextmanager
def expandable_segments() -> Iterator[None]:
    """New memory segments of the CUDA caching allocator grow and shrink instead of being kept in pieces.

    The setting of before comes back. (2.11, 2.13)
    """
    settings = torch.cuda.memory._snapshot()["allocator_settings"]
    if settings.get("expandable_segments", True):
        yield
        return
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    try:
        yield
    finally:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
