"""Which ways of a step get graphs, where random numbers of the host decide which way it takes."""

from __future__ import annotations

from typing import Any

import pytest

from pygraph_train.step.lifecycle import Life, Stage
from pygraph_train.step.ways import Ways

pytestmark = pytest.mark.quick


class OneWay:
    """What is known of one way."""

    def __init__(self, *, proved: bool = True, replays: int = 0, last_used: int = 0) -> None:
        self.life = Life(Stage.GRAPHED) if proved else Life(Stage.WATCHED, 1)
        self.replays, self.last_used = replays, last_used
        self.trace: Any = type(
            "Trace",
            (),
            {"host_draws": type("Draws", (), {"where": "step.py:3", "told": "numbers", "fix": "few"})},
        )
        self.forgotten = False

    def forget_captures(self) -> None:
        self.forgotten = True


def wants(ways: Ways, variants: list[Any], *, most: int = 8, step: int = 10) -> bool:
    ways.took((True,))
    return ways.returns((True,), variants, most, step)


def test_a_way_is_traced_when_it_comes_again() -> None:
    ways = Ways()
    assert not wants(ways, [OneWay()])
    assert wants(ways, [OneWay()])


def test_ways_that_have_not_come_again_hold_up_others() -> None:
    ways = Ways()
    fresh: list[Any] = [OneWay(proved=False), OneWay(proved=False)]
    assert not any(wants(ways, fresh) for _ in range(50))
    assert wants(ways, [OneWay(), OneWay(proved=False)])


def test_there_is_room_for_so_many_ways_and_one_that_nobody_takes_goes() -> None:
    ways, known = Ways(), [OneWay(last_used=step) for step in range(300, 306)]
    variants: list[Any] = list(known)
    assert not any(wants(ways, variants, step=500) for _ in range(5))
    assert variants == known
    assert wants(ways, variants, step=800)
    assert variants == known[1:] and known[0].forgotten and not known[1].forgotten


@pytest.mark.parametrize("compiled", [False, True])
def test_most_steps_elsewhere_end_it(compiled: bool) -> None:
    ways = Ways()
    for _ in range(120):
        ways.took((False,))
    few, some, many = ([OneWay(replays=n)] for n in (10, 60, 1000))
    told = ways.too_many(few, compiled=compiled)  # type: ignore[arg-type]
    assert told is not None and told.where == "step.py:3" and "120 steps" in told.reason
    assert told.fix == "few"
    assert (ways.too_many(some, compiled=compiled) is None) != compiled  # type: ignore[arg-type]
    assert ways.too_many(many, compiled=compiled) is None  # type: ignore[arg-type]


def test_what_is_counted_has_a_bound() -> None:
    ways = Ways()
    for number in range(5000):
        ways.took((number, [number]))
    assert len(ways._met) <= 512
