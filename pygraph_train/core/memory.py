"""Memory that recordings share."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

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
