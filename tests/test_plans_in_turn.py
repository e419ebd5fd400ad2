"""Loops whose steps take turns: some run from other graphs than others. They are compared as a whole like all loops."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("accelerate")

import accelerate_training
import torch
from accelerate_training import fresh  # noqa: F401
from replays import runs_of_graphs, text_of
from torch import nn
from training import Net, differs

from pygraph_train import PyGraph
from pygraph_train.integrations.loop_report import LoopReport
from pygraph_train.selection import timing
from pygraph_train.selection.arms import NOTHING, OPTIMIZER, REGIONS, SEPARATE, Arm, Plan
from pygraph_train.step.plans_in_turn import PlansInTurn


def train(period: int, steps: int = 300, **options: Any) -> LoopReport:
    """Two models take turns, each for so many steps. One of them was not prepared, and has no regions."""

    def script(script: accelerate_training.Script) -> None:
        first, second = Net(), Net()
        optimizer: Any = torch.optim.AdamW([*first.parameters(), *second.parameters()], lr=0.01, fused=True)
        first, optimizer = script.accelerator.prepare(first, optimizer)
        generator = torch.Generator().manual_seed(1)
        for index in range(steps):
            model = (first, second)[index // period % 2]
            x, y = torch.randn(8, 6, generator=generator), torch.randint(0, 3, (8,), generator=generator)
            loss = nn.functional.cross_entropy(model(x), y)
            script.accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            script.write("loss", loss)
        script.write_state(nn.ModuleList([script.accelerator.unwrap_model(first), second]), optimizer)

    plain = accelerate_training.run(script, None)
    plugin = PyGraph(engine="emulated", warmup_steps=2, **options)
    ours = accelerate_training.run(script, plugin)
    assert plain.entries and differs([e for _, e in plain.entries], [e for _, e in ours.entries]) is None
    report = plugin.report()
    assert runs_of_graphs(report) >= 20, str(report)
    return report


@pytest.mark.parametrize("best", [NOTHING, SEPARATE], ids=str)
@pytest.mark.parametrize("period", [1, 2, 3])
@pytest.mark.quick
def test_the_fastest_way_is_kept(period: int, best: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds(arm: Arm) -> float:
        return 1e-3 if arm.plan == best else 2e-3

    monkeypatch.setattr(timing, "declared_seconds", seconds)
    report = train(period)
    assert report.controllers, str(report)
    assert report.controllers[-1].best.plan == best and report.controllers[-1].settled, str(report)
    if best == NOTHING:
        assert report.plan == "F B O" and report.steps_from_graphs < 60, str(report)
    else:
        assert report.steps_from_graphs > 100, str(report)


def test_the_report_of_a_loop_that_is_not_compared_tells_both_ways() -> None:
    """With `verify="always"` no loop is compared: its steps take twice as long."""
    told = text_of(train(1, steps=100, verify="always"))
    assert "has not ended" not in told, told
    assert "others run as plan {F} {B} {O}" in told or "others run as plan {F} {B} O" in told, told


def test_plans_take_turns_where_each_has_come_again() -> None:
    plans = PlansInTurn()
    for _ in range(6):
        plans.add(REGIONS, undisturbed=True)
    assert plans.steady == 5 and not plans.several and plans.plan() == REGIONS
    plans.add(OPTIMIZER, undisturbed=True)
    assert plans.steady == 0  # something has changed
    for index in range(40):
        assert not plans.add((REGIONS, OPTIMIZER)[index % 2], undisturbed=True)
    assert plans.several and plans.steady > 40 and plans.plan() == SEPARATE
    plans.add(NOTHING, undisturbed=True)
    assert not plans.several and plans.steady == 0  # it has come once
    plans.add(NOTHING, undisturbed=False)
    assert plans.steady == 0
