"""The votes of ranks: mailboxes, words, and what is said when somebody is missing."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
from torch import distributed

from pygraph_train import PyGraphError
from pygraph_train.parallel.agreement import Agreement, Said, Word
from pygraph_train.parallel.mailbox import Mailbox, SharedMailbox, StoreMailbox, TimedOut

ROUNDS = 300


def shared(ranks: int, pids: list[int] | None = None) -> list[Mailbox]:
    path = SharedMailbox.make_file(ranks)
    with open(path, "r+b") as file:
        boxes = [SharedMailbox(rank, pids or [os.getpid()] * ranks, file.fileno()) for rank in range(ranks)]
    os.unlink(path)
    return list(boxes)


def stored(ranks: int) -> list[Mailbox]:
    store = distributed.HashStore()
    return [StoreMailbox(rank, ranks, store) for rank in range(ranks)]


@pytest.mark.parametrize("make", [shared, stored])
@pytest.mark.parametrize("ranks", [1, 3])
def test_every_rank_reads_what_all_have_posted_in_the_same_round(
    make: Callable[[int], list[Mailbox]], ranks: int
) -> None:
    rounds = ROUNDS if make is shared else 30
    found: list[list[list[int]]] = [[] for _ in range(ranks)]

    def work(rank: int, box: Mailbox) -> None:
        for number in range(rounds):
            box.post(1000 * number + rank)
            found[rank].append(box.read(30.0))

    threads = [threading.Thread(target=work, args=(rank, box)) for rank, box in enumerate(make(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = [[1000 * number + rank for rank in range(ranks)] for number in range(rounds)]
    assert found == [expected] * ranks


def test_rounds_begin_anew_where_their_number_no_longer_fits() -> None:
    (box,) = shared(1)
    for number in range(1 << 16, (1 << 16) + 3):
        box._round = number  # type: ignore[attr-defined]
        box.post(7)
        assert box.read(1.0) == [7]


@pytest.mark.parametrize("make", [shared, stored])
def test_a_rank_that_posts_nothing_is_named(make: Callable[[int], list[Mailbox]]) -> None:
    box = make(3)[0]
    box.post(1)
    with pytest.raises(TimedOut) as missing:
        box.read(0.05)
    assert missing.value.ranks == [1, 2] and not missing.value.dead


def test_a_process_that_has_ended_is_found_long_before_the_time_is_over() -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    box = shared(2, [os.getpid(), ended.pid])[0]
    box.post(1)
    with pytest.raises(TimedOut) as missing:
        box.read(60.0)
    assert missing.value.ranks == [1] and missing.value.dead


class Missing:
    """A mailbox that some ranks never post to."""

    def __init__(self, ranks: list[int], *, dead: bool) -> None:
        self._error = TimedOut(ranks, dead=dead)

    def post(self, word: int) -> None:
        """Nobody reads it."""

    def read(self, timeout: float) -> list[int]:
        raise self._error

    def close(self) -> None:
        """Nothing is open."""


@pytest.mark.parametrize(
    ("ranks", "dead", "sentence"),
    [
        ([1], True, "rank 1 ended before step 7: its process is gone"),
        ([1, 2], False, "ranks 1, 2 did not begin step 7 within 5 s, while rank 0 did"),
    ],
)
def test_the_error_names_ranks_and_step(ranks: list[int], dead: bool, sentence: str) -> None:
    store: Any = distributed.HashStore()
    agreement = Agreement(0, 3, Missing(ranks, dead=dead), store, 5.0)
    with pytest.raises(PyGraphError, match=sentence):
        agreement.vote(Said(Word.PLAIN), 7)


def test_words_and_numbers_arrive_as_they_were_said() -> None:
    (box,) = shared(1)
    agreement = Agreement(0, 1, box, distributed.HashStore(), 5.0)
    for said in (Said(Word.CAPTURE, (1 << 32) - 1), Said(Word.REPLAY, 3), Said(Word.LEFT)):
        assert agreement.vote(said, 1) == [said]
    assert agreement.told(0) == ""
    agreement.tell("why")
    assert agreement.told(0) == "why"


def test_a_store_that_is_gone_names_a_rank() -> None:
    class Gone:
        def set(self, key: str, value: str) -> None:
            """The first word still arrives."""

        def wait(self, *_: Any) -> None:
            raise RuntimeError("Broken pipe")

        check = wait

    mailbox = StoreMailbox(1, 2, Gone())
    mailbox.post(3)
    with pytest.raises(TimedOut) as told:
        mailbox.read(1.0)
    assert told.value.ranks == [0]
