"""Regions of eager kernels may need no more memory than the step has without them.

Their graphs have memory of their own, beside what the allocator keeps for steps without graphs. So each capture is
bounded, steps without regions find the graphs closed where both would not fit, and what needs more all the same is
given up.
"""

from __future__ import annotations

from collections.abc import Sequence

from pygraph_train.graphs.engine import Engine
from pygraph_train.report.backend_report import RegionRecord

__all__ = ["LIMIT", "SMALL", "RegionMemory"]

LIMIT = 1.05
"""Of the peak of all steps without regions."""

SMALL = 128 << 20
"""Bytes on top of that peak which no process misses: cuBLAS has 32 MiB for each stream, and the allocator segments of
20 MiB in each pool."""

_AGAIN = 2
"""Further steps in which memory is given back that gradients were still in."""

_RESTS = 3
"""So often graphs are closed that nobody needs for long: other kinds of steps may need them after all."""


class RegionMemory:
    """Keeps them within it.

    Args:
        engine: tells how much is reserved.
        records: of the regions. The list grows.

    Attributes:
        most: bytes that may be reserved, None before `begin`.
        closed: graphs that were closed last.
        price: seconds that it took to capture these.
    """

    def __init__(self, engine: Engine, records: Sequence[RegionRecord]) -> None:
        self._engine = engine
        self._records = records
        self._plain = 0  # bytes at the peak of steps without regions
        self.most: int | None = None
        self._captures = self._fits = 0  # made when the graphs were closed, and when both had room
        self._again = self._strikes = self._rests = 0
        self.closed, self.price = 0, 0.0
        self._was_short = False

    def begin(self) -> None:
        """Regions will be made: note what steps without them have reserved. Only the first call counts."""
        if self.most is None:
            self._plain = self._engine.memory().peak
            self.most = max(int(LIMIT * self._plain), self._plain + SMALL)

    def why_not(self) -> str | None:
        """After a step with regions: why they are to be given up. None while they keep within the bound."""
        if self.most is None or (before := self._engine.memory().reserved) <= self.most:
            return None
        self._engine.trim()
        self._strikes += 1
        if self._strikes == 1 and self._engine.memory().reserved <= self.most:
            return None  # something else had taken the memory
        return f"{before >> 20} MiB were reserved with them, and {self._plain >> 20} without"

    def give_up(self, why: str) -> None:
        """Close the graphs for good."""
        self._close(why)

    def make_way(self, *, for_long: bool) -> None:
        """Before a step without regions, when its gradients are gone: close the graphs where both need too much.

        Further calls give back memory that gradients were still in.

        Args:
            for_long: no step with regions is to come.
        """
        captures = sum(r.captures for r in self._records)
        if captures == self._captures:
            if self._again:
                self._again -= 1
                self._close_graphs(self._records, None)
            return
        if for_long and self._rests < _RESTS:
            self._rests += 1
            self._close(None)
        elif captures != self._fits:
            if self.is_short():
                self._was_short = True
                return self._close(None)
            self._fits = captures

    def make_way_beside(self, records: Sequence[RegionRecord]) -> None:
        """Before a part runs with eager kernels: close its graphs if that needs too much beside them.

        Args:
            records: of the part's regions. They are captured again at once.
        """
        if self.is_short():
            self._close_graphs(records, None)

    def is_short(self) -> bool:
        """Whether a step without regions needs too much beside their graphs."""
        memory = self._engine.memory()
        needed = max(0, self._plain - (memory.reserved - memory.idle))
        return self.most is not None and memory.reserved + needed > self.most

    def is_or_was_short(self) -> bool:
        """The same, now or at any time before: what was found once holds for all later comparisons."""
        self._was_short = self._was_short or self.is_short()
        return self._was_short

    def paid(self) -> float:
        """Seconds that it took to capture the graphs that are open."""
        return sum(self._seconds_to_capture())

    def _close(self, why: str | None) -> None:
        self._captures, self._again = sum(r.captures for r in self._records), _AGAIN
        if seconds := self._seconds_to_capture():
            self.closed, self.price = len(seconds), sum(seconds)
        self._close_graphs(self._records, why)

    def _seconds_to_capture(self) -> list[float]:
        from pygraph_train.regions.inductor import seconds_to_capture

        return seconds_to_capture(self._records)

    @staticmethod
    def _close_graphs(records: Sequence[RegionRecord], why: str | None) -> None:
        from pygraph_train.regions.inductor import close_graphs  # which imports much

        close_graphs(records, why)
