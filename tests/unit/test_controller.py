"""The controller finds the fastest arm, within its exploration, from noisy times of real steps."""

from __future__ import annotations

import random

import pytest

from pygraph_train.selection.arms import FORWARD_BACKWARD, NOTHING, OPTIMIZER, SPLIT, WHOLE, Arm
from pygraph_train.selection.controller import Controller, Estimate, Rules, Switch, Window
from pygraph_train.selection.samples import summary, surely_faster

pytestmark = pytest.mark.quick

ARMS = [
    Arm(WHOLE),
    Arm(SPLIT),
    Arm(FORWARD_BACKWARD),
    Arm(OPTIMIZER),
    Arm(NOTHING),
    Arm(WHOLE, compiled=True),
]
FUSED, OFF, COMPILED = ARMS[0], ARMS[4], ARMS[5]


class Machine:
    """Makes steps that take what a table says, with noise, outliers and a dear first step after a switch.

    Args:
        table: seconds of each arm.
        noise: relative standard deviation.
        outliers: share of the steps that take up to ten times as long.
        lag: so many steps later the time of a step is known.
    """

    def __init__(
        self,
        table: dict[Arm, float],
        seed: int = 0,
        noise: float = 0.03,
        outliers: float = 0.03,
        lag: int = 0,
    ) -> None:
        self.table, self.noise, self.outliers, self.lag = table, noise, outliers, lag
        self.random = random.Random(seed)
        self.ran: list[Arm] = []
        self._late: list[tuple[int, Window, float]] = []

    def step(self, arm: Arm) -> float:
        seconds = self.table[arm] * max(0.2, self.random.gauss(1, self.noise))
        if self.random.random() < self.outliers:
            seconds *= self.random.uniform(2, 10)
        if self.ran and self.ran[-1] != arm:
            seconds *= 8
        self.ran.append(arm)
        return seconds

    def run(self, controller: Controller, steps: int) -> None:
        end = len(self.ran) + steps
        while len(self.ran) < end:
            turn = controller.next_window()
            for index in range(turn.steps):
                seconds = self.step(turn.arm)
                if turn.skipped <= index < turn.skipped + turn.measured:
                    self._late.append((len(self.ran) + self.lag, turn, seconds))
                while self._late and self._late[0][0] <= len(self.ran):
                    _, of, sample = self._late.pop(0)
                    of.samples.append(sample)


def tables(count: int, seed: int) -> list[dict[Arm, float]]:
    rng = random.Random(seed)
    return [{arm: rng.uniform(1e-3, 60e-3) for arm in ARMS} for _ in range(count)]


def openings(rules: Rules) -> int:
    return (len(ARMS) - 1) * (rules.probe + (rules.rounds - 1) * rules.window)


WIDE = Rules(exploration=openings(Rules()))


@pytest.mark.parametrize("lag", [0, 1, 30])
def test_settles_on_the_fastest_of_arbitrary_arms(lag):
    for seed, table in enumerate(tables(60, 1)):
        machine, controller = Machine(table, seed, lag=lag), Controller(ARMS, rules=WIDE)
        machine.run(controller, 1500)
        fastest = min(table.values())
        assert controller.settled, (seed, table)
        assert table[controller.best] <= fastest * 1.05, (seed, table, controller.history)
        assert controller.exploration_steps <= WIDE.exploration


def test_never_settles_on_what_is_slower_than_no_graphs():
    rng = random.Random(2)
    for seed in range(150):
        off = rng.uniform(1e-3, 60e-3)
        table = {arm: off * rng.choice([rng.uniform(0.9, 1.15), rng.uniform(1, 6)]) for arm in ARMS}
        table[OFF] = off
        machine, controller = Machine(table, seed, noise=0.01), Controller(ARMS)
        machine.run(controller, 1200)
        slack = 1 + controller.rules.tolerance + 0.01  # the standard error of windows of such noise
        assert table[controller.best] <= off * slack, (seed, table, controller.history, controller.verdicts)


