"""Runs on 49 lengths drawn at random, with the times of a GPU: when which length gets which graph, and what is kept."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from simulated_times import SimulatedTimes
from test_changing_shapes import Text, drawn, text, text_loss, train
from training import Diary, adamw, both

from pygraph_train.graphs.emulated import EmulatedEngine
from pygraph_train.graphs.engine import MemoryUse
from pygraph_train.step import families
from pygraph_train.step.capturing import Capturing
from pygraph_train.step.families import Family
from pygraph_train.step.program import plain_call
from pygraph_train.step.variants import Variant

LENGTHS = range(16, 65)
BOUND = 31
"""Inductor's code is for the 16 lengths up to this one, or for the 33 others."""


def paid(step: float, replay: float) -> float:
    """Steps in which lengths have come often enough to pay for a graph: a capture, and its share of 6 comparisons."""
    return (len(LENGTHS) * 0.15 + 6 * 0.15) / (step - replay)


@pytest.mark.slow
def test_49_lengths_have_graphs_of_compiled_kernels_when_these_are_paid_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = SimulatedTimes(monkeypatch)
    report = both(train(drawn(LENGTHS, 3000)), replays=1850, plan="{F B O}", compile=True)
    captures = times.steps_with("capture", compiled=True)
    assert len(captures) == 49 and report.shapes.with_graphs == 49
    assert sorted(captures)[24] <= 1.15 * paid(0.0098, 0.0025), "half of them"
    assert sorted(captures)[-1] <= 1800, "all of them"
    assert len(times.steps_with("Inductor", compiled=True)) == 1
    without = times.count(1, 3000)["step", False] + times.count(1, 3000)["step", True]
    assert without <= paid(0.0098, 0.0025) + 100
    assert times.count(2251, 3000)["replay", True] == 750
    assert not report.fallbacks, str(report)


@pytest.mark.slow
def test_lengths_that_code_is_not_for_have_graphs_of_eager_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """They lose more without a graph than the others, and get theirs first. No length is left out.

    Inductor compiles in a step of a length in the middle, so that its code is for most of them.
    """
    times = SimulatedTimes(monkeypatch, code_up_to=BOUND)
    report = both(train(drawn(LENGTHS, 3000)), replays=2050, plan="{F B O}", compile=True)
    assert not report.fallbacks, str(report)
    assert report.shapes.with_graphs == 49
    assert len(times.steps_with("Inductor", compiled=True)) == 1, "other code would save less than it takes"
    assert len(times.steps_with("capture", compiled=True)) == 33
    (compiled,) = times.steps_with("Inductor", compiled=True)
    others = [step for step in times.steps_with("capture", compiled=False) if step > compiled]
    assert len(others) == 16 and sorted(others)[8] <= 1.45 * paid(0.027, 0.005)
    assert times.seconds(2251, 3000) <= 750 * (2 / 3 * 0.0025 + 1 / 3 * 0.005) * 1.1
    assert times.count(1, 3000)["step", False] <= paid(0.027, 0.005) + 100


@pytest.mark.slow
def test_graphs_of_eager_kernels_come_first_where_there_is_no_inductor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = SimulatedTimes(monkeypatch)
    both(train(drawn(LENGTHS, 1500)), replays=1050, plan="{F B O}", compile=False, fuse="on")
    captures = times.steps_with("capture", compiled=False)
    assert len(captures) == 49 and sorted(captures)[24] <= 500
    assert times.count(1, 1500)["step", False] <= paid(0.027, 0.005) + 100


def test_a_run_that_says_how_long_it_is_waits_for_no_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 3000 steps, the first 600: each length is expected to come often enough once it has come twice."""
    times = SimulatedTimes(monkeypatch, steps_in_all=3000)
    both(train(drawn(LENGTHS, 600)), replays=300, plan="{F B O}", compile=True)
    captures = times.steps_with("capture", compiled=True)
    assert len(captures) == 49
    assert sorted(captures)[24] <= 230 and sorted(captures)[40] <= 400
    assert len(times.steps_with("capture", compiled=False)) <= 2, "Inductor is to replace them"


def test_few_lengths_have_no_graphs_that_inductor_will_replace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor compiles at once where each step has another length, and then each length has its graph."""
    times = SimulatedTimes(monkeypatch)
    report = both(train(drawn([16, 24, 32, 40, 48], 400)), replays=350, plan="{F B O}", compile=True)
    (compiled,) = times.steps_with("Inductor", compiled=True)
    assert compiled <= 10
    assert not times.steps_with("capture", compiled=False)
    assert len(times.steps_with("capture", compiled=True)) == 5 == report.shapes.with_graphs
    assert times.count(301, 400)["replay", True] == 100


def test_lengths_that_few_steps_have_wait_for_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    """One step in six has another length than the first one: Inductor compiles for these after 100 steps of them."""
    times = SimulatedTimes(monkeypatch)
    lengths = [length for other in drawn([24, 32, 40, 48], 110) for length in (*[16] * 5, other)]
    both(train(lengths), replays=500, plan="{F B O}", compile=True)
    first, for_all = times.steps_with("Inductor", compiled=True)
    assert first <= 10 and 600 <= for_all <= 630


