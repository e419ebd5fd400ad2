"""A process captures one graph at a time."""

from __future__ import annotations

import threading
from contextlib import AbstractContextManager
from types import TracebackType

from pygraph_train.boundary import rehearsal

_WAIT = 30.0
"""Seconds that a capture waits for a capture of another thread."""


class OneCapture:
    """Context for a capture. Those of other threads come one after another.

    Raises:
        RuntimeError: on entry; this thread captures already, or another one does for too long.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._thread: int | None = None
        self._rehearsal: AbstractContextManager[None] = rehearsal()

    @property
    def anywhere(self) -> bool:
        """Whether any thread captures."""
        return self._lock.locked()

    @property
    def here(self) -> bool:
        """Whether this thread captures."""
        return self._thread == threading.get_ident()

    def __enter__(self) -> None:
        if self.here or not self._lock.acquire(timeout=_WAIT):
            raise RuntimeError("another capture is under way: a process captures one graph at a time")
        self._thread = threading.get_ident()
        self._rehearsal = rehearsal()
        self._rehearsal.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._rehearsal.__exit__(None, None, None)
        self._thread = None
        self._lock.release()
