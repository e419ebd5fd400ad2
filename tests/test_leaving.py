"""Graphs that make way for plans without them are left once, and captured again where that pays."""

from __future__ import annotations

import random
from typing import Any

import pytest

from pygraph_train.selection.arms import (
    FORWARD_BACKWARD,
    NOTHING,
    OPTIMIZER,
    REGIONS,
    SEPARATE,
    SPLIT,
    WHOLE,
    Arm,
    Plan,
)
from pygraph_train.selection.controller import Controller, Estimate, Rules
from pygraph_train.selection.windows import Window

pytestmark = pytest.mark.quick

FUSED, OFF, ALONE, COMPILED = Arm(WHOLE), Arm(NOTHING), Arm(OPTIMIZER), Arm(WHOLE, compiled=True)
ARMS = [FUSED, Arm(SPLIT), Arm(FORWARD_BACKWARD), ALONE, OFF]
CAPTURE = 0.2


class Machine:
    """Makes steps that take what a table says. Memory holds a graph, or a step without one.

    Args:
        table: seconds of each arm.
        noise: relative standard deviation.
        left: steps that training makes, where that is known.
        lag: so many steps later the time of a step is known.
        disturbed: the first step that takes `factor` times as long, and how many do.
    """

    def __init__(
        self,
        table: dict[Arm, float],
        *,
        noise: float = 0.01,
        seed: int = 0,
        left: int | None = None,
        lag: int = 0,
        disturbed: tuple[int, int] = (0, 0),
        factor: float = 20.0,
        arms: list[Arm] | None = None,
        rules: Rules | None = None,
    ) -> None:
        self.table, self.noise, self.left, self.lag = table, noise, left, lag
        self.disturbed, self.factor = disturbed, factor
        self.random = random.Random(seed)
        self.ran: list[Arm] = []
        self.captures = [0]
        """The steps before which graphs were made."""
        self.seconds = CAPTURE
        self._has_graph = True
        self._late: list[tuple[int, Window, float]] = []
        self.controller = Controller(
            arms or ARMS,
            rules=rules,
            estimate=self._estimate,
            comes_back=self._comes_back,
            steps_left=lambda: None if self.left is None else self.left - len(self.ran),
        )

    def _estimate(self, arm: Arm, best: Arm, seconds: float) -> Estimate:
        times = self.controller.times
        if not arm.plan.forward_backward or self._has_graph:
            return Estimate(least=times[FUSED] if arm in ARMS[1:3] else 0.0)
        if arm in times or arm.compiled:
            return Estimate(likely=times.get(arm, seconds / 2), one_time=CAPTURE)
        return Estimate(least=times[FUSED], one_time=CAPTURE)

    def _comes_back(self, best: Arm, arm: Arm) -> float | None:
        if best.plan.forward_backward == arm.plan.forward_backward:
            return None
        return CAPTURE if best.plan.forward_backward else 0.0

    def _step(self, arm: Arm) -> float:
        seconds = self.table.get(arm, self.table[OFF]) * max(0.2, self.random.gauss(1, self.noise))
        first, count = self.disturbed
        seconds *= self.factor if first <= len(self.ran) < first + count else 1
        if self._needs_graph(arm) and not self._has_graph:
            self.captures.append(len(self.ran))
            self.seconds += CAPTURE
        self._has_graph = self._needs_graph(arm)
        self.seconds += seconds
        self.ran.append(arm)
        return seconds

    def _needs_graph(self, arm: Arm) -> bool:
        return arm.plan.forward_backward

    def run(self, steps: int) -> Controller:
        while len(self.ran) < steps:
            turn = self.controller.next_window()
            for index in range(turn.steps):
                seconds = self._step(turn.arm)
                if turn.skipped <= index < turn.skipped + turn.measured:
                    self._late.append((len(self.ran) + self.lag, turn, seconds))
                while self._late and self._late[0][0] <= len(self.ran):
                    _, of, sample = self._late.pop(0)
                    of.samples.append(sample)
        return self.controller


@pytest.mark.parametrize("lag", [0, 30])
@pytest.mark.parametrize("noise", [0.005, 0.05])
@pytest.mark.parametrize("share", [1.0, 1.05, 1.5])
def test_graphs_that_are_no_faster_are_left_once(share: float, noise: float, lag: int) -> None:
    for seed in range(10):
        machine = Machine({FUSED: 7e-3 * share, OFF: 7e-3}, noise=noise, seed=seed, lag=lag)
        controller = machine.run(300)
        assert machine.captures == [0] and not controller.best.plan.forward_backward
        assert machine.ran.index(OFF) <= 9 * 6 + 2 * lag


