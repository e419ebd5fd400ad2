"""How many captures, comparisons and steps outside of graphs it takes to find the fastest plan, on a simulated clock.

Memory is short: graphs of whole steps make way for plans without them.
"""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any, cast

import pytest
from replays import text_of
from training import CONFIG, Diary, Net, adamw, batches, both, loss_of

from pygraph_train import GraphedStep, StepReport
from pygraph_train.graphs.emulated import EmulatedEngine
from pygraph_train.graphs.engine import MemoryUse
from pygraph_train.selection import timing
from pygraph_train.selection.arms import Arm
from pygraph_train.step import regions
from pygraph_train.step.capturing import Capturing
from pygraph_train.step.clock import Clock
from pygraph_train.step.comparing import Comparing
from pygraph_train.step.decisions import Decisions
from pygraph_train.step.lifecycle import StageLengths
from pygraph_train.step.plan import PositionInAccumulation
from pygraph_train.step.variants import Variant
from pygraph_train.verification import Audits

PLAIN = 7e-3
CAPTURE, COMPARISON = 0.2, 0.6


class Simulated:
    """A machine on which steps, captures and comparisons take what is declared.

    Attributes:
        table: seconds of a step by plan; others take as long as without graphs.
        noise: relative standard deviation of a measured step.
        warm_up: seconds of the shortest step of the warm-up.
        compared: first replays that were compared with a step without a graph.
    """

    def __init__(self) -> None:
        self.table = {"{F B O}": PLAIN, "F B O": PLAIN}
        self.noise, self.warm_up, self.compared = 0.005, 1.1 * PLAIN, 0
        self._random = random.Random(0)

    def step(self, arm: Arm) -> float:
        return self.table.get(str(arm.plan), PLAIN) * max(0.2, self._random.gauss(1, self.noise))


@pytest.fixture
def simulated(monkeypatch: pytest.MonkeyPatch) -> Simulated:
    made, compare = Simulated(), Comparing.__call__

    def compared(self: Comparing, step: Any, variant: Any, capture: Any, *rest: Any) -> Any:
        made.compared += not capture.verified
        return compare(self, step, variant, capture, *rest)

    def in_warm_up(self: Variant, seconds: float, *, compiled: bool) -> None:
        self.warmup_seconds = made.warm_up

    monkeypatch.setattr(EmulatedEngine, "shares_memory", True)
    monkeypatch.setattr(EmulatedEngine, "memory", lambda engine: MemoryUse(500, 1000, 1000, 1000))
    monkeypatch.setattr(regions, "why_no_regions", lambda *arguments: "they are not tested here")
    monkeypatch.setattr(Comparing, "__call__", compared)
    monkeypatch.setattr(Variant, "seen_in_warmup", in_warm_up)
    monkeypatch.setattr(Clock, "mark", lambda *arguments: None)  # phases take no time that was not declared
    monkeypatch.setattr(Decisions, "_estimate", Decisions._measured)
    monkeypatch.setattr(timing, "declared_seconds", made.step)
    monkeypatch.setattr(
        timing, "declared_capture_seconds", lambda *, compared: CAPTURE + COMPARISON * compared
    )
    return made


def trained(steps: int, plan: str, replays: int = 20, left: float | None = None) -> StepReport:
    """The report of so many steps, equal to plain ones bit for bit, of which the last ones have this plan."""

    def script(diary: Diary) -> None:
        model = Net()
        optimizer = adamw(model)
        step = diary.step(loss_of(model), model=model, optimizer=optimizer)
        for number, batch in enumerate(batches(steps)):
            diary.write("loss", step(batch))
            if number % 50 == 0:
                diary.write_state(model, optimizer)
        diary.write_state(model, optimizer)

    report = both(script, replays=replays)
    assert report.running_plan == report.plan == plan, text_of(report)
    assert not report.fallbacks
    return report


def outside(report: StepReport) -> int:
    return report.steps - report.steps_from_graphs


