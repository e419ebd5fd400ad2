"""The report says what happened, in a table and as plain data; copies of it say the same for ever."""

from __future__ import annotations

import copy
import json
import pickle
import re
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from training import CONFIG, Net, adam, adamw, batches, line_of, loss_of

from pygraph_train import GraphedStep, PyGraphConfig, StepReport
from pygraph_train.boundary import Boundary
from pygraph_train.core.region import PhaseRegions
from pygraph_train.plans import NOTHING, SEPARATE, Plan
from pygraph_train.report import step_report, table
from pygraph_train.report.announcements import metrics_of
from pygraph_train.report.step_report import Fallback
from pygraph_train.step import graphed
from pygraph_train.step.phase_runner import PhaseRunner

EVENTS = (
    "began",
    "step_began",
    "step_ended",
    "update_ended",
    "timed",
    "compared",
    "runs_with",
    "captured",
    "cut",
    "fell_back",
    "failed",
    "note",
)


@pytest.fixture(scope="module")
def report() -> Iterator[StepReport]:
    model = Net()
    step = GraphedStep(loss_of(model), model=model, optimizer=adam(model), config=CONFIG)
    for batch in batches(20):
        step(batch)
    yield step.report()
    step.close()


def test_table(report: StepReport) -> None:
    text = str(report)
    for part in ("emulated", "{F} {B} O", f"forward {report.steps_replayed}", "Adam"):
        assert part in text, text


def test_to_dict_is_json(report: StepReport) -> None:
    data = json.loads(json.dumps(report.to_dict()))
    assert data["steps"] == 20 and data["steps_replayed"] == report.steps_replayed > 10
    assert data["phases_from_graphs"] == {"F": report.steps_replayed, "B": report.steps_replayed, "O": 0}
    assert data["captures"][0]["step"] == data["first_replay_step"] == report.first_replay_step
    assert data["fallbacks"][0]["reason"] == report.fallbacks[0].reason
    assert data["headline"] == report.headline() and data["running_plan"] == "{F} {B} O"


def test_the_emulated_engine_claims_no_speed_up(report: StepReport) -> None:
    assert report.speedup is None and "speed-up" not in str(report) and " ms" not in str(report)


def test_rich_prints_the_same(report: StepReport) -> None:
    rich_console = pytest.importorskip("rich.console")
    console = rich_console.Console(record=True, width=200)
    console.print(report)
    assert console.export_text().split() == str(report).split()


def test_a_reason_is_counted_once() -> None:
    report = StepReport()
    assert report.fell_back(Fallback("x", "a.py:1", "", 1))
    assert not report.fell_back(Fallback("x", "a.py:1", "", 2))
    assert report.fell_back(Fallback("x", "a.py:2", "", 3))
    assert [f.count for f in report.fallbacks] == [2, 1]


def test_what_holds_on_the_cpu_alone_is_named_last() -> None:
    model = Net()
    optimizer = torch.optim.Adam(model.parameters())
    with GraphedStep(loss_of(model), model=model, optimizer=optimizer, config=CONFIG) as step:
        for batch in batches(12):
            step(batch)
        assert "Adam's CPU kernels" in step.report().headline()
        assert "a GPU has other kernels" in step.report().headline()
        step.report().fell_back(Fallback("something else stands in the way", None, "", 1))
        assert "CPU kernels" not in step.report().headline()


