"""Loops of which some regions have graphs and others have none, because they are slower as a graph."""

from __future__ import annotations

import random
from typing import Any

import pytest

pytest.importorskip("accelerate")
pytest.importorskip("lightning.fabric")

import test_whole_loop
import torch
from accelerate_training import fresh as fresh
from test_whole_loop import Loops, Machine
from torch import Tensor, nn
from training import Net

from pygraph_train.regions.inductor import close_graphs
from pygraph_train.selection import timing
from pygraph_train.selection.arms import Arm
from pygraph_train.step.whole_loop import WholeLoop
from pygraph_train.torch_private.dynamo import compiled_call

machine = test_whole_loop.machine  # fixtures
unknown = test_whole_loop.unknown

WITHOUT, UPDATE = 1e-3, 5e-5
"""Seconds of a step without regions and with a graph of its update, and what that saves."""


class Parts(Net):
    """Two regions, of which the second one gets no graph."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.first(x))
        torch._dynamo.graph_break()
        result: Tensor = self.second(h)
        return result


class Watched:
    """What a loop with the library ran: `replays` of regions at some steps, and the loop itself."""

    def __init__(self) -> None:
        self.replays: dict[int, int] = {}
        self.whole: WholeLoop | None = None
        self.compiled = False

    def each(self, step: int, model: nn.Module, plugin: Any) -> None:
        if plugin is None:
            return
        self.whole = plugin._loop._whole
        assert self.whole is not None
        records = self.whole.records
        if step == 4:
            last = max(int(r.name.split()[-1]) for r in records)
            close_graphs([r for r in records if r.name.endswith(f" {last}")], "slower as a graph")
        self.replays[step] = sum(r.replays for r in records)
        self.compiled = compiled_call(model) is not None


def declare(
    monkeypatch: pytest.MonkeyPatch, watched: Watched, with_regions: float, noise: float, seed: int
) -> None:
    rng = random.Random(seed)

    def seconds(arm: Arm) -> float:
        regions = watched.whole is not None and not watched.whole.without_regions
        update = 0.0 if arm.plan.optimizer_alone else UPDATE
        return ((with_regions if regions else WITHOUT) + update) * rng.uniform(1, 1 + noise)

    monkeypatch.setattr(timing, "declared_seconds", seconds)


@pytest.mark.parametrize("seed", range(6))
def test_parts_that_gain_a_little_stay_in_a_noisy_loop(
    seed: int, machine: Machine, unknown: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched()
    declare(monkeypatch, watched, with_regions=0.95e-3, noise=0.3, seed=seed)
    report = Loops(steps=400, net=Parts, each=watched.each).accelerate()
    assert report.controllers[-1].settled, str(report)
    assert watched.replays[400] - watched.replays[350] == 2 * 50, str(report)
    told = "Parts of forward and backward have graphs, and others have none: slower as a graph."
    assert report.headline().endswith(told), report.headline()


@pytest.mark.parametrize("compile", [True, "auto"])
def test_parts_that_are_slower_than_the_loop_without_graphs_go(
    compile: Any, machine: Machine, unknown: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched()
    declare(monkeypatch, watched, with_regions=1.2e-3, noise=0.0, seed=0)
    report = Loops(steps=400, net=Parts, each=watched.each, compile=compile).accelerate()
    assert watched.replays[400] == watched.replays[350] > 20, str(report)
    assert watched.compiled is (compile is True)


class Lengths(Net):
    """Three regions: one always has the same shapes, one gets a graph for each length, and one gets none."""

    def __init__(self) -> None:
        super().__init__()
        self.same = nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        same = torch.tanh(self.same)
        torch._dynamo.graph_break()
        h = torch.tanh(self.first(x * same))
        torch._dynamo.graph_break()
        result: Tensor = self.second(h)
        return result


def test_parts_whose_shapes_come_seldom_have_their_graphs_before_the_loop_is_compared(
    machine: Machine, unknown: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched()
    declare(monkeypatch, watched, with_regions=0.5e-3, noise=0.0, seed=0)
    begun: list[tuple[int, int]] = []

    def each(step: int, model: nn.Module, plugin: Any) -> None:
        watched.each(step, model, plugin)
        if plugin is not None and plugin.report().controllers:
            begun.append((step, sum(r.captures for r in plugin.report().regions())))

    loops = Loops(steps=400, net=Lengths, each=each, warmup_steps=8)
    made = loops._batches

    def batches() -> Any:
        for step, (x, y) in enumerate(made()):
            size = 7 if step % 6 else 3 + step // 6 % 2
            yield x[:size], y[:size]

    monkeypatch.setattr(loops, "_batches", batches)
    report = loops.accelerate()
    assert begun and begun[0][1] == begun[-1][1] > 6, str(report)
