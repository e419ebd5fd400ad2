"""What processes of one host agree on before each launch of a graph that holds collectives: all replay it, or none."""

from __future__ import annotations

import functools
import itertools
import mmap
import os
import tempfile
import time
import weakref
from collections import defaultdict
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch import Tensor, distributed

from pygraph_train.boundary import quietly
from pygraph_train.problems import Problem

JOIN_SECONDS, VOTE_SECONDS = 60.0, 300.0
"""How long a process waits until another one can vote, and for its votes: half as long as NCCL, which then
ends training. A process does not vote where Dynamo gave it no graph, while it gave others one.
"""

_SPINS = 2_000  # reads of a word, about a millisecond, before sleeps, which take 100 microseconds

PLAIN, RECORD, YES, NO, FAILED, _, REPLAY = range(7)
"""Choices. A replay is `REPLAY` (even) and twice the number of its recording, and one more where it is compared."""

_CHOICE, _STATE = 12, 24  # bits of a vote, which is a word of shared memory; its number is above them

_holding: weakref.WeakSet[Any] = weakref.WeakSet()  # loops whose graphs hold collectives
_instances: defaultdict[tuple[int, ...], itertools.count[int]] = defaultdict(itertools.count)  # by ranks

APART = Problem("another process runs it without a graph, or is on another host")
_SILENT = Problem("another process has not said in time whether it replays it")


class Apart(Exception):
    """Processes do not use a graph together. The argument is the problem."""


class Votes:
    """The votes of processes of these ranks, which make the same calls in the same order; this one `joins` or not."""

    def __init__(self, ranks: Sequence[int], *, joins: bool) -> None:
        # else a capture may wait for that of another process
        os.environ.setdefault("NCCL_GRAPH_REGISTER", "0")
        world: Any = distributed.group.WORLD
        self.ranks, self.why, self._number = tuple(sorted(ranks)), None if joins else APART, 0
        self._store, self._others = world.get_group_store(), list[memoryview]()
        key = f"pygraph_train/{self.ranks}/{next(_instances[self.ranks])}/"
        self._keys = {rank: f"{key}{rank}" for rank in self.ranks}
        self._key = self._keys.pop(distributed.get_rank())
        file, path = tempfile.mkstemp(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)
        self._forget = weakref.finalize(self, os.unlink, path)
        os.write(file, bytes(24))  # two votes by turns: nobody is ahead by more; and whether it has left
        os.close(file)
        self._words = _shared(path)
        self._store.set(self._key, path if joins else "")

    def ask(self, state: int, choice: int) -> set[int]:
        """What all processes choose, or `Apart`: one of them has another `state`, or has left. Hot path."""
        if not self._others and self.why is None:
            try:
                self._store.wait(keys := [*self._keys.values()], timedelta(seconds=JOIN_SECONDS))
                self._others = [_shared(self._store.get(key).decode()) for key in keys]
            except Exception:  # one of them has said nothing, or that it does not vote
                self.leave(APART)
        if self.why is None:
            self._number = (self._number + 1) & 0xFFFFFFF
            state = self._number << _STATE | state & ((1 << _STATE) - 1)
            self._words[self._number & 1] = vote = state << _CHOICE | choice
            votes = {vote, *[self._awaited(other, vote) for other in self._others]}
            if {vote >> _CHOICE for vote in votes} == {state}:
                self._forget()
                return {vote & ((1 << _CHOICE) - 1) for vote in votes}
            self.leave(APART)
        raise Apart(self.why)

    def leave(self, why: Problem) -> None:
        """Vote no more. Others see that, whether they wait for this one now or later."""
        if self.why is None:
            self.why, self._words[2] = why, 1
            self._forget()
            with suppress(Exception):  # training may have ended
                self._store.set(self._key, "")

    def _awaited(self, other: memoryview, vote: int) -> int:
        """The present vote of another process; zero where it has left, or is silent. Hot path."""
        cell = self._number & 1
        for _ in range(_SPINS):
            if (word := other[cell]) == vote:
                return word
            os.sched_yield()
        until = time.perf_counter() + VOTE_SECONDS
        while (word := other[cell]) >> _CHOICE + _STATE != self._number:
            if other[2]:
                return other[cell]  # which it may have written in between
            if time.perf_counter() > until:
                self._words[cell] ^= 1 << _CHOICE  # no vote, for those that still wait
                self.leave(_SILENT)
                return 0
            time.sleep(1e-5)
        return word


def released_first(loop: Any) -> None:
    """Have `destroy_process_group` release the graphs of a loop: NCCL waits for those that hold its collectives."""
    _holding.add(loop)
    stock = distributed.destroy_process_group

    @functools.wraps(stock)
    def destroy(*given: Any, **named: Any) -> None:
        quietly(*[held.release for held in list(_holding)])
        stock(*given, **named)

    if not hasattr(stock, "__wrapped__"):
        distributed.destroy_process_group = destroy


def _shared(path: str) -> memoryview:
    with open(path, "r+b") as file:
        return memoryview(mmap.mmap(file.fileno(), 24)).cast("Q")


def ranks_of(tensors: Sequence[Tensor]) -> set[int]:
    """The processes that compute with other parts of DTensors."""
    meshes = (getattr(t, "device_mesh", None) for t in tensors)
    return {int(rank) for mesh in meshes if mesh is not None for rank in mesh.mesh.flatten().tolist()}
