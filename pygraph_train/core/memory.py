"""Memory that recordings share."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor

from pygraph_train.graphs.engine import Engine


class Memory:
    """Memory of recordings. One of them may be pending at a time: its forward has run, and its backward may come.

    Many shapes of a batch need no more memory than the largest one. While no recording is pending, an update may be
    recorded there, and plain runs that a replay is compared with may compute there. It belongs to one engine.
    """

    def __init__(self) -> None:
        self.pool: Any = None
        self._token: weakref.ref[Any] | None = None

    @property
    def free(self) -> bool:
        """Whether no recording is pending. Hot path."""
        return self._token is None or self._token() is None

    @property
    def replayed(self) -> bool:
        """Whether a recording there was replayed."""
        return self._token is not None

    def hold(self, token: Any) -> None:
        """A recording is pending while this token lives. Hot path."""
        self._token = weakref.ref(token)

    @contextmanager
    def recording(self, engine: Engine) -> Iterator[None]:
        """Around captures. One that fails may spoil the pool, so that later ones get another."""
        pool, self.pool = self.pool, None
        with engine.scratch_pool(pool) as used:
            yield
        self.pool = used

    def used(self, engine: Engine) -> AbstractContextManager[None]:
        """Around work without a graph that leaves no tensors of its own behind. Recordings will use this memory."""
        if self.pool is None:
            with engine.scratch_pool() as self.pool:
                pass
        return engine.allocating_in(self.pool)


class Row(Memory):
    """Memory of recordings of which many are pending at once: parts of a model, one behind the other.

    Each of them has a `Place`, and what its backward reads is its own; all else of it others overwrite.

    Attributes:
        places: how many there were so far.
        pending: numbers of places in the order of their forwards, each with what lives while it is pending.
    """

    def __init__(self) -> None:
        super().__init__()
        self.places = 0
        self.pending: list[tuple[int, weakref.ref[Any]]] = []

    @property
    def last(self) -> int:
        """The last place whose recording is pending; 0 where none is. Hot path."""
        pending = self.pending
        while pending and pending[-1][1]() is None:
            pending.pop()
        return pending[-1][0] if pending else 0


class Place(Memory):
    """Memory of one recording of a `Row`.

    Replays may overwrite what recordings that were made later keep for their backward. So forwards are replayed in the
    order in which they were recorded, and backwards in the opposite one.
    """

    def __init__(self, row: Row) -> None:
        row.places += 1
        self._row, self._number = row, row.places
        self._token = None  # and the pool stays that of the row

    @property
    def pool(self) -> Any:
        """That of the row."""
        return self._row.pool

    @pool.setter
    def pool(self, pool: Any) -> None:
        self._row.pool = pool

    @property
    def free(self) -> bool:
        """Whether neither it nor a later one is pending. Hot path."""
        return self._row.last < self._number

    @property
    def covered(self) -> bool:
        """Whether a later one is pending, so that a replay would overwrite what that one keeps. Hot path."""
        return self._row.last > self._number

    @property
    def misplaced(self) -> bool:
        """Whether it is in the way of nobody and yet may not be replayed: the order is not that of the recordings."""
        return super().free and self.covered

    def hold(self, token: Any) -> None:
        """It is pending while this token lives. Hot path."""
        super().hold(token)
        self._row.pending.append((self._number, weakref.ref(token)))


class Lent:
    """Memory for parameters that are gathered for each call of their module, and for their gradients.

    They lie elsewhere each time, so replays copy them. Recordings of parts that look the same copy them to the same
    places, and their backwards compute in the same memory: what they leave is taken before another one runs.

    Args:
        engine: of the recordings.

    Attributes:
        forwards, backwards: memory of the recordings.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._places: dict[Any, Tensor] = {}
        self.forwards, self.backwards = Row(), Memory()

    def place(self, position: int, like: Tensor, *, gradient: bool = False) -> Tensor:
        """Memory for the parameter at this position of a part, or for its gradient."""
        key = position, gradient, like.shape, like.stride(), like.dtype
        if key not in self._places:
            with self._engine.lasting_memory():
                self._places[key] = torch.empty_like(like, requires_grad=False)
        return self._places[key].detach()


_memories: weakref.WeakKeyDictionary[Engine, list[Memory]] = weakref.WeakKeyDictionary()


def free_memory(engine: Engine) -> Memory:
    """Memory of an engine in which no recording is pending."""
    known = _memories.setdefault(engine, [])
    found = next((memory for memory in known if memory.free), None)
    if found is None:
        known.append(found := Memory())
    return found


def first_memory(engine: Engine) -> Memory | None:
    """Memory of which no graph uses anything, for the first region; `free_memory` gives it from now on.

    None where there are recordings of regions.
    """
    known = _memories.setdefault(engine, [])
    if any(memory.replayed for memory in known):
        return None
    known.insert(0, made := Memory())
    return made


def idle_memory(engine: Engine) -> Memory | None:
    """As `free_memory`, but memory that graphs use; None where all of it is pending."""
    return next((m for m in _memories.get(engine, ()) if m.free and m.pool is not None), None)


def forget_memory(engine: Engine) -> None:
    """Graphs of an engine were closed: what no other graph uses goes back to the device."""
    for memory in _memories.get(engine, ()):
        memory.pool = None
