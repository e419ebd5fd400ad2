"""What the ranks of one training agree on: that all of them use the library alike, and what each step is.

A launch of a graph that holds collectives is itself collective: all ranks replay the same capture in the same step,
or none does. So each rank says before each step what it can do, in one word, and reads what the others said.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import tempfile
from collections.abc import Mapping, Sequence
from datetime import timedelta
from enum import IntEnum
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import distributed

from pygraph_train.parallel.mailbox import Mailbox, SharedMailbox, StoreMailbox, TimedOut
from pygraph_train.problems import Problem, PyGraphError
from pygraph_train.torch_private.distributed import default_store, group_timeout

__all__ = ["Agreement", "Said", "Word", "agreement", "decline", "versions"]

_PREFIX = "pygraph_train"

_HANDSHAKE_SECONDS = 120.0
"""How long a rank waits for the others before the first step, where their process group does not give up earlier."""

_made: dict[str, int] = {}
"""Agreements that this process has asked for, by process group: all ranks ask in the same order."""


class Word(IntEnum):
    """What a rank says."""

    PLAIN = 0
    """This step runs as it is."""
    REPLAY = 1
    """It can be a replay of the capture with this number."""
    AUDIT = 2
    """It can be a replay of that capture, and is to be compared with a plain step."""
    CAPTURE = 3
    """It can be captured, and then replayed; the number tells what."""
    OFF = 4
    """This rank replays nothing any more."""
    LEFT = 5
    """This rank makes no more steps."""
    DONE = 6
    """Its part of a capture or comparison is done."""
    FAILED = 7
    """It is not."""


class Said(NamedTuple):
    """One rank's word and the number that belongs to it, at most 40 bits."""

    word: Word
    number: int = 0


class Agreement:
    """The votes of the ranks of one process group.

    Args:
        rank: of this process in the group.
        ranks: how many there are.
        mailbox: carries the words.
        store: for texts.
        timeout: seconds after which a rank that says nothing is given up.

    Attributes:
        rank, ranks: as given.
    """

    def __init__(self, rank: int, ranks: int, mailbox: Mailbox, store: Any, timeout: float) -> None:
        self.rank, self.ranks = rank, ranks
        self._mailbox, self._store, self._timeout = mailbox, store, timeout

    def vote(self, said: Said, step: int) -> list[Said]:
        """Say a word and hear those of all ranks.

        Args:
            step: the training step, for messages.
        Returns:
            What each rank said, by rank.
        Raises:
            PyGraphError: a rank has ended, or has said nothing for as long as the process group waits.
        """
        self._mailbox.post(said.number << 4 | said.word)
        try:
            words = self._mailbox.read(self._timeout)
        except TimedOut as missing:
            raise PyGraphError(self._why_missing(missing, step)) from None
        return [Said(Word(word & 15), word >> 4) for word in words]

    def leave(self) -> None:
        """Tell the others that this rank makes no more steps. Waits for nobody."""
        with contextlib.suppress(Exception):  # the store, or the memory, may be gone
            self._mailbox.post(int(Word.LEFT))

    def tell(self, text: str) -> None:
        """Leave a text for the others, before the word that makes them ask for it."""
        self._store.set(f"text/{self.rank}", text)

    def told(self, rank: int) -> str:
        """The last text of a rank, "" where it has left none."""
        key = f"text/{rank}"
        return str(self._store.get(key).decode()) if self._store.check([key]) else ""

    def close(self) -> None:
        """Let go of the mailbox."""
        self._mailbox.close()

    def _why_missing(self, missing: TimedOut, step: int) -> str:
        names = _ranks(missing.ranks)
        if missing.dead:
            return (
                f"{names} ended before step {step}: its process is gone, and the others cannot train without it. "
                "Look at its output"
            )
        return (
            f"{names} did not begin step {step} within {self._timeout:.0f} s, while rank {self.rank} did. All ranks "
            "have to make the same number of steps; look at what that rank waits for"
        )