@pytest.mark.parametrize("noise", [0.005, 0.05])
@pytest.mark.parametrize("share", [1.0, 1.05])
def test_a_graph_that_is_no_faster_is_captured_and_compared_once(
    simulated: Simulated, share: float, noise: float
) -> None:
    simulated.noise, simulated.table["{F B O}"] = noise, share * PLAIN
    simulated.table["F B {O}"] = 1.2 * PLAIN
    report = trained(300, "F B O")
    assert len(report.captures) - _of_updates(report) == simulated.compared == 1, text_of(report)
    assert [str(s.arm.plan) for s in report.switches] == ["F B O"]
    assert report.steps_replayed < 27 + 9 * 4, "the graph was measured for long enough"


def _of_updates(report: StepReport) -> int:
    return sum(capture.plan == "{O}" for capture in report.captures)


def test_a_graph_that_is_much_faster_is_never_left(simulated: Simulated) -> None:
    simulated.table["{F B O}"] = PLAIN / 5
    report = trained(300, "{F B O}", replays=290)
    assert len(report.captures) == simulated.compared == 1, text_of(report)
    assert outside(report) < 10 and not report.exploration_steps


@pytest.mark.parametrize("noise", [0.005, 0.05])
def test_a_graph_that_made_way_and_is_the_fastest_comes_back_once(simulated: Simulated, noise: float) -> None:
    simulated.noise, simulated.table["{F B O}"] = noise, PLAIN / 1.25
    report = trained(600, "{F B O}", replays=400)
    assert [c.plan for c in report.captures] == ["{F B O}"] * 2, text_of(report)
    assert simulated.compared == 1, "the same kernels were compared before"
    assert report.switches[-1].step < 250, report.switches


def test_a_graph_comes_back_when_the_steps_that_were_made_pay_for_it(simulated: Simulated) -> None:
    """It saves 0.35 ms in each step, and its capture takes 200 ms."""
    simulated.table["{F B O}"] = 0.95 * PLAIN
    simulated.table["F B {O}"] = 1.2 * PLAIN
    report = trained(900, "{F B O}", replays=200)
    assert [c.plan for c in report.captures].count("{F B O}") == 2, text_of(report)
    assert simulated.compared == 1
    away, back = report.switches[-2:]
    assert away.step < 100 and "does not pay" in away.why
    assert 570 < back.step < 700, report.switches


def test_captures_that_rest_on_something_else_are_compared() -> None:
    place = (PositionInAccumulation(), True, False)
    variant = Variant(cast(Any, None), StageLengths())
    assert variant.is_compared(place, "sample")
    compared = []
    for _ in range(9):
        compared.append(variant.is_compared(place, "sample"))
        variant.captures[place] = cast(Any, SimpleNamespace(graph=SimpleNamespace(close=list), verified=True))
        variant.make_way()
    assert compared == [number in (1, 4, 8) for number in range(1, 10)]
    assert variant.is_compared(place, "first") and variant.is_compared(place, "always")
    variant.forget_captures()
    assert variant.is_compared(place, "sample")


def test_a_graph_that_differs_after_it_came_back_is_found_by_the_next_audit(
    simulated: Simulated, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first replay is not compared again."""
    simulated.table["{F B O}"] = PLAIN / 1.25
    monkeypatch.setattr(Audits, "SHARE", 1e9)
    captures, capture = [0], Capturing.capture

    def counted(self: Capturing, *arguments: Any) -> Any:
        made = capture(self, *arguments)
        captures[0] += 1
        if captures[0] == 2:
            replay = made[0].graph.replay
            made[0].graph.replay = lambda: (replay(), made[0].gradients.final[0].add_(1.0))
        return made

    monkeypatch.setattr(Capturing, "capture", counted)
    model = Net()
    step = GraphedStep(loss_of(model), model=model, optimizer=adamw(model), config=CONFIG)
    for batch in batches(400):
        step(batch)
    report = step.report()
    assert captures[0] >= 2 and report.audits
    assert any("differs from the step without a graph" in f.reason for f in report.fallbacks), text_of(report)
    assert not report.controllers[0].best.plan.fused
    step.close()
