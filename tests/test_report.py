"""The report says what happened, in a table and as plain data."""

from __future__ import annotations

import json

import pytest
from training import CONFIG, Net, adam, adamw, batches, loss_of

from pygraph_train import GraphedStep, StepReport
from pygraph_train.diagnose.report import Fallback


@pytest.fixture(scope="module")
def report() -> StepReport:
    model = Net()
    step = GraphedStep(loss_of(model), model=model, optimizer=adam(model), config=CONFIG)
    for batch in batches(20):
        step(batch)
    return step.report()


def test_table(report):
    text = str(report)
    for part in (
        "emulated",
        "{F B} O",
        f"{report.steps_replayed} of 20",
        "captured",
        "eager kernels",
        "Adam",
    ):
        assert part in text, text


def test_to_dict_is_json(report):
    data = json.loads(json.dumps(report.to_dict()))
    assert data["steps"] == 20 and data["steps_replayed"] == report.steps_replayed
    assert data["captures"][0]["nodes"] > 0
    assert data["fallbacks"][0]["reason"] == report.fallbacks[0].reason
    assert data["first_replay_step"] == report.first_replay_step


def test_the_emulated_engine_claims_no_speed_up(report):
    assert report.speedup is None and "speed-up" not in str(report)


def test_rich_table(report):
    import rich.console

    console = rich.console.Console(record=True, width=200)
    console.print(report)
    assert "{F B} O" in console.export_text()


def test_a_reason_is_counted_once():
    report = StepReport()
    assert report.fell_back(Fallback("x", "a.py:1", "", 1))
    assert not report.fell_back(Fallback("x", "a.py:1", "", 2))
    assert report.fell_back(Fallback("x", "a.py:2", "", 3))
    assert [f.count for f in report.fallbacks] == [2, 1]


def test_empty_report_prints():
    assert "0 of 0" in str(StepReport())


def test_all_steps_are_counted():
    model = Net()
    step = GraphedStep(loss_of(model), model=model, optimizer=adamw(model), config=CONFIG)
    for index, batch in enumerate(batches(30)):
        step(batch)
        assert step.report().steps == index + 1
    assert step.report().steps_replayed == 30 - step.report().first_replay_step + 1
