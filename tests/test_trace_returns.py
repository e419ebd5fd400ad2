"""When a trace for batches of changing shapes is worth its time: the rule, and whole runs with measured times."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from test_changing_shapes import drawn, traces, train
from training import both

from pygraph_train.selection.returns import Costs, TraceReturns
from pygraph_train.step.launch_bound import LaunchBoundCheck
from pygraph_train.step.shapes import Shapes
from pygraph_train.step.signatures import Signatures
from pygraph_train.tracing.trace import Trace

STEP, TRACE = 0.02, 3.0
"""Seconds."""


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU that waits for the host: plain steps take 20 ms, and each trace takes 3 s."""
    ran, traced = TraceReturns.ran, TraceReturns.traced
    monkeypatch.setattr(LaunchBoundCheck, "wanted", staticmethod(lambda config, engine: True))
    monkeypatch.setattr(TraceReturns, "ran", lambda self, seconds: ran(self, STEP))
    monkeypatch.setattr(
        TraceReturns, "traced", lambda self, seconds, dynamic: traced(self, TRACE, dynamic=True)
    )


@pytest.fixture
def traced_in(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The numbers of the steps in which something is traced for the first time."""
    found: list[int] = []
    begin = Signatures.traces
    made = Shapes.served

    def served(self: Shapes, *args: object) -> object:
        found_in[0] = self._training.step
        return made(self, *args)  # type: ignore[arg-type]

    def traces_(self: Signatures, signature: object) -> None:
        found.append(found_in[0])
        begin(self, signature)  # type: ignore[arg-type]

    found_in = [0]
    monkeypatch.setattr(Shapes, "served", served)
    monkeypatch.setattr(Signatures, "traces", traces_)
    return found


@pytest.mark.passes_without_graphs("numbers only")
@pytest.mark.quick
def test_a_trace_is_made_when_graphs_could_have_saved_what_it_costs() -> None:
    returns = TraceReturns()
    steps = 0
    returns.ran(STEP)
    while not returns.pays(None):
        returns.ran(STEP)
        steps += 1
    assert steps * STEP / 2 == pytest.approx(2 * TRACE, rel=0.02), "captures cost as much again"


@pytest.mark.passes_without_graphs("numbers only")
@pytest.mark.quick
def test_another_trace_has_to_be_earned_anew() -> None:
    returns = TraceReturns()
    for _ in range(1000):
        returns.ran(STEP)
    assert returns.pays(None)
    returns.traced(10.0, dynamic=True)
    assert not returns.pays(None)
    for _ in range(1999):
        returns.ran(STEP)
    assert not returns.pays(None)
    returns.ran(STEP)
    assert returns.pays(None)


@pytest.mark.passes_without_graphs("numbers only")
@pytest.mark.quick
def test_a_trace_for_many_shapes_is_taken_to_cost_more_than_one_for_one_shape() -> None:
    returns = TraceReturns()
    returns.ran(STEP)
    returns.traced(1.5, dynamic=False)
    assert returns.trace == 3.0
    returns.traced(2.0, dynamic=True)
    assert returns.trace == 3.0


@pytest.mark.passes_without_graphs("numbers only")
@pytest.mark.quick
def test_what_is_not_measured_is_not_waited_for() -> None:
    assert TraceReturns().pays(None)


@pytest.mark.passes_without_graphs("numbers only")
@pytest.mark.quick
@pytest.mark.parametrize(("left", "pays"), [(0, False), (200, False), (1000, True), (math.inf, True)])
def test_the_number_of_steps_that_are_left_decides(left: float, pays: bool) -> None:
    returns = TraceReturns()
    for _ in range(10_000):
        returns.ran(STEP)
    assert returns.pays(left) is pays


@pytest.mark.passes_without_graphs("numbers only")
@pytest.mark.quick
@pytest.mark.parametrize("steps", [1, 100, 599, 600, 601, 900, 2000, 100_000])
def test_no_run_takes_more_than_twice_as_long_as_the_better_one(steps: int) -> None:
    """Graphs that save half of a step; one trace for them, and captures that take as long together."""
    returns, spent, traced = TraceReturns(), 0.0, False
    returns.ran(STEP)
    returns.steps = 0
    for _ in range(steps):
        if not traced and returns.pays(None):
            traced, spent = True, spent + 2 * TRACE
        spent += STEP / 2 if traced else STEP
        returns.ran(STEP)
    assert spent <= 2 * min(steps * STEP, 2 * TRACE + steps * STEP / 2)


@pytest.mark.usefixtures("measured")
@pytest.mark.passes_without_graphs("the run is shorter than what a graph needs")
@pytest.mark.parametrize("lengths", [range(16, 65), [16, 24, 32, 40, 48]], ids=["49", "5"])
def test_a_short_run_on_changing_lengths_traces_nothing(lengths: range | list[int]) -> None:
    with traces() as found:
        report = both(train(drawn(lengths, 590)), never="a trace costs more than this run")
    assert not found and not report.captures
    assert not report.fallbacks, str(report)
    told = " ".join(str(report).split())
    assert "The shapes of batches change" in told and "fuse='on' at once" in told


@pytest.mark.usefixtures("measured")
def test_a_longer_run_makes_one_trace_when_that_is_paid_for(traced_in: list[int]) -> None:
    with traces() as found:
        report = both(train(drawn([16, 24, 32, 40, 48], 720)), replays=80, plan="{F B O}")
    assert len(found) == 1, "none for the first length alone"
    assert 600 <= traced_in[0] <= 610
    assert report.shapes.with_graphs == 5
    assert "shapes of batches change" not in str(report)


@pytest.mark.usefixtures("measured")
def test_a_length_that_stays_is_traced_at_once(traced_in: list[int]) -> None:
    report = both(train([16] * 40), replays=25, plan="{F B O}")
    assert traced_in[0] <= 4
    assert report.shapes.met == 1


@pytest.mark.usefixtures("measured")
def test_a_length_that_stays_after_another_one_is_traced_soon(traced_in: list[int]) -> None:
    with traces() as found:
        report = both(train([16] * 2 + [24] * 60), replays=25, plan="{F B O}")
    assert len(found) == 1 and traced_in[0] <= 20
    assert report.shapes.with_graphs == 1


@pytest.mark.usefixtures("measured")
def test_a_last_batch_that_is_smaller_is_not_traced() -> None:
    counts = ([4] * 20 + [3]) * 8
    with traces() as found:
        report = both(train([16] * len(counts), counts), replays=140, plan="{F B O}")
    assert len(found) == 1, "the smaller batch comes too rarely"
    assert report.shapes.with_graphs == 1


@pytest.mark.parametrize("option", [{"fuse": "on"}, {"compile": True}, {"verify": "always"}])
@pytest.mark.passes_without_graphs("options only")
@pytest.mark.quick
def test_who_asks_for_graphs_does_not_wait(option: dict[str, object]) -> None:
    from pygraph_train import PyGraphConfig

    wanted: Callable[..., bool] = LaunchBoundCheck.wanted
    assert wanted(PyGraphConfig(), "cuda")
    assert not wanted(PyGraphConfig(**option), "cuda")  # type: ignore[arg-type]


def test_guards_are_checked_once_for_a_shape_without_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take as long as several percent of a step of BERT; only a step that may get a graph needs them."""
    least, checks, pays, holds = 12, [0], Costs.steps, Trace.holds

    def steps(self: Costs, unmeasured: int, **kinds: Any) -> float:
        return pays(self, least, **kinds)

    def counted(self: Trace, *args: Any) -> bool:
        checks[0] += 1
        return holds(self, *args)

    monkeypatch.setattr(Costs, "steps", steps)
    monkeypatch.setattr(Trace, "holds", counted)
    script = train(drawn([16, 24, 32, 40, 48], 100))
    report = both(script, replays=30, plan="{F B O}")
    rare = report.shapes.rare_steps
    assert rare >= 40
    # one for each other step, and for each shape one when it is met and one when it has earned its graph
    assert checks[0] <= report.steps - rare + 2 * report.shapes.met
