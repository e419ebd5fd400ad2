"""The report says what happened, in a table and as plain data."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from training import CONFIG, Net, adam, adamw, batches, loss_of

from pygraph_train import GraphedStep, StepReport
from pygraph_train.report import step_report, table
from pygraph_train.report.step_report import Fallback
from pygraph_train.selection.arms import NOTHING, WHOLE, Arm
from pygraph_train.selection.controller import Controller
from pygraph_train.selection.timing import StepTime


@pytest.fixture(scope="module")
def report() -> StepReport:
    model = Net()
    step = GraphedStep(loss_of(model), model=model, optimizer=adam(model), config=CONFIG)
    for batch in batches(20):
        step(batch)
    return step.report()


def test_table(report):
    text, verbose = str(report), str(report.verbose())
    for part in ("emulated", "{F B} O", f"forward {report.steps_replayed}", "Adam"):
        assert part in text and part in verbose, text
    for part in ("captured", "eager kernels", "first replay", "plans not tried"):
        assert part not in text and part in verbose, verbose


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
    assert str(StepReport()).startswith("pygraph-train: No training step was counted.\n")


def test_all_steps_are_counted():
    model = Net()
    step = GraphedStep(loss_of(model), model=model, optimizer=adamw(model), config=CONFIG)
    for index, batch in enumerate(batches(30)):
        step(batch)
        assert step.report().steps == index + 1
    assert step.report().steps_replayed == 30 - step.report().first_replay_step + 1


@pytest.fixture
def measured() -> StepReport:
    """A report as a GPU would fill it."""
    report = StepReport(engine="cuda", plan="{F B O}", steps=400)
    fused, off = Arm(WHOLE), Arm(NOTHING)
    report.phase_seconds.update({"F": 0.010, "B": 0.015, "O": 0.005})
    report.ungraphed_seconds.append(0.030)
    report.latest.update({fused: StepTime(0.0004, 0.0057)})
    controller = Controller([fused, off], decided=report.decided)
    for _ in range(8):
        turn = controller.next_window()
        turn.samples += [0.0057 if turn.arm == fused else 0.030] * turn.measured
    report.controllers.append(controller)
    return report


def test_each_phase_says_what_it_took_and_why(measured):
    (row,) = measured.phases()
    assert (row.phases, row.kept) == ("F B O", True)
    assert row.off_ms == pytest.approx(30.0) and row.on_ms == pytest.approx(5.7)
    assert row.why.startswith("kept")
    kept, lost = measured.arms()
    assert (kept.arm, lost.arm) == ("{F B O}", "F B O")
    assert lost.ms == pytest.approx(30.0) and "5.7 ms" in lost.verdict


def test_launch_bound_steps_are_called_so(measured, monkeypatch):
    memory = {"peak_reserved_mib": 1, "peak_allocated_mib": 1}
    for module in (step_report, table):
        monkeypatch.setattr(module, "peak_memory_mib", lambda: memory)
    assert json.loads(json.dumps(measured.to_dict()))["phases"][0]["phases"] == "F B O"
    assert measured.gpu_idle_fraction_without_graphs == pytest.approx(0.81)
    rows = dict(measured.rows(verbose=True))
    assert "the GPU waited 81% of the step" in rows["launch-bound"]
    assert rows["phase F B O"].startswith("in a graph, 5.70 ms in a graph, 30.00 ms without one: kept: ")
    assert rows["exploration"].startswith(f"{measured.exploration_steps} steps ")


def test_the_first_line_says_how_much_faster_a_step_is(measured):
    for _ in range(400):
        measured.step_ended(WHOLE, updated=True)
    measured.replay_intervals.extend([0.006] * 3)
    assert measured.headline() == (
        "400 of 400 training steps (100%) ran from graphs, as plan {F B O}, 5.0 times as fast as before "
        "(30.00 ms a step, now 6.00 ms). Nothing stands in the way of more."
    )
    measured.replay_intervals.clear()
    assert "30.00 ms a step, now 5.70 ms" in measured.headline(), "the comparison has measured it"
    measured.replay_intervals.append(0.001)
    assert "30.00 ms a step, now 5.70 ms" in measured.headline(), "the host runs ahead of the GPU"
    measured.replay_intervals.clear()
    measured.replay_intervals.append(0.04)
    assert "; a step takes 40.00 ms, and 30.00 ms without a graph." in measured.headline()


def test_phases_of_a_split_plan_and_of_no_graphs(report):
    assert [(row.phases, row.kept) for row in report.phases()] == [("F B", True), ("O", False)]
    assert "Adam" in report.phases()[1].why
    assert all(row.off_ms is None and row.on_ms is None for row in report.phases()), "nothing was measured"
    assert [(row.phases, row.kept) for row in StepReport().phases()] == [
        ("F", False),
        ("B", False),
        ("O", False),
    ]


@pytest.mark.passes_without_graphs("it looks at the times of steps that run as they are")
def test_phase_times_of_the_warm_up_add_up():
    model = Net()
    step = GraphedStep(loss_of(model), model=model, optimizer=adamw(model), config=CONFIG)
    for batch in batches(20):
        step(batch)
    seconds = step.report().phase_seconds
    assert list(seconds) == ["F", "B", "O"] and all(s > 0 for s in seconds.values())
    assert sum(seconds.values()) <= max(step.report().ungraphed_seconds)


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_plot(measured, suffix, tmp_path):
    pytest.importorskip("matplotlib")
    for number, each in enumerate((measured, StepReport())):
        path = tmp_path / f"{number}{suffix}"
        each.plot(path)
        assert path.stat().st_size > 1000


def test_plot_without_matplotlib_says_what_to_install(measured, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ImportError, match=r"pip install matplotlib.*pygraph-train\[plot\]"):
        measured.plot(tmp_path / "x.png")


def test_printing_a_report_draws_no_random_numbers() -> None:
    script = """
import random
import pygraph_train.backend
from pygraph_train import StepReport

random.seed(0)
before = random.getstate()
str(StepReport()), str(pygraph_train.backend.report()), StepReport().__rich__()
assert random.getstate() == before
"""
    # in a process of its own: what draws is an import
    subprocess.run([sys.executable, "-c", script], check=True)
