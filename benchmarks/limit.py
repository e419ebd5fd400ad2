"""A time limit for one row of a benchmark."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from typing import Any

__all__ = ["StepTimeout", "time_limit"]


class StepTimeout(BaseException):
    """The row ran past --timeout-s. Not an Exception, so that no fallback mistakes it for a failure."""


@contextlib.contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    """Raise StepTimeout in the main thread after `seconds`; 0 means no limit."""

    def expire(*_: Any) -> None:
        raise StepTimeout

    if not seconds:
        yield
        return
    previous = signal.signal(signal.SIGALRM, expire)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, previous)