def test_exploration_is_bounded_and_cheap_when_the_first_arm_is_best():
    for seed, table in enumerate(tables(40, 3)):
        table[FUSED] = min(table.values()) / 3
        machine, controller = Machine(table, seed), Controller(ARMS)
        machine.run(controller, 1000)
        assert controller.best == FUSED
        # hopeless arms are seen through in their first, short window
        assert controller.exploration_steps <= (len(ARMS) - 1) * (
            controller.rules.probe + controller.rules.window
        )
        assert sum(arm != FUSED for arm in machine.ran) == controller.exploration_steps
        assert [s.arm for s in controller.history] == [FUSED]


def test_a_draw_keeps_graphs_only_where_they_are_not_slower():
    """Equal means: whichever stays, it is within the tolerance."""
    for seed in range(30):
        table = dict.fromkeys(ARMS, 0.05)
        machine, controller = Machine(table, seed, noise=0.002), Controller([FUSED, OFF])
        machine.run(controller, 500)
        assert controller.settled and controller.best == FUSED
        assert controller.exploration_steps <= controller.rules.exploration


@pytest.mark.parametrize(
    ("share", "kept"), [(1.0, False), (0.995, False), (1.02, False), (0.9, True), (0.7, True)]
)
def test_a_graph_of_the_update_alone_has_to_prove_that_it_is_faster(share, kept):
    alone = Arm(OPTIMIZER)
    for seed in range(20):
        machine = Machine({alone: 5e-3 * share, OFF: 5e-3}, seed, noise=0.01)
        controller = Controller([alone, OFF])
        machine.run(controller, 400)
        assert controller.settled
        assert (controller.best == alone) is kept, (seed, controller.verdicts)


def test_a_planted_drift_opens_the_question_again():
    for seed in range(20):
        table = {FUSED: 0.010, OFF: 0.013}
        machine, controller = Machine(table, seed, noise=0.05), Controller([FUSED, OFF])
        machine.run(controller, 2000)
        assert controller.best == FUSED and len(controller.history) == 1, controller.history
        table[FUSED] = 0.017
        machine.run(controller, 1200)
        assert controller.best == OFF, (seed, controller.history)
        table.update({FUSED: 0.005, OFF: 0.016})
        machine.run(controller, 3000)
        assert controller.best == FUSED, (seed, controller.history)
        assert all("after a drift" in switch.why for switch in controller.history[1:])


def test_the_first_looks_at_steps_without_graphs_are_what_later_looks_are_compared_with():
    """Their updates have the loop's own kernels, and those of the comparison had the kernels of graphs."""
    machine = Machine({FUSED: 9e-3, OFF: 5e-3}, noise=0.01)

    def decided(switch: Switch) -> None:
        if switch.arm == OFF and len(controller.history) < 3:
            machine.table[OFF] *= 1.3  # the first steps after the comparison have them already

    controller = Controller([FUSED, OFF], decided=decided)
    machine.run(controller, 3000)
    assert controller.best == OFF and controller.exploration_steps == 2 * controller.rules.probe
    machine.table[OFF] *= 3
    machine.run(controller, 15_000)
    assert controller.best == FUSED


def test_looks_at_steps_without_graphs_become_rare_and_looks_at_graphs_do_not():
    for best, least, most in ((OFF, 8, 20), (FUSED, 200, 330)):
        machine = Machine({arm: 5e-3 if arm == best else 9e-3 for arm in (FUSED, OFF)}, noise=0.01)
        controller, looks = Controller([FUSED, OFF]), 0
        while len(machine.ran) < 20_000:
            machine.run(controller, 1)
            looks += 1
        assert controller.settled and least < looks < most, (best, looks)


def test_noise_and_single_bursts_do_not_open_it():
    for seed in range(20):
        table = {FUSED: 0.010, OFF: 0.020}
        machine, controller = Machine(table, seed, noise=0.08, outliers=0.1), Controller([FUSED, OFF])
        machine.run(controller, 1000)
        explored = controller.exploration_steps
        for _ in range(5):
            table[FUSED] = 0.030  # a burst shorter than two looks
            machine.run(controller, controller.rules.look_every)
            table[FUSED] = 0.010
            machine.run(controller, 6 * controller.rules.look_every)
        assert controller.exploration_steps == explored, (seed, controller.history)


