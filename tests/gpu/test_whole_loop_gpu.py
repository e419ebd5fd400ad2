"""Stock loops on a GPU are compared as a whole with the loops that they were, by the clock of the device."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("accelerate")

sys.path.insert(0, str(Path(__file__).parents[1]))
from accelerate_training import fresh, fresh_state  # noqa: F401

from pygraph_train import Accelerator, PyGraph, backend
from pygraph_train.integrations.loop_report import LoopReport
from pygraph_train.selection import timing
from pygraph_train.step.compile_wait import declared_price
from pygraph_train.torch_private.dynamo import compiled_call

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def train(
    steps: int, each: Callable[[int, nn.Module], None] = lambda step, model: None, **options: Any
) -> LoopReport:
    """The report of a loop that waits for the host, and was compared as a whole."""
    report = trained(steps, each, **options)
    (controller,) = report.controllers
    assert controller.settled, str(report)
    return report


def trained(
    steps: int, each: Callable[[int, nn.Module], None] = lambda step, model: None, **options: Any
) -> LoopReport:
    """The report of a loop that waits for the host."""
    with fresh_state():
        torch.manual_seed(0)
        parts = [part for _ in range(8) for part in (nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU())]
        accelerator = Accelerator(plugins=[PyGraph(**options)])
        model: Any = nn.Sequential(*parts)
        model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), fused=True))
        x = torch.randn(32, 64, device="cuda")
        for step in range(1, steps + 1):
            loss = model(x).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            each(step, model)
        assert loss.isfinite().item()
        report = accelerator.pygraph.report()
        accelerator.end_training()
    return report


def test_the_clock_of_the_device_decides() -> None:
    report = train(500)
    (controller,) = report.controllers
    assert len(controller.times) > 1 and all(0 < seconds < 1 for seconds in controller.times.values())
    assert controller.times[controller.best] <= 1.05 * min(controller.times.values()), str(report)
    assert report.plan == report.running_plan, str(report)
    assert " ms as plan" in report.compared_as_a_whole, str(report)


def test_a_short_loop_is_not_compiled() -> None:
    with declared_price(None):
        report = trained(100)
    assert not report.regions() and report.optimizer_steps_replayed > 20, str(report)
    assert "forward and backward ran as you wrote them" in report.to_dict()["waits"], str(report)
    assert not any(arm.compiled for c in report.controllers for arm in c.times), str(report)


def test_a_loop_is_compiled_after_the_declared_price_is_paid() -> None:
    begun: list[int] = []

    def each(step: int, model: nn.Module) -> None:
        if not begun and backend.report().regions:
            begun.append(step)

    backend.reset()
    with declared_price(0.05):  # some 150 ms of plain steps
        report = trained(500, each)
    assert begun and begun[0] > 5, str(report)
    assert any(region.replays for region in report.regions()), str(report)


@pytest.mark.parametrize("code", ["auto", True])
def test_a_loop_that_is_slower_with_regions_ends_without_their_graphs(
    code: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def declared(_: torch.device) -> timing.DeclaredStopwatch:
        return timing.DeclaredStopwatch(lambda arm: 2e-3 if arm.plan.graphs else 1e-3 + 5e-4 * arm.compiled)

    monkeypatch.setattr(timing, "CudaStopwatch", declared)
    compiled = []

    def each(step: int, model: nn.Module) -> None:
        if step == 480:
            compiled.append(compiled_call(model) is not None)

    report = train(500, each, compile=code)
    assert report.plan == report.running_plan == "F B O", str(report)
    assert compiled == [code is True]