def test_many_shapes_are_named_with_their_number() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

    def loss_of_rows(x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean()

    with GraphedStep(loss_of_rows, model=model, optimizer=adamw(model), config=CONFIG) as step:
        for rows in [*range(3, 9), *range(3, 23)]:
            step(torch.randn(rows, 6))
        text, captures = " ".join(str(step.report()).split()), step.report().captures
        (found,) = [note for note in step.report().notes if "sets of shapes" in note]
    shapes = int(re.findall(r"recorded for (\d+) sets of shapes in \d", found)[0])
    assert 8 < shapes <= 20 and shapes == step.report().captures[-1].shapes
    assert found in text and "Nothing stands in the way of more" in text
    assert "such as 20x6; 21x6; 22x6" in text, "a few of them"
    assert {"3x6", "22x6"} <= {capture.sizes for capture in captures}


def test_more_shapes_than_are_kept_stand_in_the_way() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    config = PyGraphConfig(engine="emulated", max_signatures=4)

    def loss_of_rows(x: torch.Tensor) -> torch.Tensor:
        return model(x).square().mean()

    with GraphedStep(loss_of_rows, model=model, optimizer=adamw(model), config=config) as step:
        for rows in [*range(3, 9), *range(3, 23)]:
            step(torch.randn(rows, 6))
        assert "as many recordings for sets of shapes and numbers as are kept" in step.report().headline()


@pytest.mark.parametrize("compiled", [False, True])
def test_a_capture_says_which_kernels_it_holds(compiled: bool) -> None:
    engine: Any = SimpleNamespace(name="cuda")
    regions = PhaseRegions(engine, PyGraphConfig(compile=compiled), list, print, Boundary())
    report = StepReport(engine="emulated")
    regions.recorded = 1
    regions.report_to(report, 4)
    assert [capture["compiled"] for capture in report.to_dict()["captures"]] == [compiled]


class Reads(nn.Module):
    """A value is read between two layers, or behind the last one."""

    def __init__(self, between: bool) -> None:
        super().__init__()
        self.first, self.second, self.between = nn.Linear(6, 8), nn.Linear(8, 3), between
        self.largest = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        if self.between:
            x = x * min(x.max().item(), 1.0)  # here
        x = torch.tanh(self.second(x))
        self.largest = x.max().item()
        return x


@pytest.mark.quick
@pytest.mark.parametrize("by_hand", [False, True], ids=["loss", "by hand"])
@pytest.mark.parametrize("between", [True, False], ids=["between", "behind"])
def test_a_graph_break_that_cuts_the_forward_is_named(between: bool, by_hand: bool) -> None:
    """In a loop, or in a step: one behind the last layer cuts nothing, also where the module is called twice."""
    model = Reads(between)
    optimizer = adamw(model)

    def step_fn(batch: Any) -> torch.Tensor:
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
        if by_hand:
            loss = loss + model(batch[0] + 1).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return loss

    options: Any = {"model": model, "optimizer": optimizer, "config": CONFIG, "manual_optimization": by_hand}
    with GraphedStep(step_fn, **options) as step:
        for batch in batches(16):
            step(batch)
        report = step.report()
    assert report.running_plan == "{F} {B} {O}" and report.fallbacks == []
    hint, where = "In the way of a single graph for the forward: the graph breaks: ", line_of(Reads, "# here")
    assert (hint in report.headline() and f"({where}). Move the line" in report.headline()) is between
    assert ("Nothing stands in the way of more." in report.headline()) is not between
    assert [cut["where"] for cut in report.to_dict()["cuts"]] == [where] * between
    assert "graph break" not in dict(report.rows())  # the first line has it


def test_empty_report_prints() -> None:
    assert str(StepReport()).startswith("pygraph-train: No training step was counted.\n")


def test_all_steps_are_counted() -> None:
    model = Net()
    step = GraphedStep(loss_of(model), model=model, optimizer=adamw(model), config=CONFIG)
    for index, batch in enumerate(batches(30)):
        step(batch)
        assert step.report().steps == index + 1
    assert step.report().steps_replayed == 30 - (step.report().first_replay_step or 0) + 1
    assert 20 < step.report().steps_from_graphs <= step.report().steps_replayed


# -- times ----------------------------------------------------------------------------------------------


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> StepReport:
    """A report as a GPU would fill it."""
    memory = {"peak_reserved_mib": 1, "peak_allocated_mib": 1}
    for module in (step_report, table):
        monkeypatch.setattr(module, "peak_memory_mib", lambda: memory)
    report = StepReport(engine="cuda")
    report.runs_with(SEPARATE)
    for _ in range(400):
        report.step_began()
        report.step_ended(SEPARATE, updated=True)
    report.replay_intervals.clear()
    report.replay_intervals.extend((0.004, 0.006, 0.009))
    return report


def test_the_first_line_says_how_much_faster_a_step_is(measured: StepReport) -> None:
    ran = "400 of 400 training steps (100%) ran from graphs, as plan {F} {B} {O}"
    assert measured.headline() == f"{ran}. Nothing stands in the way of more."
    assert "step without graph" not in dict(measured.rows()), "no such step was timed"
    measured.timed(0.0057, 0.012, 0.003)
    assert measured.headline() == (
        f"{ran}, 2.0 times as fast as before (12.00 ms a step, now 6.00 ms). Nothing stands in the way of more."
    )
    measured.timed(0.010, 0.012, 0.003)
    assert "(12.00 ms a step, now 10.00 ms)" in measured.headline(), "the host runs ahead of the GPU"
    measured.timed(0.015, 0.012, 0.003)
    assert "; a step takes 15.00 ms, and 12.00 ms without a graph." in measured.headline()
    rows = dict(measured.rows())
    assert rows["step with graph"].startswith("15.00 ms") and rows["speed-up"] == "0.80x"
    assert json.loads(json.dumps(measured.to_dict()))["speedup"] == pytest.approx(0.8)


def test_steps_that_are_faster_without_graphs_are_told(measured: StepReport) -> None:
    measured.timed(0.009, 0.0075, 0.003)
    measured.runs_with(NOTHING)
    measured.fell_back(Fallback("steps are faster without graphs: 7.50 instead of 9.00 ms", None, "", 33))
    assert measured.headline() == (
        "400 of 400 training steps (100%) ran from graphs, and the latest ones run without a graph. In the way of "
        "more: steps are faster without graphs: 7.50 instead of 9.00 ms."
    )
    assert measured.ms_with_graph is None and measured.speedup is None and measured.plan == "F B O"
    assert metrics_of(measured)["pygraph/step_ms"] == pytest.approx(7.5)


def test_loggers_get_the_present_time_of_a_step(measured: StepReport) -> None:
    assert metrics_of(StepReport()) == {}
    expected = {"pygraph/share_from_graphs": 1.0, "pygraph/step_ms": pytest.approx(6.0)}
    assert metrics_of(measured) == expected
    measured.engine = "emulated"
    assert metrics_of(measured) == {"pygraph/share_from_graphs": 1.0}


# -- copies ---------------------------------------------------------------------------------------------


def told(report: StepReport) -> list[Any]:
    """Everything that a report says."""
    return [str(report), report.to_dict(), report.running_plan]


@pytest.mark.parametrize(
    "way", [copy.deepcopy, lambda report: pickle.loads(pickle.dumps(report))], ids=["copied", "pickled"]
)
def test_a_copy_says_for_ever_what_held_then(way: Callable[[Any], Any]) -> None:
    model = Net()
    step = GraphedStep(loss_of(model), model=model, optimizer=adamw(model), config=CONFIG)
    copies = []
    for batch in batches(30):
        step(batch)
        copies.append((told(step.report()), way(step.report())))
    assert step.report().steps_replayed > 20
    assert [told(one) for _, one in copies] == [before for before, _ in copies]
    step.close()
    assert told(way(step.report())) == told(step.report())


# -- written, and never asked ---------------------------------------------------------------------------


class NoReport(StepReport):
    """Takes everything and keeps nothing."""


for event in EVENTS:
    assert callable(getattr(StepReport, event))
    setattr(NoReport, event, lambda self, *args, **kwargs: None)


def steps_of(report: type[StepReport], monkeypatch: pytest.MonkeyPatch) -> tuple[list[Any], list[Any], Any]:
    """What every step replayed, and what it computed."""
    torch.manual_seed(0)
    torch.compiler.reset()
    seen: list[tuple[bool, bool]] = []
    finish = PhaseRunner.finish

    def finish_and_look(self: PhaseRunner) -> None:
        finish(self)
        seen.append((self.replayed, self.update_replayed))

    with monkeypatch.context() as patch:
        patch.setattr(graphed, "StepReport", report)
        patch.setattr(PhaseRunner, "finish", finish_and_look)
        model = Net()
        optimizer = adamw(model)
        losses = []
        with GraphedStep(loss_of(model), model=model, optimizer=optimizer, config=CONFIG) as step:
            for index, batch in enumerate([*batches(40), *batches(10, size=4)]):
                if index == 30:
                    optimizer.param_groups[0]["betas"] = (0.8, 0.9)
                losses.append(step(batch))
            return seen, losses, step.report()


def test_training_is_the_same_with_a_report_that_forgets(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, losses, report = steps_of(StepReport, monkeypatch)
    found, others, nothing = steps_of(NoReport, monkeypatch)
    assert report.steps_replayed > 30 and nothing.steps == 0 and not nothing.captures
    assert found == expected and all(map(torch.equal, losses, others))


def test_a_plan_prints_its_graphs() -> None:
    assert [str(Plan()), str(SEPARATE), str(Plan(SEPARATE.graphs[:2]))] == [
        "F B O",
        "{F} {B} {O}",
        "{F} {B} O",
    ]
