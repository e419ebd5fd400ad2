"""Private APIs of CUDA graphs, pools and streams."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

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


@functools.cache
def _expands(settings: str) -> bool:
    """Whether segments expand under these settings, as a snapshot tells: of all memory it took 0.3 seconds once."""
    found = torch._C._cuda_memorySnapshot((*torch.cuda.MemPool().id, False))["allocator_settings"]
    return bool(found.get("expandable_segments", True))


@contextmanager
def expandable_segments() -> Iterator[None]:
    """New memory segments of the allocator grow and shrink, and the setting of before comes back. (2.11, 2.13)"""
    if _expands(getattr(torch._C, "_accelerator_getAllocatorSettings", str)()):  # not in 2.11
        yield
        return
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    try:
        yield
    finally:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:False")