@pytest.mark.parametrize("noise", [0.005, 0.05])
def test_graphs_that_are_no_faster_cost_no_percent_of_a_long_run(noise: float) -> None:
    for seed in range(5):
        machine = Machine({FUSED: 7e-3, OFF: 7e-3}, noise=noise, seed=seed)
        machine.run(60_000)
        again = [step for step in machine.captures if step]
        assert len(again) <= 6, again
        for number, step in enumerate(again, 1):
            assert number * CAPTURE <= max(0.01 * step * 7e-3 * 1.1, CAPTURE), again


@pytest.mark.parametrize("noise", [0.005, 0.05])
def test_the_fastest_graph_comes_back_once(noise: float) -> None:
    for seed in range(10):
        machine = Machine({FUSED: 5e-3, OFF: 7e-3}, noise=noise, seed=seed)
        controller = machine.run(3000)
        assert len(machine.captures) == 2 and controller.best == FUSED and controller.settled
        assert set(machine.ran[machine.captures[-1] :]) == {FUSED}
        # it saves 2 ms in each step, and the capture takes 200 ms
        assert 100 <= machine.captures[-1] <= 200, machine.captures


def test_where_many_steps_are_left_it_comes_back_at_once() -> None:
    machine = Machine({FUSED: 6.65e-3, OFF: 7e-3}, left=10_000)
    controller = machine.run(200)
    assert len(machine.captures) == 2 and controller.best == FUSED
    assert machine.captures[-1] < 80  # after plans without graphs, and with one of the update
    machine = Machine({FUSED: 6.65e-3, OFF: 7e-3}, left=300)
    controller = machine.run(290)
    assert machine.captures == [0] and controller.best == OFF
    assert "does not pay" in controller.verdicts[OFF]
    assert controller.settled, "a longer run would choose something else"


@pytest.mark.parametrize("lag", [0, 30])
@pytest.mark.parametrize(
    ("count", "factor"), [(1, 1e5), (4, 20.0), (9, 20.0)], ids=["suspended", "busy", "long"]
)
def test_one_disturbance_decides_nothing(count: int, factor: float, lag: int) -> None:
    for first in range(120):
        options = {"left": 10_000, "lag": lag, "disturbed": (first, count), "factor": factor}
        machine = Machine({FUSED: 2e-3, OFF: 18e-3}, **options)
        controller = machine.run(400)
        assert controller.best == FUSED and controller.settled, (first, controller.history)
        assert len(machine.captures) <= 2, (first, machine.captures)
        machine = Machine({FUSED: 18e-3, OFF: 2e-3}, **options)
        controller = machine.run(400)
        assert controller.settled and controller.best in (OFF, ALONE), (first, controller.history)
        assert len(machine.captures) == 1, (first, machine.captures)


def test_a_graph_whose_comparison_was_disturbed_for_long_comes_back_early() -> None:
    """All windows of the graph but one show a draw, and that one shows what could be gained."""
    machine = Machine({FUSED: 4e-3, OFF: 7e-3}, disturbed=(9, 100), factor=7 / 4)
    step = machine._step
    machine._step = lambda arm: step(arm) / (1 if arm == FUSED or len(machine.ran) > 110 else 7 / 4)
    controller = machine.run(200)
    assert controller.best == OFF and machine.captures == [0], controller.history
    machine.run(450)
    assert controller.best == FUSED and len(machine.captures) == 2, controller.history


def test_a_graph_comes_back_where_steps_without_it_become_slow() -> None:
    machine = Machine({FUSED: 7e-3, OFF: 6e-3})
    controller = machine.run(1000)
    assert controller.best == OFF and machine.captures == [0]
    machine.table[OFF] = 20e-3
    machine.run(6000)
    assert controller.best == FUSED and len(machine.captures) == 2


def test_other_kernels_are_compared_with_what_was_chosen() -> None:
    machine = Machine({FUSED: 7e-3, COMPILED: 4e-3, OFF: 7e-3}, left=100_000, arms=[FUSED, OFF, COMPILED])
    controller = machine.run(400)
    assert controller.best == COMPILED and controller.settled


def test_what_is_too_noisy_to_tell_ends() -> None:
    for seed in range(10):
        machine = Machine({FUSED: 7e-3, OFF: 7e-3}, noise=0.4, seed=seed)
        settled = [machine.run(steps).settled for steps in range(100, 500, 10)]
        assert any(settled) and len(machine.captures) <= 3, machine.controller.history


