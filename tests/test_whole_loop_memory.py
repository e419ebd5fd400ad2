"""Where memory does not hold graphs of regions and steps without them, the graphs make way, rarely and in time."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

pytest.importorskip("accelerate")
pytest.importorskip("lightning.fabric")

import fabric_training
import test_whole_loop
import torch
from accelerate_training import fresh  # noqa: F401
from test_whole_loop import Loops, Machine
from torch import Tensor, nn
from training import Net

from pygraph_train import PyGraphFabric
from pygraph_train.integrations.loop_report import LoopReport
from pygraph_train.regions import inductor
from pygraph_train.regions.region import Region
from pygraph_train.selection import timing
from pygraph_train.selection.arms import NOTHING, OPTIMIZER, REGIONS, SEPARATE, Plan
from pygraph_train.selection.controller import Estimate
from pygraph_train.step import whole_loop
from pygraph_train.step.region_memory import RegionMemory
from pygraph_train.step.whole_loop import WholeLoop

machine = test_whole_loop.machine  # a fixture


def open_graphs(whole: WholeLoop) -> int:
    mine = {id(record) for record in whole.records}
    owners = [o for arena in inductor._arenas.values() for o in arena.owners()]
    return sum(isinstance(o, Region) and id(o.record) in mine for o in owners)


class Watched:
    """What happens in a loop whose memory is short.

    Attributes:
        closed: of each call that closes graphs, how many were open, and how many gradients were there.
        plain: how many graphs were open when a module was called as it is, in a step without regions.
    """

    def __init__(self) -> None:
        self.closed: list[tuple[int, int]] = []
        self.plain: list[int] = []
        self.model: nn.Module | None = None
        self.whole: WholeLoop | None = None


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> Watched:
    made, close, init = Watched(), RegionMemory._close_graphs, WholeLoop.__init__

    def closing(records: Any, why: str | None) -> None:
        assert made.model is not None and made.whole is not None
        gradients = sum(p.grad is not None for p in made.model.parameters())
        made.closed.append((open_graphs(made.whole), gradients))
        close(records, why)

    def making(whole: WholeLoop, *args: Any) -> None:
        init(whole, *args)
        made.whole = whole

    monkeypatch.setattr(WholeLoop, "__init__", making)
    monkeypatch.setattr(RegionMemory, "is_short", lambda self: True)
    monkeypatch.setattr(timing, "declared_capture_seconds", lambda compared: 0.05)
    monkeypatch.setattr(RegionMemory, "_close_graphs", staticmethod(closing))
    return made


@pytest.fixture
def unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is known of a plan before it is tried, but what captures take."""
    monkeypatch.setattr(whole_loop, "Estimate", lambda one_time=0.0, **known: Estimate(one_time=one_time))


