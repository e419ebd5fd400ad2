"""Threads of one process take turns in their steps.

A trace, a capture and a comparison change what all threads see: random states, anomaly detection, Dynamo, the garbage
collector.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any, TypeVar, cast

from pygraph_train.problems import Problem

__all__ = ["OTHER_THREAD", "has_turn", "in_turn"]

F = TypeVar("F", bound=Callable[..., Any])

OTHER_THREAD = Problem(
    "another thread of this process was in its training step for too long",
    fix="Start a process for each training",
)

_turn = threading.RLock()
_latest = 0  # the thread that had the turn last, or has it


class _Mine(threading.local):
    """Of this thread.

    Attributes:
        patience: seconds to wait for the turn. A step of another thread may wait for this one, so a thread that has
            waited for nothing does not wait again.
    """

    patience = 30.0


_mine = _Mine()


def has_turn() -> bool:
    """Whether the present call of this thread has its turn: another thread has had one since, if not. Hot path."""
    return _latest == threading.get_ident()


def in_turn(call: F) -> F:
    """Make calls, which have no keywords, in turn. Hot path.

    A call that gets no turn in time is made all the same, and `has_turn` says so.
    """

    @functools.wraps(call)
    def called(*args: Any) -> Any:
        global _latest
        if not _turn.acquire(False) and not _waited():
            return call(*args)
        _latest = threading.get_ident()
        try:
            return call(*args)
        finally:
            _turn.release()

    return cast(F, called)


def _waited() -> bool:
    """Whether the turn came in time."""
    if _mine.patience and _turn.acquire(timeout=_mine.patience):
        return True
    _mine.patience = 0.0
    return False
