"""What tests on a GPU share."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._inductor.runtime.triton_heuristics import CachingAutotuner

from pygraph_train.step.compile_wait import declared_price


@pytest.fixture(autouse=True)
def no_loop_waits_for_inductor() -> Iterator[None]:
    """Training here is short, and is about compiled steps."""
    with declared_price(0.0):
        yield


@pytest.fixture(scope="module")
def _cache_folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("inductor"))


@pytest.fixture
def same_block_sizes(monkeypatch: pytest.MonkeyPatch, _cache_folder: str) -> None:
    """Inductor times block sizes kernel by kernel, and sums are rounded as their blocks are: not where bits count."""

    def first_by_name(autotuner: Any, *_: Any, **__: Any) -> dict[Any, float]:
        ranked = sorted(autotuner.launchers, key=lambda launcher: str(launcher.config))
        return {launcher: float(rank) for rank, launcher in enumerate(ranked)}

    monkeypatch.setattr(CachingAutotuner, "benchmark_all_configs", first_by_name)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", _cache_folder)  # what was timed before is no answer either


@pytest.fixture
def matmul_precision_put_back() -> Iterator[None]:
    """`Accelerator(dynamo_backend="inductor")` allows TF32 for the whole process."""
    before = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(before)
