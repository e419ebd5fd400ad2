"""Workloads of the benchmarks, tiny, on the hostile engine of test_backend.py: the bits of the run without graphs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_backend import hostile  # noqa: F401

import pygraph_train.backend as backend
from benchmarks.paper_workloads import build
from benchmarks.workloads import WorkloadUnavailable
from pygraph_train.regions import region_capture as capture
from pygraph_train.regions import zeros
from pygraph_train.regions.arena import Arena

STEPS = 12


def trained(name: str, **options: Any) -> list[torch.Tensor]:
    """Losses and gradients of some steps in mixed precision."""
    torch.compiler.reset()
    backend.reset()
    torch.manual_seed(0)
    try:
        workload = build(name, "tiny")
    except WorkloadUnavailable as unavailable:
        pytest.skip(str(unavailable))

    def loss_of(batch: Any) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return workload.loss(workload.module, batch)

    call = torch.compile(loss_of, backend="pygraph", options={"engine": "emulated", **options})
    found = []
    for step in range(STEPS):
        workload.module.zero_grad()
        torch.manual_seed(step)
        loss = call(workload.batches[step % len(workload.batches)])
        loss.backward()
        found += [loss.detach().clone(), *(p.grad.clone() for p in workload.module.parameters())]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gpt2", "speech"])
def test_a_workload_has_the_bits_of_the_run_without_graphs(
    hostile: Arena,  # noqa: F811
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for module in (capture, zeros):
        monkeypatch.setattr(module, "LARGE", 1)
    expected = trained(name, warmup_runs=10**6, transform=False, direct=False)
    for want, got in zip(expected, trained(name), strict=True):
        assert torch.equal(want, got)
    rows = backend.report().regions
    assert hostile.engine.reused >= 5  # type: ignore[attr-defined]
    assert sum(row.replays for row in rows) >= STEPS
    assert any("casts of inputs run in" in change for row in rows for change in row.changes)
