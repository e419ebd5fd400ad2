"""What was taken over from a loop is there for as long as somebody else holds it."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class Living(Generic[T]):
    """A list of objects that others hold, in the order in which they were added. What is gone is not in it."""

    def __init__(self) -> None:
        self._references: list[weakref.ref[T]] = []

    def add(self, one: T) -> None:
        """Add an object at the end. Somebody else has to hold it."""
        self._references.append(weakref.ref(one, self._references.remove))

    def clear(self) -> None:
        """Remove all objects."""
        self._references.clear()

    def __iter__(self) -> Iterator[T]:
        return iter([one for reference in self._references if (one := reference()) is not None])

    def __len__(self) -> int:
        return len(self._references)
