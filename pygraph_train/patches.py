"""Attributes of somebody else's objects that are replaced for a while."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

_MISSING = object()


def nothing(*args: Any, **kwargs: Any) -> None:
    """In the place of a call that is left out."""


@contextmanager
def standing_in(calls: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Put `call` over `owner.name` for each (owner, name, call), and take it away again.

    The owner of a call is an object with a `__dict__`, or a class that defines that name itself.
    """
    undo: list[tuple[Any, str, Any]] = []
    try:
        for owner, name, call in calls:
            undo.append((owner, name, vars(owner).get(name, _MISSING)))
            if isinstance(owner, type):
                setattr(owner, name, call)
            else:  # a module's own __setattr__ is not asked
                vars(owner)[name] = call
        yield
    finally:
        for owner, name, before in reversed(undo):
            if isinstance(owner, type):
                setattr(owner, name, before)
            elif before is _MISSING:
                vars(owner).pop(name, None)
            else:
                vars(owner)[name] = before