def test_lengths_that_never_return_are_compiled_for_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager kernels need more time and memory. They are timed in the first steps, and no later one has them."""
    times = SimulatedTimes(monkeypatch)
    eager: list[int] = []
    timed = Capturing.timed

    def counted(self: Any, step: Any, variant: Variant, run: Any, call: Any = None) -> Any:
        if call is plain_call:
            eager.append(variant.arm.compiled)
        return timed(self, step, variant, run, call)

    monkeypatch.setattr(Capturing, "timed", counted)
    lengths = random.Random(0).sample(range(16, 216), 200)
    both(train(lengths), never="no length comes back", compile=True)
    (compiled,) = times.steps_with("Inductor", compiled=True)
    assert compiled <= 10
    assert not eager
    assert times.count(compiled + 1, 200)["step", False] == 0


def test_compiled_steps_that_are_slow_at_first_lose_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host is busy while the first three are timed. One more is timed soon."""
    times = SimulatedTimes(monkeypatch)
    ran, slow = Family.ran_without_graph, [0.05] * 3

    def slow_at_first(self: Family, seconds: float, *, compiled: bool) -> None:
        ran(self, seconds, compiled=compiled)
        if compiled and self.timed_compiled and slow:
            self.costs.plain[True] = slow.pop()

    monkeypatch.setattr(Family, "ran_without_graph", slow_at_first)
    lengths = random.Random(0).sample(range(16, 216), 200)
    both(train(lengths), never="no length comes back", compile=True)
    (compiled,) = times.steps_with("Inductor", compiled=True)
    assert not slow
    assert 1 <= times.count(compiled + 1, 200)["step", False] <= 5


def test_cached_blocks_are_given_back_before_they_leave_holes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before steps without a graph of larger shapes than before, and few others; and only where memory would grow."""

    def trims(reserved: int) -> list[int]:
        found: list[int] = []
        with pytest.MonkeyPatch.context() as patch:
            times = SimulatedTimes(patch)
            patch.setattr(EmulatedEngine, "memory", lambda self: MemoryUse(reserved, 1000, 0, 1000))
            patch.setattr(EmulatedEngine, "trim", lambda self: found.append(times._run.step))
            both(train(drawn(LENGTHS, 600)), replays=40, plan="{F B O}", compile=False, fuse="on")
        return [step for step in found if step not in times.steps_with("capture", compiled=False)]

    assert trims(500) == []
    assert 3 <= len(trims(950)) <= 150, "about three for each capture"


def test_a_run_that_ends_soon_makes_no_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    """A length that comes 6 times in 300 steps does not pay for a capture."""
    times = SimulatedTimes(monkeypatch, steps_in_all=300)
    both(train(drawn(LENGTHS, 300)), replays=1, compile=False, fuse="on")
    assert len(times.steps_with("capture", compiled=False)) <= 5, "those by which the prices become known"


def looking(lengths: list[int], look: Callable[[Diary, int], None]) -> Callable[[Diary], None]:
    """A script that trains on texts of these lengths, and looks at the step after each one."""

    def script(diary: Diary) -> None:
        model = Text()
        step = diary.step(text_loss(model), model=model, optimizer=adamw(model))
        for number, length in enumerate(lengths):
            diary.write("loss", step(text(length, seed=number)))
            look(diary, number + 1)

    return script


def test_what_graphs_of_eager_kernels_have_used_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their gradients and their memory, once Inductor has compiled; and many lengths need no more of it than few."""
    kept: list[tuple[int, int, int]] = []
    pools: list[int] = []
    fresh_pool = EmulatedEngine.fresh_pool

    def counted(self: EmulatedEngine) -> Callable[[], None]:
        pools.append(times._run.step)
        return fresh_pool(self)

    def look(diary: Diary, number: int) -> None:
        if not diary.graphed:
            return
        runner = diary.steps[0]._runner
        written = runner._training.addresses._written
        blocks = runner._training.engine._memory._blocks.values()
        graphs = [place for v in runner._signatures.variants() for place in v.captures]
        if number == compiled_in() + 1:
            assert not graphs and not written[False]
        if number > compiled_in() + 1:
            assert all(compiled for _, _, compiled in graphs) and not written[False]
        kept.append((number, len(graphs), sum(block.nbytes for block in blocks)))

    def compiled_in() -> int:
        return next(iter(times.steps_with("Inductor", compiled=True)), 1 << 30)

    monkeypatch.setattr(EmulatedEngine, "shares_memory", True)
    monkeypatch.setattr(EmulatedEngine, "fresh_pool", counted)
    # Inductor waits, as where most steps have the first length
    monkeypatch.setattr(families, "_CHANGING", 1000)
    times = SimulatedTimes(monkeypatch, steps_in_all=3000)
    both(looking(drawn(LENGTHS, 450), look), replays=180, plan="{F B O}", compile=True)
    assert pools == [compiled_in()]
    few = next(size for number, graphs, size in kept if number > compiled_in() and graphs == 5)
    _, graphs, many = kept[-1]
    assert graphs >= 40
    assert many <= few + graphs * 64, "each graph has two numbers of its own: the loss and a mean"
