"""The processes that train together: what is refused there, and what they agree on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from torch import distributed

from pygraph_train.parallel.processes import OneProcess, SeveralProcesses, processes


@contextmanager
def group(world_size: int) -> Iterator[None]:
    """A process group of which this process is the first rank; the others never come."""
    store = distributed.HashStore()
    # the backend of torch's own tests, which sends nothing
    from torch.testing._internal.distributed import fake_pg  # noqa: F401

    distributed.init_process_group("fake", store=store, rank=0, world_size=world_size)
    try:
        yield
    finally:
        distributed.destroy_process_group()


def test_a_process_alone_may_compare_and_agrees_with_itself() -> None:
    alone = processes()
    assert isinstance(alone, OneProcess) and alone.why_no_comparison is None
    assert list(alone.agree([0.5, float("inf")])) == [0.5, float("inf")]


@pytest.mark.parametrize(("ranks", "kind"), [(1, OneProcess), (2, SeveralProcesses)])
def test_the_process_group_tells_how_many_there_are(ranks: int, kind: type) -> None:
    with group(ranks):
        assert type(processes()) is kind
    assert type(processes()) is OneProcess


def test_several_processes_say_why_they_compare_nothing() -> None:
    why = SeveralProcesses.why_no_comparison
    assert why == "several processes: the first plan is kept, without a comparison"
