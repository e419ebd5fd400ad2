"""Memory of the benchmarks by which Inductor chooses between kernels."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from pygraph_train.patches import standing_in
from pygraph_train.torch_private.changes import SharedChange

__all__ = ["benchmarks_leave_no_memory"]


@contextmanager
def _leaving_none() -> Iterator[None]:
    if not torch.cuda.is_initialized():
        yield
        return
    from torch._inductor.runtime.triton_heuristics import CachingAutotuner

    stock = CachingAutotuner.benchmark_all_configs

    @functools.wraps(stock)
    def benchmark_all_configs(self: Any, *args: Any, **kwargs: Any) -> Any:
        before = torch.cuda.memory_reserved()
        try:
            return stock(self, *args, **kwargs)
        finally:
            if torch.cuda.memory_reserved() > before:
                torch.cuda.empty_cache()

    with standing_in([(CachingAutotuner, "benchmark_all_configs", benchmark_all_configs)]):
        yield


benchmarks_leave_no_memory = SharedChange(_leaving_none)
"""Context in which memory that Inductor's benchmarks have reserved goes back to the device. (2.11, 2.13)

A kernel is timed in its first run, with a buffer of the size of the device's last cache (60 MiB on an H200). The
allocator would keep this buffer, and tensors that stay would come to lie in it: its rest is of use to no graph's pool.
"""