class Loop(Machine):
    """A loop of regions: their graphs make way for steps without any, and nothing is known of an arm before."""

    def __init__(self, table: dict[Arm, float], **options: Any) -> None:
        arms, rules = [Arm(plan) for plan in (SEPARATE, REGIONS, OPTIMIZER, NOTHING)], Rules(exploration=128)
        super().__init__(table, arms=arms, rules=rules, **options)

    def _estimate(self, arm: Arm, best: Arm, seconds: float) -> Estimate:
        return Estimate(one_time=CAPTURE if arm.plan.regions and not self._has_graph else 0.0)

    def _comes_back(self, best: Arm, arm: Arm) -> float | None:
        if best.plan.regions == arm.plan.regions:
            return None
        return CAPTURE if best.plan.regions else 0.0

    def _needs_graph(self, arm: Arm) -> bool:
        return arm.plan.regions


@pytest.mark.parametrize("lag", [0, 30])
@pytest.mark.parametrize("noise", [0.005, 0.05])
@pytest.mark.parametrize("best", [SEPARATE, REGIONS, OPTIMIZER, NOTHING], ids=str)
def test_regions_are_left_once_and_captured_again_once(best: Plan, noise: float, lag: int) -> None:
    for seed in range(10):
        table = {Arm(plan): 7e-3 for plan in (SEPARATE, REGIONS, OPTIMIZER, NOTHING)}
        machine = Loop({**table, Arm(best): 4e-3}, noise=noise, seed=seed, lag=lag)
        controller = machine.run(400)
        assert controller.best == Arm(best) and controller.settled, controller.history
        assert Arm(NOTHING) in controller.times and len(machine.captures) == (2 if best.regions else 1)


def test_regions_that_are_left_come_back_when_the_steps_that_were_made_have_paid_for_it() -> None:
    machine = Loop({Arm(SEPARATE): 6e-3, Arm(REGIONS): 7e-3, Arm(OPTIMIZER): 7e-3, Arm(NOTHING): 7e-3})
    controller = machine.run(3000)
    assert controller.best == Arm(SEPARATE) and len(machine.captures) == 2, controller.history
    assert 200 <= machine.captures[-1] <= 400  # it saves 1 ms in each step, and the capture takes 200 ms


@pytest.mark.parametrize("noise", [0.005, 0.05])
def test_regions_that_are_no_faster_cost_no_percent_of_a_long_run(noise: float) -> None:
    for seed in range(3):
        machine = Loop({Arm(NOTHING): 7e-3}, noise=noise, seed=seed)
        machine.run(60_000)
        again = [step for step in machine.captures if step]
        assert not machine.controller.best.plan.regions and len(again) <= 6, again
        for number, step in enumerate(again, 1):
            assert number * CAPTURE <= max(0.01 * step * 7e-3 * 1.1, CAPTURE), again


class Beside(Loop):
    """Memory holds graphs and steps without them; graphs are closed when a plan without them was chosen."""

    def _comes_back(self, best: Arm, arm: Arm) -> float | None:
        return None

    def _needs_graph(self, arm: Arm) -> bool:
        return arm.plan.regions or (self._has_graph and not self.controller.settled)


@pytest.mark.parametrize("kind", [Loop, Beside])
def test_regions_that_lost_while_all_steps_were_slower_are_tried_again_when_that_ends(
    kind: type[Loop],
) -> None:
    """Work of other processes made steps of regions longer than others."""
    plans = (SEPARATE, REGIONS, OPTIMIZER, NOTHING)
    for seed in range(3):
        loud = dict(zip(map(Arm, plans), (14.6e-3, 15e-3, 11.6e-3, 12e-3), strict=True))
        quiet = dict(zip(map(Arm, plans), (6.3e-3, 6.6e-3, 7.2e-3, 7.5e-3), strict=True))
        machine = kind(loud, noise=0.05, seed=seed)
        controller = machine.run(2000)
        assert controller.settled and not controller.best.plan.regions
        machine.table.update(quiet)
        machine.run(6000)
        assert controller.best == Arm(SEPARATE), controller.history
        assert len(machine.captures) <= 3, machine.captures


@pytest.mark.parametrize("kind", [Loop, Beside])
def test_regions_that_lose_whenever_steps_become_faster_cost_little(kind: type[Loop]) -> None:
    """Other processes come and go."""
    machine = kind({Arm(NOTHING): 7e-3, Arm(OPTIMIZER): 6.5e-3}, noise=0.05)
    table = dict(machine.table)
    for round in range(1, 31):
        machine.table.update({arm: seconds * (1 + round % 2) for arm, seconds in table.items()})
        machine.run(2000 * round)
    again = [step for step in machine.captures if step]
    assert not machine.controller.best.plan.regions and machine.controller.settled
    assert len(again) * CAPTURE <= 0.01 * machine.seconds, again
