"""Regions of eager kernels need no more memory than the step has without them, and are given up where they do."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from replays import text_of
from test_eager_regions import Experts, Tagger
from torch import Tensor, nn
from training import Diary, adamw, both

from pygraph_train.graphs.emulated import EmulatedEngine, EmulatedGraph
from pygraph_train.graphs.engine import MemoryUse
from pygraph_train.regions import inductor
from pygraph_train.regions.region import NO_ROOM
from pygraph_train.selection import timing
from pygraph_train.selection.controller import Estimate
from pygraph_train.step.decisions import Decisions
from pygraph_train.step.region_memory import LIMIT, SMALL, RegionMemory
from pygraph_train.step.region_proof import ProvedPart
from pygraph_train.step.ungraphed import UngraphedSteps

PEAK = 2600 << 20


class Device:
    """A device on which each open graph needs some memory, beside what a step needs without graphs."""

    def __init__(self, each: int) -> None:
        self.each = each
        self.open: weakref.WeakSet[EmulatedGraph] = weakref.WeakSet()
        self.beside: list[int] = []  # how many regions had graphs in steps of plans without regions
        self.compared: list[int] = []  # how many graphs were open when a part ran for a comparison
        self.bounds: list[int | None] = []
        self.bounded = False

    @property
    def graphs(self) -> int:
        return sum(not graph.closed for graph in self.open)

    def use(self) -> MemoryUse:
        idle = self.graphs * self.each
        reserved = PEAK // 2 + idle
        return MemoryUse(reserved, max(PEAK, reserved), idle, PEAK)


def _open_regions() -> list[str]:
    return [r.spec.phase for arena in inductor._arenas.values() for r in arena.owners() if hasattr(r, "spec")]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Iterator[Device]:
    """Graphs overwrite what they may there."""
    torch.compiler.reset()
    made, capture, run_arm = Device(0), EmulatedEngine.capture, UngraphedSteps.as_its_arm_says
    difference = ProvedPart._difference

    def captured(engine: EmulatedEngine, *args: Any, **kwargs: Any) -> Any:
        graph, result = capture(engine, *args, **kwargs)
        made.open.add(graph)
        return graph, result

    def without(steps: UngraphedSteps, step: Any, run: Any) -> Any:
        result = run_arm(steps, step, run)
        if not step.arm.plan.regions:
            made.beside.append(len(_open_regions()))
        return result

    def compared(part: ProvedPart, args: Any) -> Any:
        made.compared.append(sum(r.captures for r in part._records))
        return difference(part, args)

    @contextmanager
    def bounded(engine: EmulatedEngine, most: int | None) -> Iterator[None]:
        made.bounds.append(most)
        made.bounded = most is not None
        try:
            yield
        finally:
            made.bounded = False

    monkeypatch.setattr(EmulatedEngine, "capture", captured)
    monkeypatch.setattr(EmulatedEngine, "bounded", bounded)
    monkeypatch.setattr(EmulatedEngine, "overwrites", True)
    monkeypatch.setattr(EmulatedEngine, "shares_memory", True)
    monkeypatch.setattr(EmulatedEngine, "memory", lambda engine: made.use())
    monkeypatch.setattr(UngraphedSteps, "as_its_arm_says", without)
    monkeypatch.setattr(ProvedPart, "_difference", compared)
    monkeypatch.setattr(inductor, "_arenas", {})
    yield made
    torch.compiler.reset()


def training(kind: Any, steps: int = 60, *, keeps: bool = False) -> Callable[[Diary], None]:
    def script(diary: Diary) -> None:
        model = kind()
        optimizer = adamw(model)
        step = diary.step(model.loss, model=model, optimizer=optimizer)
        for batch in kind.batches(steps):
            diary.write("loss", step(*batch))
            diary.write_state(model, optimizer)
            held = [p.grad for p in model.parameters()] if keeps else []  # noqa: F841 - until the next ones are there

    return script


@pytest.mark.parametrize("kind", [Tagger, Experts])
def test_regions_that_fit_stay(kind: Any, device: Device) -> None:
    report = both(training(kind), compile=False, replays=20)
    assert report.plan == "{F} {B} {O}" and device.graphs, text_of(report)
    assert set(device.bounds) >= {int(LIMIT * PEAK)}
    assert max(device.bounds, key=lambda most: most or 0) == int(LIMIT * PEAK)


@pytest.mark.parametrize("kind", [Tagger, Experts])
def test_regions_that_need_more_are_given_up(kind: Any, device: Device) -> None:
    device.each = PEAK // 3
    report = both(training(kind), compile=False, replays=1)
    assert report.plan in ("F B {O}", "F B O"), str(report)
    assert f"MiB were reserved with them, and {PEAK >> 20} without" in text_of(report)
    assert not any(phase == "forward" for phase in _open_regions())


def test_a_capture_that_has_no_room_leaves_the_part_without_graphs(
    device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(engine: EmulatedEngine, *args: Any, **kwargs: Any) -> Any:
        if device.bounded:
            raise torch.OutOfMemoryError("as if the bound were reached")
        return capture(engine, *args, **kwargs)

    capture = EmulatedEngine.capture
    monkeypatch.setattr(EmulatedEngine, "capture", full)
    report = both(training(Tagger), compile=False, replays=20)
    assert report.plan == "F B {O}" and NO_ROOM in text_of(report), text_of(report)


def test_no_graph_of_a_part_is_open_while_it_runs_for_the_first_comparisons(device: Device) -> None:
    """An eager run beside the graph of the same part would need its memory twice."""
    report = both(training(Experts), compile=False, replays=20)
    assert report.plan == "{F} {B} {O}", text_of(report)
    assert len(device.compared) >= 6 and not any(device.compared), device.compared


class Halves(nn.Module):
    """The gradients of two results of a part come from graphs, which were captured later than its backward."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))

    def loss(self, x: Tensor) -> Tensor:
        left, right = (self.scale * x[0].abs()).split(4)
        if len(x[0][x[0] > right.detach().sum()]) > 7:
            return left.sum()
        mask = x[0] > 0
        return (left.neg() * mask[:4]).sum() + (right.neg() * mask[4:]).sum()

    @staticmethod
    def batches(steps: int) -> list[tuple[Tensor]]:
        g = torch.Generator().manual_seed(1)
        return [(torch.randn(4, 8, generator=g),) for _ in range(steps)]


