"""Reports are copied and pickled at any time, and a copy says for ever what held then."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("accelerate")

import accelerate_training
import torch
from accelerate_training import fresh  # noqa: F401
from torch import nn
from training import Net, adamw, batches, loss_of

from pygraph_train import GraphedStep, PyGraph, StepReport, backend
from pygraph_train.selection import timing
from pygraph_train.selection.controller import Estimate
from pygraph_train.step import whole_loop
from pygraph_train.step.compile_wait import declared_price

WAYS = pytest.mark.parametrize(
    "way", [copy.deepcopy, lambda report: pickle.loads(pickle.dumps(report))], ids=["copied", "pickled"]
)


def told(report: StepReport) -> list[Any]:
    """Everything that a report says."""
    return [
        str(report),
        str(report.verbose()),
        report.to_dict(),
        report.running_plan,
        report.parts()[0].waits,
    ]


def run_loop(each: Callable[[int, PyGraph], None], steps: int, price: float) -> PyGraph:
    """Train with Accelerate, and call `each` after each step."""
    plugin = PyGraph(engine="emulated", warmup_steps=2)

    def script(made: accelerate_training.Script) -> None:
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        model, optimizer = made.accelerator.prepare(model, optimizer)
        for step, (x, y) in enumerate(batches(steps), 1):
            made.accelerator.backward(nn.functional.cross_entropy(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
            each(step, plugin)

    with declared_price(price):
        accelerate_training.run(script, plugin)
    return plugin


@WAYS
def test_of_a_loop_whose_modules_wait(way: Callable[[Any], Any]) -> None:
    copies = []

    def each(step: int, plugin: PyGraph) -> None:
        if step in (2, 8):
            report = plugin.report()
            copies.append((told(report), way(report)))
            assert told(copies[-1][1]) == copies[-1][0]

    plugin = run_loop(each, 12, price=1000.0)
    assert "expected to take about 1000 s" in plugin.report().waits
    assert [told(made) for _, made in copies] == [before for before, _ in copies]
    assert "not known yet" in copies[0][1].waits and "in the 8 steps so far" in copies[1][1].waits


@WAYS
def test_of_a_loop_that_is_compared_as_a_whole(
    way: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timing, "declared_seconds", lambda arm: 1e-3 * (1 + len(arm.plan.graphs)))
    monkeypatch.setattr(whole_loop, "Estimate", lambda **known: Estimate())
    copies = []

    def each(step: int, plugin: PyGraph) -> None:
        report = plugin.report()
        if report.controllers and step % 10 == 0:
            copies.append((told(report), way(report)))
            assert told(copies[-1][1]) == copies[-1][0]

    plugin = run_loop(each, 200, price=0.0)
    assert plugin.report().controllers[0].was_settled and plugin.report().plan == "F B O"
    assert not copies[0][1].controllers[0].was_settled and copies[-1][1].controllers[0].was_settled
    backend.reset()
    assert [told(made) for _, made in copies] == [before for before, _ in copies]
    assert told(way(plugin.report())) == told(plugin.report()) == told(way(way(plugin.report())))
    assert copies[-1][1].regions() and copies[-1][1].regions() is not plugin.report().regions()


@WAYS
def test_of_a_graphed_step(way: Callable[[Any], Any]) -> None:
    model = Net()
    step = GraphedStep(loss_of(model), model=model, optimizer=adamw(model), engine="emulated")
    copies = []
    for batch in batches(60):
        step(batch)
        copies.append((told(step.report()), way(step.report())))
    assert any(made.controllers for _, made in copies) and step.report().steps_replayed > 30
    assert [told(made) for _, made in copies] == [before for before, _ in copies]
    step.close()
    assert told(way(step.report())) == told(step.report())