class WatchedNet(Net):
    """Tells how many graphs are open whenever its Python runs while the loop runs without regions."""

    watched: Watched

    def forward(self, x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling():
            note(self)
        return super().forward(x)


@torch.compiler.disable
def note(model: WatchedNet) -> None:
    whole = model.watched.whole
    if whole is not None and whole.without_regions:
        model.watched.plain.append(open_graphs(whole))


def loops(short: Watched, steps: int = 400, **options: Any) -> Loops:
    def net() -> nn.Module:
        made = WatchedNet()
        object.__setattr__(made, "watched", short)
        short.model = made
        return made

    return Loops(steps=steps, net=net, **options)


@pytest.mark.parametrize("kind", ["accelerate", "fabric"])
@pytest.mark.parametrize("best", [SEPARATE, NOTHING], ids=str)
def test_graphs_are_closed_when_gradients_are_gone_and_before_a_plain_forward(
    kind: str, best: Plan, short: Watched, machine: Machine, unknown: None
) -> None:
    machine.best = best
    report = getattr(loops(short), kind)()
    assert report.plan == report.running_plan == str(best), str(report)
    first = next(one for one in short.closed if one[0])
    assert first == (2, 0), short.closed
    assert short.plain and not any(short.plain), short.plain


@pytest.mark.parametrize("best", [SEPARATE, NOTHING], ids=str)
def test_where_gradients_are_emptied_before_the_backward_memory_is_given_back_then(
    best: Plan, short: Watched, machine: Machine, unknown: None
) -> None:
    machine.best = best
    made = loops(short, steps=300)

    def script(script: Any) -> None:
        model, optimizer = made._made()
        model, optimizer = script.fabric.setup(model, optimizer)
        for x, y in made._batches():
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            script.fabric.backward(loss)
            optimizer.step()
            script.write("loss", loss)
        script.write_state(model, optimizer)

    pygraph = PyGraphFabric(**made.options)
    plain, ours = fabric_training.run(script, None), fabric_training.run(script, pygraph)
    report = made._compared(plain, ours, pygraph.report())
    assert report.plan == report.running_plan == str(best), str(report)
    graphs, gradients = zip(*short.closed[:2], strict=True)
    assert graphs == (2, 0) and gradients[0] > 0 == gradients[1], short.closed
    assert not any(short.plain), short.plain


def test_a_module_that_keeps_its_code_makes_way_when_it_is_called(
    short: Watched, machine: Machine, unknown: None
) -> None:
    machine.best = NOTHING
    report = loops(short, steps=300, compile=True).accelerate()
    assert report.plan == report.running_plan == "F B O", str(report)
    assert next(one for one in short.closed if one[0]) == (2, 0), short.closed


class Twice(nn.Module):
    """A network, called twice in each step, and one that is called in few steps."""

    def __init__(self) -> None:
        super().__init__()
        self.often, self.seldom = WatchedNet(), Net()


@pytest.mark.parametrize("every", [7, 40, 10**6])
@pytest.mark.parametrize("best", [SEPARATE, NOTHING], ids=str)
def test_modules_that_are_called_seldom_stand_aside_with_their_next_call(
    every: int, best: Plan, short: Watched, machine: Machine, unknown: None
) -> None:
    machine.best = best
    made, leaving = loops(short, steps=400), list[bool]()

    def script(script: Any) -> None:
        both = Twice()
        object.__setattr__(both.often, "watched", short)
        short.model = both
        optimizer = torch.optim.AdamW(both.parameters(), lr=1e-2, fused=True)
        often, optimizer = script.fabric.setup(both.often, optimizer)
        seldom = script.fabric.setup(both.seldom)
        for index, (x, y) in enumerate(made._batches()):
            loss = nn.functional.cross_entropy(often(x), y) + nn.functional.cross_entropy(often(-x), y)
            if index % every == 3:
                loss = loss + nn.functional.cross_entropy(seldom(x), y)
            script.fabric.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            script.write("loss", loss)
            if script.pygraph is not None and index == 390:
                leaving.extend(call.leaving for call in script.pygraph._loop._calls)
        script.write_state(both, optimizer)

    pygraph = PyGraphFabric(**made.options)
    plain, ours = fabric_training.run(script, None), fabric_training.run(script, pygraph)
    report = made._compared(plain, ours, pygraph.report())
    assert report.plan == report.running_plan == str(best), str(report)
    assert next(one for one in short.closed if one[0])[1] == 0 and not any(short.plain), short.closed
    assert leaving == [False, best == NOTHING and every > 400]


def captures(report: LoopReport) -> set[int]:
    return {region.captures for region in report.regions() if region.replays}


def switches(machine: Machine) -> int:
    """How often timed steps went from plans with regions to others, and back."""
    return sum(one.regions != other.regions for one, other in itertools.pairwise(machine.timed))


@pytest.mark.parametrize("kind", ["accelerate", "fabric"])
@pytest.mark.parametrize("best", [SEPARATE, REGIONS, OPTIMIZER, NOTHING], ids=str)
def test_a_comparison_leaves_regions_once_and_captures_them_again_once(
    kind: str, best: Plan, short: Watched, machine: Machine, unknown: None
) -> None:
    machine.best = best
    report = getattr(loops(short, steps=500), kind)()
    assert report.plan == report.running_plan == str(best), str(report)
    assert {arm.plan for arm in report.controllers[-1].times} == {SEPARATE, REGIONS, OPTIMIZER, NOTHING}
    assert captures(report) == ({2} if best.regions else {1}), str(report)
    assert switches(machine) == (2 if best.regions else 1)


def test_regions_are_tried_again_once_where_steps_without_them_become_slow(
    short: Watched, machine: Machine, unknown: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another comparison begins without regions, and captures them once."""
    monkeypatch.setattr(whole_loop, "_LOOK_EVERY", 16)
    machine.best, machine.worst = NOTHING, 1.5e-3

    def each(step: int, model: nn.Module, plugin: Any) -> None:
        if plugin is not None and step == 250:
            assert captures(plugin.report()) == {1}
            machine.best, machine.worst = SEPARATE, 2.5e-3  # and 2e-3 without graphs

    report = loops(short, steps=700, each=each).accelerate()
    assert report.plan == report.running_plan == "{F} {B} {O}", str(report)
    assert captures(report) == {2} and switches(machine) == 2, str(report)


@pytest.mark.parametrize("seconds", [0.0, 1e3])
def test_another_look_has_to_be_worth_its_captures(
    seconds: float, short: Watched, machine: Machine, unknown: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps become slower and slower, with regions and without: each time the loop is compared again."""
    monkeypatch.setattr(timing, "declared_capture_seconds", lambda compared: seconds)
    monkeypatch.setattr(whole_loop, "_LOOK_EVERY", 16)
    machine.best = NOTHING
    slower = [1.0]
    declared = timing.declared_seconds
    monkeypatch.setattr(timing, "declared_seconds", lambda arm: declared(arm) * slower[0])

    def each(step: int, model: nn.Module, plugin: Any) -> None:
        if plugin is not None and step % 150 == 0:
            slower[0] *= 1.5

    report = loops(short, steps=700, each=each).accelerate()
    assert report.plan == report.running_plan == "F B O", str(report)
    again = max(captures(report))
    assert again == 1 if seconds else again >= 3, str(report)


def test_the_price_is_what_captures_took_of_the_graphs_that_were_closed(
    short: Watched, machine: Machine, unknown: None
) -> None:
    machine.best = NOTHING
    found: list[tuple[float, float]] = []

    def each(step: int, model: nn.Module, plugin: Any) -> None:
        if plugin is not None and step in (12, 250):
            memory = plugin._loop._whole.memory
            found.append((memory.paid(), memory.price))

    loops(short, steps=300, each=each).accelerate()
    (paid, before), (left, price) = found
    assert paid > 0 == before and left == 0 and price == paid


def test_many_shapes_may_be_captured_again_one_after_the_other(
    short: Watched, machine: Machine, unknown: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    shapes, begun = 40, []
    start_over = WholeLoop.start_over

    def starting_over(whole: WholeLoop) -> None:
        begun.append(whole._step)
        start_over(whole)

    monkeypatch.setattr(WholeLoop, "start_over", starting_over)
    machine.best = SEPARATE
    made = loops(short, steps=10 * shapes)
    data = torch.randn(shapes + 4, 6), torch.randint(0, 3, (shapes + 4,))

    def texts() -> Any:
        for step in range(10 * shapes):
            size = 4 + step % shapes
            yield data[0][:size], data[1][:size]

    monkeypatch.setattr(made, "_batches", texts)
    report = made.fabric()
    assert report.plan == report.running_plan == str(SEPARATE), str(report)
    closed = [graphs for graphs, _ in short.closed if graphs]
    assert closed, "the graphs of all shapes have made way"
    assert not [step for step in begun if step > 6 * shapes], begun
