"""A process captures one graph at a time."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from pygraph_train.boundary import rehearsal

_WAIT = 30.0
"""Seconds that a capture waits for a capture of another thread."""


class OneCapture:
    """Makes contexts for captures. Those of several threads come one after another."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: int | None = None

    @property
    def anywhere(self) -> bool:
        """Whether any thread captures."""
        return self._lock.locked()

    @property
    def here(self) -> bool:
        """Whether this thread captures."""
        return self._thread == threading.get_ident()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Around a capture.

        Raises:
            RuntimeError: this thread captures already, or another one does for too long.
        """
        if self.here or not self._lock.acquire(timeout=_WAIT):
            raise RuntimeError("another capture is under way: a process captures one graph at a time")
        self._thread = threading.get_ident()
        try:
            with rehearsal():
                yield
        finally:
            self._thread = None
            self._lock.release()