@pytest.mark.parametrize("kind", [Halves, Tagger])
def test_a_part_is_compared_a_few_times_only(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made, compare = list[int](), ProvedPart._difference
    monkeypatch.setattr(ProvedPart, "_difference", lambda part, args: made.append(0) or compare(part, args))
    torch.compiler.reset()
    report = both(training(kind, steps=80, keeps=True), compile=False, replays=20)
    backwards = [r for r in report.regions() if r.phase == "backward" and r.replays]
    assert len(backwards) >= 2 and min(r.replays for r in backwards) >= 60, text_of(report)
    assert len(made) <= 4 * len(backwards), (len(made), text_of(report))


@pytest.mark.parametrize("short", [False, True])
def test_graphs_of_regions_make_way_for_steps_without_them(
    short: bool, device: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Decisions, "_estimate", lambda *arguments: Estimate())
    device.each = (20 if short else 0) << 20
    report = both(training(Tagger, steps=200), compile=False, replays=40)
    assert report.plan == "{F} {B} {O}", text_of(report)
    captures = [r.captures for r in report.regions() if r.replays]
    assert len(device.beside) >= 8 and len(captures) >= 4, text_of(report)
    if short:
        assert not any(device.beside) and min(captures) >= 2, text_of(report)
    else:
        assert sum(map(bool, device.beside)) >= 8 and max(captures) == 1, text_of(report)


def test_graphs_are_closed_when_regions_are_slower(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    declared = timing.declared_seconds
    monkeypatch.setattr(timing, "declared_seconds", lambda arm: declared(arm) + 5e-3 * arm.plan.regions)
    monkeypatch.setattr(Decisions, "_estimate", lambda *arguments: Estimate())
    report = both(training(Tagger, steps=150), compile=False, replays=20)
    assert report.plan == "F B {O}" and not _open_regions(), text_of(report)


@pytest.mark.quick
@pytest.mark.passes_without_graphs("nothing is run")
def test_a_process_that_reserves_little_is_left_alone() -> None:
    use = MemoryUse(20 << 20, 20 << 20, 0, 1)
    engine: Any = SimpleNamespace(memory=lambda: use, trim=lambda: None)
    memory = RegionMemory(engine, [])
    memory.begin()
    most = (20 << 20) + SMALL
    assert memory.most == most
    use = MemoryUse(most, most, 0, 1)
    assert memory.why_not() is None
    use = MemoryUse(most + (2 << 20), most + (2 << 20), 0, 1)
    assert "150 MiB were reserved with them, and 20 without" in str(memory.why_not())


@pytest.mark.quick
@pytest.mark.passes_without_graphs("nothing is run")
def test_memory_that_was_short_once_is_taken_to_be_short() -> None:
    use = MemoryUse(PEAK, PEAK, 0, 1)
    engine: Any = SimpleNamespace(memory=lambda: use)
    memory = RegionMemory(engine, [])
    memory.begin()
    assert not memory.is_or_was_short()
    use = MemoryUse(2 * PEAK, 2 * PEAK, 0, 1)
    assert memory.is_or_was_short()
    use = MemoryUse(PEAK, PEAK, 0, 1)
    assert memory.is_or_was_short() and not memory.is_short()
