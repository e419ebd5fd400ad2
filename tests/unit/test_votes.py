"""Processes agree on what they replay: quickly, and without waiting for one that is gone."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from typing import Any

import pytest
from torch import distributed

from pygraph_train.parallel import votes
from pygraph_train.parallel.votes import APART, PLAIN, RECORD, REPLAY, Apart, Votes
from tests.ranks import Ranks, pair_of_ranks

GRAPH, OTHER = 0x123456, 0x654321


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with pair_of_ranks() as pool:
        yield pool


def asked(one: Votes, *given: int) -> Any:
    """What all choose, or why there are no votes any more."""
    try:
        return sorted(one.ask(*given))
    except Apart as apart:
        return str(apart.args[0])


def rounds(rank: int, count: int) -> float:
    """Microseconds of a vote."""
    both, seconds = Votes([0, 1], joins=True), []
    for number in range(count):
        began = time.perf_counter()
        assert both.ask(GRAPH, REPLAY + number % 7) == {REPLAY + number % 7}
        seconds.append(time.perf_counter() - began)
    both.leave(APART)
    return statistics.median(seconds) * 1e6


def choices(rank: int) -> list[Any]:
    both = Votes([0, 1], joins=True)
    found = [asked(both, GRAPH, RECORD), asked(both, GRAPH, PLAIN if rank else RECORD)]
    return [*found, asked(both, OTHER if rank else GRAPH, RECORD), asked(both, GRAPH, RECORD)]


def one_leaves(rank: int) -> list[Any]:
    both = Votes([0, 1], joins=True)
    found = [asked(both, GRAPH, RECORD)]
    if rank:
        both.leave(APART)
    return [*found, asked(both, GRAPH, RECORD)]


def one_never_votes(rank: int, joins: str) -> list[Any]:
    """It joins, or not, or says that it does not."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(votes, "JOIN_SECONDS", 0.5)
        patch.setattr(votes, "VOTE_SECONDS", 0.5)
        both = None if rank and joins == "never" else Votes([0, 1], joins=not rank or joins == "yes")
        found = [] if rank else [asked(both, GRAPH, RECORD)]
        distributed.barrier()
        both = both or Votes([0, 1], joins=True)
        return [*found, asked(both, GRAPH, RECORD)]


def test_graphs_go_before_their_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """NCCL waits for graphs that hold its collectives, for ever."""
    order: list[str] = []
    monkeypatch.setattr(distributed, "destroy_process_group", lambda *given: order.append("group"))

    class Holding:
        def release(self) -> None:
            order.append("graphs")

    one, other = Holding(), Holding()
    for loop in (one, other):
        votes.released_first(loop)
    distributed.destroy_process_group()
    assert order == ["graphs", "graphs", "group"]


def test_a_vote_takes_microseconds(ranks: Ranks) -> None:
    medians = ranks.run("tests.unit.test_votes:rounds", count=2000)
    print("microseconds of a vote:", medians)
    assert max(medians) < 200


def test_choices_differ_and_graphs_must_not(ranks: Ranks) -> None:
    for found in ranks.run("tests.unit.test_votes:choices"):
        assert found == [[RECORD], [PLAIN, RECORD], APART.reason, APART.reason]


def test_one_that_leaves_is_not_waited_for(ranks: Ranks) -> None:
    assert ranks.run("tests.unit.test_votes:one_leaves") == [[[RECORD], APART.reason]] * 2


@pytest.mark.parametrize("joins", ["yes", "says no", "never"])
def test_one_that_never_votes_is_waited_for_once(ranks: Ranks, joins: str) -> None:
    first, second = ranks.run("tests.unit.test_votes:one_never_votes", joins=joins)
    why = "another process has not said in time whether it replays it" if joins == "yes" else APART.reason
    assert first == [why, why] and second == [APART.reason]