def test_an_alarm_that_changes_nothing_makes_the_next_one_rarer():
    table = {FUSED: 0.010, OFF: 0.080}
    machine, controller = Machine(table), Controller([FUSED, OFF])
    spent = []
    for _ in range(12):
        before = controller.exploration_steps
        machine.run(controller, 800)
        spent.append(controller.exploration_steps - before)
        table[FUSED] *= 1.3 if table[FUSED] < 0.03 else 0.4
    assert sum(spent[6:]) < sum(spent[:6])
    assert controller.best == FUSED


class Disturbed(Machine):
    """A machine in which so many steps from the one with this number on take so many times as long."""

    def __init__(
        self, table: dict[Arm, float], first: int, count: int, factor: float, **options: int
    ) -> None:
        super().__init__(table, noise=0.01, outliers=0.0, **options)
        self.first, self.count, self.factor = first, count, factor

    def step(self, arm: Arm) -> float:
        disturbed = self.first <= len(self.ran) < self.first + self.count
        return super().step(arm) * (self.factor if disturbed else 1)


@pytest.mark.parametrize("arms", [[FUSED, OFF], [OFF, FUSED]], ids=["leave", "begin"])
@pytest.mark.parametrize("lag", [0, 30])
@pytest.mark.parametrize(("count", "factor"), [(1, 1e5), (4, 20), (9, 20)], ids=["suspended", "busy", "long"])
def test_one_disturbed_window_decides_nothing(arms, count, factor, lag):
    """The process was suspended, or another job has run, at any time of the comparison and after it."""
    for first in range(140):
        machine = Disturbed({FUSED: 2e-3, OFF: 18e-3}, first, count, factor, lag=lag)
        controller = Controller(arms)
        machine.run(controller, 600)
        switches = [switch.arm for switch in controller.history]
        assert switches in ([FUSED], [OFF, FUSED]), (first, controller.history, controller.verdicts)
        assert controller.best == FUSED and controller.settled
        of_graphs = controller.exploration_steps if arms[0] == FUSED else 0
        assert of_graphs <= controller.rules.probe + 3 * controller.rules.window, first


def test_a_comparison_that_was_disturbed_is_not_opened_again_when_the_disturbance_ends():
    table = {FUSED: 2e-3, OFF: 18e-3}
    machine, controller = Disturbed(table, 0, 40, 3), Controller([FUSED, OFF])
    machine.run(controller, 60)
    explored = controller.exploration_steps
    machine.run(controller, 3000)
    assert controller.exploration_steps == explored and controller.best == FUSED
    table[FUSED] = 3e-3  # slower than it has become, and as it was compared
    machine.run(controller, 1000)
    assert controller.exploration_steps > explored and controller.best == FUSED


def test_hopeless_arms_are_not_tried():
    def estimate(arm: Arm, best: Arm, seconds: float) -> Estimate:
        if arm == OFF:
            return Estimate(seen=0.05, why="launch-bound")
        return Estimate(least=0.01, why="the same kernels") if not arm.compiled else Estimate(one_time=1e9)

    machine = Machine(dict.fromkeys(ARMS, 0.5) | {FUSED: 0.01})
    controller = Controller(ARMS, estimate=estimate)
    machine.run(controller, 300)
    assert set(machine.ran) == {FUSED} and controller.exploration_steps == 0
    assert "50 ms in warm-up (launch-bound)" in controller.verdicts[OFF]
    assert "at least 10 ms (the same kernels)" in controller.verdicts[ARMS[1]]
    assert controller.verdicts[FUSED].startswith("kept")


