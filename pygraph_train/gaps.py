"""Gaps in graphs: work that no graph can hold, made anew between the replays of two parts of a graph.

Whoever captures says what happens with a gap. Whoever is captured leaves one, and knows nothing of graphs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["Work", "leave_gap", "left_to", "may_leave_gap"]

Work = Callable[[], None]
"""Reads and writes tensors at the addresses that they have in the capture. It is called in the stream of the replay."""


class _Capture(threading.local):
    """Of this thread: what ends a part of the graph that is being captured."""

    cut: Callable[[Work], None] | None = None


_capture = _Capture()


@contextmanager
def left_to(cut: Callable[[Work], None]) -> Iterator[None]:
    """Context of a capture in this thread.

    Args:
        cut: ends a part of the graph and begins the next one; replays call the work between the two.
    """
    before, _capture.cut = _capture.cut, cut
    try:
        yield
    finally:
        _capture.cut = before


def may_leave_gap() -> bool:
    """Whether this thread captures, and its graph may have gaps."""
    return _capture.cut is not None


def leave_gap(work: Work) -> None:
    """Let replays call `work` between what was captured so far and what comes next. It is not called now.

    Raises:
        RuntimeError: this thread captures nothing, or a graph without gaps.
    """
    if _capture.cut is None:
        raise RuntimeError("this capture takes no work between parts of its graph")
    _capture.cut(work)
