"""The garbage collector before captures: what waits for it holds memory that no graph can use meanwhile."""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable

__all__ = ["Garbage"]

_RARELY = 50
"""A collection looks at everything where the last one that did is so many times longer ago than it took."""

_YOUNG = 1
"""The generation up to which objects are looked at otherwise."""


class Garbage:
    """Collects what waits for the garbage collector, and what is old only now and then.

    Traces of Dynamo and what libraries import are half a million objects: to look at all of them takes longer than the
    capture of a step, and one after the other would take most of a second for each shape of batches.

    Args:
        collect, clock: for tests.
    """

    def __init__(
        self,
        collect: Callable[[int], object] = gc.collect,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._collect = collect
        self._clock = clock
        self._ended = -math.inf  # the last collection of everything
        self._took = 0.0

    def collect(self) -> None:
        """Collect before a capture."""
        started = self._clock()
        if started < self._ended + _RARELY * self._took:
            self._collect(_YOUNG)
            return
        self._collect(2)
        self._ended = self._clock()
        self._took = self._ended - started

    def expect(self) -> None:
        """Something large was given up: the next collection looks at everything."""
        self._ended = -math.inf
