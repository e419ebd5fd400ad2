"""Plans with separate phases on a GPU: the same training, and times that are measured without a wait."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from pygraph_train import GraphedStep, PyGraphConfig
from pygraph_train.selection.arms import NOTHING, SPLIT, WHOLE, Arm
from pygraph_train.selection.controller import Estimate
from pygraph_train.selection.timing import CudaStopwatch, StepTime
from pygraph_train.step.decisions import Decisions

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

LR = 2.0**-9  # exact in float32, where capturable kernels hold it


def make(width: int = 64) -> nn.Module:
    torch.manual_seed(0)
    layers = [m for _ in range(4) for m in (nn.Linear(width, width), nn.ReLU(), nn.Dropout(0.1))]
    return nn.Sequential(*layers, nn.Linear(width, 1)).cuda()


def train(model: nn.Module, steps: int, config: PyGraphConfig | None, **options: Any) -> Any:
    """Train; returns losses, parameters and the report (None without a config)."""
    torch.manual_seed(7)
    width = next(model.parameters()).shape[1]
    data = [torch.randn(16, width, device="cuda") for _ in range(steps)]
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, fused=True)
    engine = config or PyGraphConfig(engine="off")
    scaler = (
        torch.amp.GradScaler("cuda", init_scale=1024.0, growth_interval=5) if options.get("scaler") else None
    )

    def step_fn(x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", torch.float16, enabled=scaler is not None):
            return model(x).float().square().mean()

    step = GraphedStep(
        step_fn,
        model=model,
        optimizer=optimizer,
        config=engine,
        scaler=scaler,
        max_grad_norm=options.get("max_grad_norm"),
    )
    losses = torch.stack([step(x) for x in data])
    report = step.report()
    step.close()
    return losses, [p.detach().clone() for p in model.parameters()], report


def equal(a: Any, b: Any) -> None:
    assert torch.equal(a[0], b[0]), (a[0] - b[0]).abs().max()
    for p, q in zip(a[1], b[1], strict=True):
        assert torch.equal(p, q)


@pytest.mark.parametrize(
    "options", [{}, {"max_grad_norm": 0.01}, {"scaler": True}, {"scaler": True, "max_grad_norm": 0.01}]
)
@pytest.mark.parametrize("off", ["forward", "backward"])
def test_the_optimizer_alone_equals_plain_training_bit_for_bit(off: str, options: dict[str, Any]) -> None:
    model = make()
    expected = train(copy.deepcopy(model), 64, None, **options)
    config = PyGraphConfig(compile=False, optimizer="on", **{off: "off"})
    found = train(model, 64, config, **options)
    equal(expected, found)
    assert found[2].optimizer_steps_replayed >= 50, str(found[2])


def test_every_plan_is_tried_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Decisions, "_estimate", lambda *args: Estimate())
    model = make()
    expected = train(copy.deepcopy(model), 600, None)
    found = train(model, 600, PyGraphConfig(compile=False))
    equal(expected, found)
    report = found[2]
    assert report.controllers[0].settled, str(report)
    assert {Arm(WHOLE), Arm(NOTHING)} <= set(report.controllers[0].times)
    assert report.exploration_steps <= report.controllers[0].rules.exploration


def test_a_launch_bound_step_settles_on_one_graph_without_exploration() -> None:
    report = train(make(), 100, PyGraphConfig(compile=False))[2]
    assert report.plan == str(WHOLE) and report.exploration_steps == 0, str(report)
    assert report.gpu_idle_fraction_without_graphs > 0.3, str(report)
    (row,) = report.phases()
    assert row.kept and row.off_ms > row.on_ms > 0
    assert any("more launches" in arm.verdict for arm in report.arms() if arm.arm == str(SPLIT))


def test_the_stopwatch_measures_device_work_and_never_waits() -> None:
    stopwatch = CudaStopwatch(torch.device("cuda", torch.cuda.current_device()))
    found: list[StepTime] = []
    a = torch.randn(4096, 4096, device="cuda")
    for _ in range(3):
        a @ a
    torch.cuda.synchronize()
    for _ in range(4):
        stopwatch.start()
        for _ in range(50):
            a @ a
        stopwatch.stop(Arm(NOTHING), found.append)
        stopwatch.collect()
    assert len(found) < 4, "products of a few milliseconds were over before the host asked"
    torch.cuda.synchronize()
    stopwatch.collect()
    assert len(found) == 4
    assert all(t.device > t.host for t in found), found
    assert all(t.seconds == t.device for t in found)
