"""The rule that says when a shape has earned a graph: pure, without a clock."""

from __future__ import annotations

import math

import pytest

from pygraph_train.selection.returns import Costs, Returns, is_sampled, sampled_share

pytestmark = [pytest.mark.quick, pytest.mark.passes_without_graphs("numbers only")]


def eager(
    plain: float = 1.0, replay: float = 0.5, capture: float | None = 8.0, compared: float | None = None
) -> Costs:
    """Of a family without Inductor's kernels, of which three captures were measured."""
    return Costs({False: plain}, {False: replay}, capture, compared, captures=3)


def test_a_shape_is_captured_when_it_has_lost_what_a_capture_costs() -> None:
    costs = eager(0.017, 0.004, 0.130, 0.260)
    assert costs.steps(3, compared=0) == pytest.approx(10)
    assert costs.steps(3, compared=1) == pytest.approx(30)
    assert costs.steps(3, compared=0.1) == pytest.approx(12), (
        "each shape pays for its share of the comparisons"
    )


def test_a_replay_that_gains_nothing_is_never_worth_a_capture() -> None:
    assert eager(0.004, 0.004, 0.1).steps(3, compared=0) == math.inf
    assert not Returns(steps=10**9).earned(math.inf)
    assert not Returns(steps=10**9).earned(math.inf, 10**9, math.inf)


@pytest.mark.parametrize("missing", ["plain", "replay", "capture"])
def test_what_was_not_measured_is_declared(missing: str) -> None:
    costs = eager()
    setattr(costs, missing, None if missing == "capture" else {})
    assert costs.steps(3, compared=1) == 3


def test_first_captures_that_were_slow_decide_nothing() -> None:
    costs = Costs({False: 1.0}, {False: 0.5})
    for seconds in (500.0, 50.0):
        costs.captured(seconds)
        assert costs.steps(3, compared=0) == 3
    costs.captured(5.0)
    assert costs.steps(3, compared=0) == 10
    costs.captured(7.0)
    assert costs.steps(3, compared=0) == 10


def test_every_capture_costs_a_step_at_least() -> None:
    assert eager(1.0, 0.1, 0.001).steps(3, compared=0) == 1
    assert not Returns().earned(1)


def test_kernels_of_inductor_are_counted_by_themselves() -> None:
    """BERT on an H100: a shape that code of Inductor is for loses less without a graph, and gains more with one."""
    costs = eager(0.027, 0.005, 0.15)
    costs.ran(0.010, compiled=True)
    assert costs.steps(3, compared=0) == pytest.approx(0.15 / 0.022), (
        "no code is for it: it runs with eager kernels"
    )
    assert costs.steps(3, compared=0, code=True) == pytest.approx(0.15 / 0.005), "a graph of eager kernels"
    assert costs.steps(3, compared=0, compiled=True, code=True) == 3, (
        "no graph of Inductor's kernels was measured"
    )
    costs.replayed(0.0025, compiled=True)
    assert costs.steps(3, compared=0, compiled=True, code=True) == pytest.approx(0.15 / 0.0075)


def test_kernels_of_inductor_save_less_of_replays() -> None:
    costs = eager(0.027, 0.005)
    assert costs.saved_by_kernels(100, 100) is None
    costs.ran(0.010, compiled=True)
    assert costs.saved_by_kernels(100, 0) == pytest.approx(1.7)
    costs.replayed(0.0025, compiled=True)
    assert costs.saved_by_kernels(100, 100) == pytest.approx(1.7 + 0.25)


def test_a_dropped_graph_doubles_the_price() -> None:
    returns = Returns(steps=5)
    assert returns.earned(5)
    returns.dropped()
    assert not returns.earned(5)
    returns.steps = 9
    assert not returns.earned(5)
    returns.steps = 10
    assert returns.earned(5)


@pytest.mark.parametrize("comes_back", [1, 5, 10, 11, 50, 1000])
def test_no_shape_costs_more_than_twice_what_would_have_been_best(comes_back: int) -> None:
    costs, returns = eager(17.0, 4.0, 130.0), Returns()
    spent, captured = 0.0, False
    for _ in range(comes_back):
        if not captured and returns.earned(costs.steps(3, compared=0)):
            captured, spent = True, spent + 130.0
        spent += 4.0 if captured else 17.0
        returns.steps += not captured
    assert spent <= 2 * min(17.0 * comes_back, 130.0 + 4.0 * comes_back)


@pytest.mark.parametrize(
    ("steps", "made", "left", "earned"),
    [
        (3, 100, 2900, True),  # 87 more
        (1, 100, 2900, False),  # too few to say anything
        (3, 100, 300, False),  # 9 more
        (50, 2900, 100, False),  # 1 or 2 more
        (50, 2900, 600, True),
        (3, 100, math.inf, True),
        (50, 2900, 0, False),
        (9, 2900, None, False),
        (10, 2900, None, True),
    ],
)
def test_steps_that_are_left_say_how_often_a_shape_will_come(
    steps: int, made: int, left: float | None, earned: bool
) -> None:
    assert Returns(steps=steps).earned(10, made, left) is earned


@pytest.mark.parametrize("steps", [600, 3000, 20_000])
def test_known_steps_cost_no_more_than_the_best_choice_and_what_shows_it(steps: int) -> None:
    """49 shapes that come in turn: either all of them are worth a graph, or none is."""
    plain, replay, capture = 17.0, 4.0, 130.0
    costs, returns = eager(plain, replay, capture), [Returns() for _ in range(49)]
    spent, captured = 0.0, set()
    for step in range(1, steps + 1):
        shape = step % 49
        known = returns[shape]
        if shape not in captured and known.earned(costs.steps(3, compared=0), step, steps - step):
            captured.add(shape)
            spent += capture
        spent += replay if shape in captured else plain
        known.steps += 1
    best = min(plain * steps, 49 * capture + replay * steps)
    assert spent <= best + 3 * 49 * (plain - replay) + 49


def test_captures_are_compared_at_growing_intervals() -> None:
    assert [n for n in range(1, 40) if is_sampled(n)] == [1, 2, 4, 8, 16, 32]


@pytest.mark.parametrize("count", [1, 2, 3, 4, 7, 8, 49, 1000])
def test_shapes_pay_together_for_what_is_compared(count: int) -> None:
    assert sampled_share(count) * count == sum(map(is_sampled, range(1, count + 1)))
