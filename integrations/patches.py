"""Attributes of somebody else's objects that are replaced for a while."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["standing_in"]


@contextmanager
def standing_in(calls: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Put `call` over `owner.name` for each (owner, name, call), and take it away again."""
    undo: list[tuple[dict[str, Any], str, Any]] = []
    try:
        for owner, name, call in calls:
            attributes = vars(owner)
            undo.append((attributes, name, attributes.get(name)))
            attributes[name] = call
        yield
    finally:
        for attributes, name, before in reversed(undo):
            if before is None:
                attributes.pop(name, None)
            else:
                attributes[name] = before
