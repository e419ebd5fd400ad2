"""How much memory graphs of further shapes may take."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pygraph_train.graphs.engine import Engine, MemoryUse

__all__ = ["PoolRoom"]

GROWTH = 1 / 20
"""Share of all reserved memory that they may take on top of what steps without graphs have."""


class PoolRoom:
    """The memory of the graphs of one engine.

    Args:
        engine: makes the graphs.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._largest = 0  # bytes that a capture took
        self._cached = 0  # bytes that steps without graphs have kept at most
        # bytes that are reserved with graphs of one set of shapes for each region
        self._first: int | None = None

    @contextmanager
    def growing(self, further: bool) -> Iterator[None]:
        """Context for a capture: notes what memory it takes. What is cached stays where it is.

        Args:
            further: its region has graphs for other shapes.
        """
        before = self._engine.memory().reserved
        with self._engine.untidied():
            yield
        self._largest = max(self._largest, self._engine.memory().reserved - before)
        if not further:
            self._first = None

    def is_there(self, most: int | None) -> bool:
        """Whether a capture finds memory without what is cached elsewhere, where so much may be reserved."""
        memory = self._engine.memory()
        free = memory.free if most is None else min(memory.free, most - memory.reserved)
        return free >= 2 * self._largest

    def is_used_up(self) -> bool:
        """Whether graphs of further shapes have all the memory that they may have.

        They may have as much as steps without graphs keep cached beside graphs of one set of shapes, and a little more.
        What is cached is given back to the device where it is needed.
        """
        before = self._engine.memory()
        if self._first is not None and self._suffices(self._first, before):
            return False
        self._engine.trim()
        after = self._engine.memory()
        self._cached = max(self._cached, before.reserved - after.reserved)
        if self._first is None:
            self._first = after.reserved
        return not self._suffices(self._first, after)

    def _suffices(self, first: int, memory: MemoryUse) -> bool:
        most = first + self._cached + GROWTH * memory.peak
        return memory.reserved <= most and memory.free >= 2 * self._largest