def test_times_seen_in_warm_up_are_not_trusted_to_be_exact():
    """They hold one-time costs: up to `warmup_slack` too long, and no graphs still get their chance."""
    machine = Machine({FUSED: 0.010, OFF: 0.006})
    controller = Controller([FUSED, OFF], estimate=lambda *_: Estimate(seen=0.011))
    machine.run(controller, 300)
    assert controller.best == OFF


@pytest.mark.parametrize(("left", "tried"), [(200.0, False), (100_000.0, True), (0.0, False)])
def test_one_time_costs_are_weighed_against_the_steps_left(left, tried):
    machine = Machine({FUSED: 0.010, COMPILED: 0.006})
    controller = Controller(
        [FUSED, COMPILED],
        estimate=lambda arm, best, now: Estimate(likely=now * 2 / 3, one_time=60.0),
        steps_left=lambda: left,
    )
    machine.run(controller, 200)
    assert (COMPILED in machine.ran) == tried == (controller.best == COMPILED)
    assert tried or "would not pay" in controller.verdicts[COMPILED]


def test_unknown_steps_left_are_as_many_as_were_made():
    machine = Machine({FUSED: 0.010, COMPILED: 0.006})
    controller = Controller(
        [FUSED, COMPILED], estimate=lambda arm, best, now: Estimate(likely=now * 2 / 3, one_time=6.0)
    )
    while COMPILED not in machine.ran and len(machine.ran) < 10_000:
        machine.run(controller, 50)
    # 6 s pay after 1800 steps of 3.3 ms gain; noticed before that number has doubled
    assert 1800 <= len(machine.ran) <= 4200
    machine.run(controller, 300)
    assert controller.best == COMPILED


@pytest.mark.parametrize("bad", ARMS[:2])
def test_an_arm_that_cannot_run_is_dropped(bad):
    machine = Machine(dict.fromkeys(ARMS[:2], 0.01) | {OFF: 0.02})
    controller = Controller([*ARMS[:2], OFF])
    for _ in range(60):
        turn = controller.next_window()
        if turn.arm == bad:
            turn.problem = "capture failed"
        else:
            turn.samples += [machine.step(turn.arm) for _ in range(turn.steps)]
    assert controller.best == ARMS[1 if bad == ARMS[0] else 0]
    assert controller.verdicts[bad] == "capture failed"
    assert machine.ran.count(bad) == 0


def test_when_no_arm_can_run_there_are_no_graphs():
    controller = Controller([FUSED])
    controller.next_window().problem = "capture failed"
    assert controller.next_window().arm == OFF


def test_a_change_that_times_depend_on_opens_it():
    machine, controller = Machine({FUSED: 0.01, OFF: 0.02}), Controller([FUSED, OFF])
    machine.run(controller, 300)
    before = controller.exploration_steps
    controller.reopen("other layers learn")
    machine.run(controller, 100)
    assert controller.exploration_steps > before and controller.best == FUSED


def test_decisions_are_told():
    told: list[Switch] = []
    machine = Machine({FUSED: 0.02, OFF: 0.01})
    controller = Controller([FUSED, OFF], decided=told.append)
    machine.run(controller, 200)
    assert told == controller.history
    assert (told[-1].arm, told[-1].before) == (OFF, FUSED)
    assert "against" in told[-1].why and 0 < told[-1].step <= 200


SPLIT_ARM = Arm(SPLIT)


def test_a_trimmed_mean_forgets_outliers():
    quiet = summary([1.0, 1.01, 0.99, 1.0, 1.02])
    burst = summary([1.0, 1.01, 0.99, 1.0, 50.0])
    assert abs(quiet.mean - burst.mean) < 0.01
    assert surely_faster(quiet, summary([2.0, 2.1, 1.9, 2.0]), confidence=0.95)
    assert not surely_faster(quiet, summary([1.0, 1.03, 0.98, 1.0]), confidence=0.95)
    assert not surely_faster(summary([1.0]), quiet, confidence=0.95)


def test_arms_print():
    assert list(map(str, ARMS)) == [
        "{F B O}",
        "{F B} {O}",
        "{F B} O",
        "F B {O}",
        "F B O",
        "{F B O} compiled",
    ]
