"""What Inductor's benchmarks reserve goes back to the device, while regions run for the first time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn
from torch._inductor.runtime.triton_heuristics import CachingAutotuner

from pygraph_train import backend
from pygraph_train.regions import region
from pygraph_train.torch_private.benchmarks import benchmarks_leave_no_memory


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> dict[str, int]:
    """A device on which some memory is reserved, and benchmarks that reserve more of it."""
    state = {"reserved": 100, "emptied": 0}

    def empty_cache() -> None:
        state["reserved"] = 100
        state["emptied"] += 1

    def stock(self: Any, more: int) -> str:
        state["reserved"] += more
        if more > 1000:
            raise torch.OutOfMemoryError("of this kernel")
        return "timings"

    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: state["reserved"])
    monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)
    monkeypatch.setattr(CachingAutotuner, "benchmark_all_configs", stock)
    return state


def benchmark(more: int) -> Any:
    """Time a kernel, which reserves so many bytes more."""
    return CachingAutotuner.benchmark_all_configs(object(), more)  # type: ignore[arg-type]


def test_what_benchmarks_reserve_goes_back(device: dict[str, int]) -> None:
    stock = CachingAutotuner.benchmark_all_configs
    with benchmarks_leave_no_memory():
        assert benchmark(0) == "timings"
        assert device == {"reserved": 100, "emptied": 0}
        with benchmarks_leave_no_memory():
            assert benchmark(60) == "timings"
        assert device == {"reserved": 100, "emptied": 1}
        with pytest.raises(torch.OutOfMemoryError, match="of this kernel"):
            benchmark(2000)
        assert device == {"reserved": 100, "emptied": 2}
    assert CachingAutotuner.benchmark_all_configs is stock
    benchmark(60)
    assert device == {"reserved": 160, "emptied": 2}


def test_the_first_run_of_each_region_leaves_no_memory_of_benchmarks(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[bool] = []

    @contextmanager
    def entering() -> Iterator[None]:
        entered.append(True)
        yield

    monkeypatch.setattr(region, "benchmarks_leave_no_memory", entering)
    model = nn.Linear(8, 8)
    call = torch.compile(model, backend=backend.pygraph, options={"engine": "emulated"})
    for _ in range(8):
        call(torch.randn(4, 8)).square().mean().backward()
    assert sum(row.replays for row in backend.report().regions) > 0
    assert entered == [True, True]
    torch.compiler.reset()
    backend.reset()