def agreement(group: Any, facts: Mapping[str, Any]) -> Agreement | Problem:
    """Meet the other ranks. All of them call this, or `decline`, at the same point of their training.

    Args:
        group: the process group whose collectives the graphs hold.
        facts: what has to be the same on all ranks, as plain data.
    Returns:
        The agreement, or why there is none: the same on all ranks.
    Raises:
        PyGraphError: the facts differ. The message names them and the ranks.
    """
    rank, ranks = distributed.get_rank(group), distributed.get_world_size(group)
    store, timeout = _store(group), group_timeout(group).total_seconds()
    me = {"facts": facts, "host": _machine(), "pid": os.getpid()}
    store.set(f"here/{rank}", json.dumps(me))
    found: list[dict[str, Any]] = []
    for other in range(ranks):
        key = f"here/{other}"
        try:
            store.wait([key], timedelta(seconds=min(timeout, _HANDSHAKE_SECONDS)))
        except RuntimeError:  # torch.distributed.DistStoreError
            return Problem(
                f"{_ranks([other])} did not answer before the first step: it trains without pygraph-train, or waits",
                fix="Use pygraph-train on all ranks or on none",
            )
        found.append(json.loads(store.get(key)))
    for other, card in enumerate(found):
        if (reason := card.get("declined")) is not None:
            return Problem(f"{_ranks([other])} runs without graphs ({reason}), so all ranks do")
    _compare([card["facts"] for card in found])
    if len({card["host"] for card in found}) == 1:
        mailbox: Mailbox = _shared(store, rank, [card["pid"] for card in found], timeout)
    else:
        mailbox = StoreMailbox(rank, ranks, store)
    return Agreement(rank, ranks, mailbox, store, timeout)


def decline(group: Any, reason: str) -> None:
    """Tell ranks that want to agree that this one runs without graphs. Waits for nobody."""
    _store(group).set(f"here/{distributed.get_rank(group)}", json.dumps({"declined": reason}))


def _store(group: Any) -> Any:
    """Keys of the next agreement of a group."""
    name = str(group.group_name)
    _made[name] = number = _made.get(name, 0) + 1
    return distributed.PrefixStore(  # type: ignore[attr-defined]
        f"{_PREFIX}/{name}/{number}", default_store()
    )


def _compare(facts: Sequence[Mapping[str, Any]]) -> None:
    for field, mine in facts[0].items():
        others = {rank: other.get(field) for rank, other in enumerate(facts) if other.get(field) != mine}
        if others:
            values = ", ".join(f"{value} on rank {rank}" for rank, value in others.items())
            raise PyGraphError(
                f"the ranks of this training differ in {field}: {mine} on rank 0, {values}. Give all ranks the same"
            )


def _shared(store: Any, rank: int, pids: Sequence[int], timeout: float) -> SharedMailbox:
    """Memory that all ranks have open, and that has no name any more."""
    if rank == 0:
        store.set("memory", SharedMailbox.make_file(len(pids)))
    store.wait(["memory"], timedelta(seconds=timeout))
    path = store.get("memory").decode()
    with open(path, "r+b") as file:
        mailbox = SharedMailbox(rank, pids, file.fileno())
    if store.add("opened", 1) == len(pids):
        os.unlink(path)
    return mailbox


def _machine() -> str:
    """What is the same for two processes that share memory."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="utf-8").strip()
        boot += os.readlink("/proc/self/ns/pid")  # process numbers mean the same there
    except OSError:
        boot = ""
    shared = "/dev/shm" if os.path.isdir("/dev/shm") else tempfile.gettempdir()
    place = os.stat(shared)
    return f"{socket.gethostname()}/{boot}/{place.st_dev}"


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


def versions() -> dict[str, str]:
    """Of what has to be the same on all ranks."""
    from pygraph_train import __version__

    return {"the version of pygraph-train": __version__, "the version of torch": torch.__version__}
