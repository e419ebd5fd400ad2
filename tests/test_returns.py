"""The rule that says when a shape has earned a graph: pure, without a clock."""

from __future__ import annotations

import math

import pytest

from pygraph_train.selection.returns import Costs, Returns, is_sampled

pytestmark = [pytest.mark.quick, pytest.mark.passes_without_graphs("numbers only")]


def test_a_shape_is_captured_when_it_has_lost_what_a_capture_costs() -> None:
    costs = Costs(plain=0.017, replay=0.004, capture=0.130, compared=0.260, captures=2)
    assert costs.steps(3, compared=False) == pytest.approx(10)
    assert costs.steps(3, compared=True) == pytest.approx(30)


def test_a_replay_that_gains_nothing_is_never_worth_a_capture() -> None:
    assert Costs(plain=0.004, replay=0.004, capture=0.1, captures=2).steps(3, compared=False) == math.inf
    assert not Returns(steps=10**9).earned(math.inf)


@pytest.mark.parametrize("missing", ["plain", "replay", "capture"])
def test_what_was_not_measured_is_declared(missing: str) -> None:
    costs = Costs(plain=1.0, replay=0.5, capture=8.0, captures=2)
    setattr(costs, missing, None)
    assert costs.steps(3, compared=True) == 3


def test_a_first_capture_that_was_slow_decides_nothing() -> None:
    costs = Costs(plain=1.0, replay=0.5)
    costs.captured(500.0)
    assert costs.steps(3, compared=False) == 3
    costs.captured(5.0)
    assert costs.steps(3, compared=False) == 10
    costs.captured(7.0)
    assert costs.steps(3, compared=False) == 10


def test_every_capture_costs_a_step_at_least() -> None:
    assert Costs(plain=1.0, replay=0.1, capture=0.001, captures=2).steps(3, compared=False) == 1
    assert not Returns().earned(1)


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
    costs, returns = Costs(plain=17.0, replay=4.0, capture=130.0, captures=2), Returns()
    spent, captured = 0.0, False
    for _ in range(comes_back):
        if not captured and returns.earned(costs.steps(3, compared=False)):
            captured, spent = True, spent + 130.0
        spent += 4.0 if captured else 17.0
        returns.steps += not captured
    assert spent <= 2 * min(17.0 * comes_back, 130.0 + 4.0 * comes_back)


def test_captures_are_compared_at_growing_intervals() -> None:
    assert [n for n in range(1, 40) if is_sampled(n)] == [1, 2, 4, 8, 16, 32]
