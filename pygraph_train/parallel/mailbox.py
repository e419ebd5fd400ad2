"""One number a round from each rank to all others: in shared memory, or through a store between machines."""

from __future__ import annotations

import mmap
import os
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Protocol

__all__ = ["Mailbox", "SharedMailbox", "StoreMailbox", "TimedOut"]

_ROUND_BITS = 16
_SPINS, _CROWDED_SPINS = 2000, 20
"""A rank looks at the mailbox so often, about ten times a microsecond, before it lets other processes run. Where
there are more ranks than processors, the rank that it waits for may need its processor."""

_LOOK_FOR_THE_DEAD = 0.5
"""Seconds from one look at whether a process is alive to the next."""


class TimedOut(Exception):
    """Some ranks have not posted in time.

    Attributes:
        ranks: those.
        dead: whether their processes have ended.
    """

    def __init__(self, ranks: Sequence[int], *, dead: bool) -> None:
        super().__init__(f"ranks {list(ranks)}")
        self.ranks = list(ranks)
        self.dead = dead


class Mailbox(Protocol):
    """Rounds of messages. Every rank posts once in a round, and reads the round before it posts in the next one."""

    def post(self, word: int) -> None:
        """Show a number of at most 47 bits to all ranks. Returns at once."""

    def read(self, timeout: float) -> list[int]:
        """The numbers of this round, by rank, when all have posted.

        Args:
            timeout: seconds.
        Raises:
            TimedOut: some have not posted.
        """

    def close(self) -> None:
        """Let go of the memory."""


class SharedMailbox:
    """A page of memory that the ranks of one machine share.

    A rank writes its number and the round in one word of eight bytes, so that nobody reads half of it. Two words a
    rank, in turn: a rank that is a round ahead overwrites nothing that another one has not read.

    Args:
        rank: of this process.
        pids: process numbers by rank.
        file: a file of at least `size(ranks)` zeros, which all ranks have open. It may be unlinked.
    """

    def __init__(self, rank: int, pids: Sequence[int], file: int) -> None:
        self._rank, self._pids = rank, list(pids)
        self._memory = mmap.mmap(file, self.size(len(pids)))
        self._words = memoryview(self._memory).cast("q")
        self._round = 0
        crowded = (os.cpu_count() or 1) < len(pids)
        self._spins = _CROWDED_SPINS if crowded else _SPINS

    @staticmethod
    def size(ranks: int) -> int:
        """Bytes of the file."""
        return 16 * ranks

    @staticmethod
    def make_file(ranks: int) -> str:
        """The path of a new file of zeros, in memory where the system has a place for that."""
        folder = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        handle, path = tempfile.mkstemp(prefix="pygraph-train-", dir=folder)
        os.truncate(handle, SharedMailbox.size(ranks))
        os.close(handle)
        return path

    def post(self, word: int) -> None:
        """See `Mailbox.post`."""
        self._round += 1
        stamp = self._round & ((1 << _ROUND_BITS) - 1)
        self._words[2 * self._rank + self._round % 2] = word << _ROUND_BITS | stamp

    def read(self, timeout: float) -> list[int]:
        """See `Mailbox.read`."""
        words, parity = self._words, self._round % 2
        mask = (1 << _ROUND_BITS) - 1
        stamp = self._round & mask
        found: list[int] = []
        spins, started, looked = 0, 0.0, 0.0
        for rank in range(len(self._pids)):
            place = 2 * rank + parity
            while (word := words[place]) & mask != stamp:
                spins += 1
                if spins < self._spins:
                    continue
                now = time.perf_counter()
                started = started or now
                if now - started > timeout:
                    raise TimedOut(self._missing(stamp), dead=False)
                if now - max(looked, started) > _LOOK_FOR_THE_DEAD:
                    looked = now
                    if dead := [r for r in self._missing(stamp) if not _alive(self._pids[r])]:
                        raise TimedOut(dead, dead=True)
                time.sleep(0 if now - started < 0.005 else 1e-4)
            found.append(word >> _ROUND_BITS)
        return found

    def _missing(self, stamp: int) -> list[int]:
        mask, parity = (1 << _ROUND_BITS) - 1, self._round % 2
        return [r for r in range(len(self._pids)) if self._words[2 * r + parity] & mask != stamp]

    def close(self) -> None:
        """See `Mailbox.close`."""
        self._words.release()
        self._memory.close()


class StoreMailbox:
    """Keys of a store that all ranks reach. Slower than shared memory: a vote takes a round trip to the store's host.

    Args:
        rank, ranks: of this process, and how many there are.
        store: set, get, wait, delete_key; keys are ours alone.
        clock: seconds; for tests.
    """

    def __init__(
        self, rank: int, ranks: int, store: Any, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._rank, self._ranks, self._store, self._clock = rank, ranks, store, clock
        self._round = 0

    def post(self, word: int) -> None:
        """See `Mailbox.post`."""
        self._round += 1
        self._store.set(self._key(self._round, self._rank), str(word))
        if self._round > 2:  # whoever posted in the round before has read this one
            self._store.delete_key(self._key(self._round - 2, self._rank))

    def read(self, timeout: float) -> list[int]:
        """See `Mailbox.read`."""
        from datetime import timedelta

        keys = [self._key(self._round, rank) for rank in range(self._ranks)]
        end = self._clock() + timeout
        found = []
        for position, key in enumerate(keys):
            try:
                self._store.wait([key], timedelta(seconds=max(0.01, end - self._clock())))
            except RuntimeError:  # torch.distributed.DistStoreError
                raise TimedOut(self._missing(keys) or [position], dead=False) from None
            found.append(int(self._store.get(key)))
        return found

    def _missing(self, keys: Sequence[str]) -> list[int]:
        with suppress(RuntimeError):  # the store is gone, with the process that had it
            return [rank for rank, key in enumerate(keys) if not self._store.check([key])]
        return []

    def _key(self, number: int, rank: int) -> str:
        return f"vote/{number}/{rank}"

    def close(self) -> None:
        """See `Mailbox.close`."""


def _alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:  # one that nobody has waited for yet is there, and does nothing any more
        with open(f"/proc/{pid}/stat", encoding="utf-8") as stat:
            return stat.read().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return True
