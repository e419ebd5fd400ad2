"""Memory of the first steps on a GPU."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._inductor.runtime.triton_heuristics import CachingAutotuner

from pygraph_train import GraphedStep, backend
from pygraph_train.putting_back import HostCopy

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    layers = [layer for _ in range(12) for layer in (nn.Linear(256, 256), nn.GELU(), nn.LayerNorm(256))]
    model = nn.Sequential(*layers).cuda()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)


def peak_of(step: object, x: Tensor) -> tuple[int, Tensor]:
    """Bytes above those that are allocated between steps, in three steps, and the loss of the last one."""
    assert callable(step)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for _ in range(3):
        loss = step(x)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before, loss


def test_steps_before_compilation_need_less_memory_than_plain_ones() -> None:
    x = torch.randn(1 << 14, 256, device="cuda")
    model, optimizer = model_and_optimizer()

    def plain(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    plain_peak, plain_loss = peak_of(plain, x)
    ours, its_optimizer = model_and_optimizer()
    step = GraphedStep(
        lambda x: ours(x).square().mean(), model=ours, optimizer=its_optimizer, compile=True, warmup_steps=4
    )
    peak, loss = peak_of(step, x)
    step.close()
    assert torch.equal(plain_loss, loss)
    assert all(map(torch.equal, model.parameters(), ours.parameters()))
    assert peak < 0.8 * plain_peak


def test_benchmarks_in_regions_leave_no_memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Their buffer is as large as the device's last cache, and nothing else here is as large."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # where nothing was timed before
    cache = torch.cuda.get_device_properties(0).L2_cache_size
    most: list[int] = []

    def told(self: Any, *args: Any, **kwargs: Any) -> Any:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        try:
            return stock(self, *args, **kwargs)
        finally:
            most.append(torch.cuda.max_memory_allocated() - before)

    stock = CachingAutotuner.benchmark_all_configs
    monkeypatch.setattr(CachingAutotuner, "benchmark_all_configs", told)
    torch.compiler.reset()
    backend.reset()
    torch.cuda.empty_cache()
    model, _ = model_and_optimizer()
    x = torch.randn(256, 256, device="cuda")
    monkeypatch.setattr(torch._inductor.config, "max_autotune_pointwise", True)  # so that there are choices
    call = torch.compile(lambda x: model(x).square().mean(), backend="pygraph")
    call(x).backward()
    gc.collect()
    segments = torch.cuda.memory_snapshot()
    assert max(most) >= cache
    assert max(s["total_size"] for s in segments if tuple(s["segment_pool_id"]) == (0, 0)) < cache


def test_tensors_of_all_sizes_come_back_from_the_host_as_they_were() -> None:
    sizes = [(), (0,), (7,), (768, 2304), (5 << 20,), (1000, 33), (1,)]
    kinds = (torch.float32, torch.bfloat16, torch.int64, torch.bool)
    tensors = [torch.randn(size, device="cuda").mul(9).to(kind) for size in sizes for kind in kinds]
    tensors.append(torch.randn(300, 200, device="cuda").t())  # not contiguous
    before = [tensor.clone() for tensor in tensors]
    kept = HostCopy(tensors[0].device, tensors)
    for tensor in tensors:
        tensor.zero_()
    kept.restore()
    assert all(map(torch.equal, tensors, before))
