"""The garbage collector before captures: what waits for it holds memory that no graph can use meanwhile."""

from __future__ import annotations

import gc
import math
import time

_RARELY = 50
"""A collection looks at everything where the last one that did is so many times longer ago than it took."""

_FIRST = 20.0
"""Seconds from the first capture of a process until a collection looks at everything."""

_YOUNG = 1
"""The generation up to which objects are looked at otherwise: those of a trace are among them."""


class Garbage:
    """Collects what waits for the garbage collector, and what is old only now and then.

    Traces of Dynamo and what libraries import are half a million objects: to look at all of them takes longer than the
    capture of a step, and one after the other would take most of a second for each shape of batches.
    """

    def __init__(self) -> None:
        self._due: float | None = None  # when everything is looked at

    def collect(self) -> None:
        """Collect before a capture."""
        now = time.perf_counter()
        if self._due is None:
            self._due = now + _FIRST
        if now < self._due:
            gc.collect(_YOUNG)
            return
        gc.collect()
        ended = time.perf_counter()
        self._due = ended + _RARELY * (ended - now)

    def expect(self) -> None:
        """Something large was given up: the next collection looks at everything."""
        self._due = -math.inf
