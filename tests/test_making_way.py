"""Graphs of forward and backward make way for plans without them, so that no run needs a step's memory twice."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
from replays import text_of
from training import Diary, Net, adamw, batches, both, loss_of

from pygraph_train.graphs.emulated import EmulatedEngine, EmulatedGraph
from pygraph_train.graphs.engine import MemoryUse
from pygraph_train.selection import timing
from pygraph_train.selection.controller import Estimate
from pygraph_train.step import regions
from pygraph_train.step.decisions import Decisions
from pygraph_train.step.ungraphed import UngraphedSteps

PEAK = 1000
SECONDS = {"{F B O}": 1e-3, "F B O": 1.5e-3}


class Device:
    """A device whose memory is in use by so much, and the graphs that are open in each step of a plan without them."""

    def __init__(self) -> None:
        self.reserved, self.idle = PEAK // 2, PEAK
        self.open: weakref.WeakSet[EmulatedGraph] = weakref.WeakSet()
        self.beside: list[tuple[str, int]] = []


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made, capture, plain = Device(), EmulatedEngine.capture, UngraphedSteps.as_its_arm_says

    def captured(engine: EmulatedEngine, *args: Any, **kwargs: Any) -> Any:
        graph, result = capture(engine, *args, **kwargs)
        made.open.add(graph)
        return graph, result

    def ungraphed(steps: UngraphedSteps, step: Any, run: Any) -> Any:
        made.beside.append((str(step.arm.plan), sum(not graph.closed for graph in made.open)))
        return plain(steps, step, run)

    monkeypatch.setattr(EmulatedEngine, "capture", captured)
    monkeypatch.setattr(EmulatedEngine, "shares_memory", True)
    monkeypatch.setattr(
        EmulatedEngine, "memory", lambda engine: MemoryUse(made.reserved, PEAK, made.idle, PEAK)
    )
    monkeypatch.setattr(UngraphedSteps, "as_its_arm_says", ungraphed)
    # the emulation has no pool that keeps what regions borrow from each other where memory is shared
    monkeypatch.setattr(regions, "why_no_regions", lambda *arguments: "they are not tested here")
    monkeypatch.setattr(Decisions, "_estimate", lambda *arguments: Estimate())
    monkeypatch.setattr(timing, "declared_seconds", lambda arm: SECONDS.get(str(arm.plan), 2e-3))
    return made


def script(diary: Diary) -> None:
    model = Net()
    optimizer = adamw(model)
    step = diary.step(loss_of(model), model=model, optimizer=optimizer)
    for batch in batches(240):
        diary.write("loss", step(batch))
        diary.write_state(model, optimizer)


def test_no_graph_is_open_while_a_plan_without_one_is_tried(device: Device) -> None:
    report = both(script, replays=60, plan="{F B O}")
    tried = [beside for plan, beside in device.beside if plan == "F B O"]
    assert len(tried) >= 4 and not any(tried), device.beside
    assert [c.plan for c in report.captures].count("{F B O}") >= 2, text_of(report)
    assert not report.fallbacks, text_of(report)


def test_where_memory_does_not_grow_graphs_stay(device: Device) -> None:
    device.idle = PEAK // 2
    report = both(script, replays=80, plan="{F B O}")
    tried = [beside for plan, beside in device.beside if plan == "F B O"]
    assert len(tried) >= 4 and all(tried), device.beside
    assert [c.plan for c in report.captures].count("{F B O}") == 1, text_of(report)
