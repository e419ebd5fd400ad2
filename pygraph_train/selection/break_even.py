"""When the graph of one more set of shapes is worth its capture: the rule of whoever rents skis.

A graph for some shapes costs its capture once, and saves the same time in each run. Nobody knows how often the
shapes will come back. Whoever waits until the runs without a graph have cost as much as the capture never spends
more than twice what the best choice would have cost. Pure logic: it looks at no clock.
"""

from __future__ import annotations

import math
from collections.abc import Hashable

__all__ = ["BreakEven", "Sightings"]

_FREE = 8
"""Captures that need no runs to pay for them: the first ones, by which the price becomes known."""

_FIRST = 4
"""So many times cheaper a further capture is taken to be than the first one, until there was one."""

_DEARER = 4
"""So many times dearer is each further graph for shapes whose graph had to go."""


class BreakEven:
    """What a capture costs and what a replay saves, of a forward and its backward together.

    Args:
        declared: the price of a capture in runs, where nothing is measured; None measures.

    Attributes:
        runs: a set of shapes has to come so often before it gets a graph; infinite where no graph saves anything.
        known: whether that was measured, or declared.
    """

    def __init__(self, declared: int | None = None) -> None:
        self.runs: float = 0.0 if declared is None else float(declared)
        self.known = declared is not None
        self._measures = declared is None
        self._prices: dict[str, float] = {}
        self._made: dict[str, int] = {}
        self._saved: float | None = None

    def captured(self, part: str, seconds: float) -> None:
        """Note what a capture took.

        The first one makes what later ones find: memory in the pool, workspaces, whatever is loaded when it is used.

        Args:
            part: "forward", "backward" or "inference": a set of shapes needs one of each.
            seconds: of this capture.
        """
        made = self._made[part] = self._made.get(part, 0) + 1
        if made == 1:
            self._prices[part] = seconds / _FIRST
        else:
            self._prices[part] = seconds if made == 2 else (self._prices[part] + seconds) / 2
        self._compare()

    def dropped(self, part: str) -> None:
        """This part has no graph: nobody pays for it."""
        if self._measures:
            self._prices.pop(part, None)
            self._made.pop(part, None)

    def saves(self, seconds: float) -> None:
        """Note how much shorter a run of all parts is with graphs."""
        self._saved = seconds
        self._compare()

    @property
    def price(self) -> float:
        """Seconds of a capture of all parts, as far as known."""
        return sum(self._prices.values())

    def forget(self) -> None:
        """What was measured belongs to shapes that did not come back."""
        if self._measures:
            self._saved, self.known, self.runs = None, False, 0.0

    def pays(self, runs: int, lost: int) -> bool:
        """Whether shapes get a graph now.

        Args:
            runs: how often they came, this run included, since they came first or lost their last graph.
            lost: how many graphs they lost.
        """
        return runs > self.runs * _DEARER**lost

    def within(self, captures: int, runs: int) -> bool:
        """Whether one more capture is no waste, whatever it is for: all runs together have paid for all captures.

        Args:
            captures: made so far.
            runs: made so far, of all shapes, with graphs and without.
        """
        return captures < _FREE or (captures - _FREE) * max(self.runs, 1.0) <= runs

    def _compare(self) -> None:
        if not self._measures or self._saved is None or not self._prices:
            return
        self.known = True
        self.runs = self.price / self._saved if self._saved > 0 else math.inf


class Sightings:
    """How often sets of shapes were seen. Those that never return make room for others.

    Args:
        most: sets of shapes that are remembered.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._counts: dict[Hashable, int] = {}

    def __len__(self) -> int:
        return len(self._counts)

    def see(self, shapes: Hashable) -> int:
        """Count one more time; returns how often it was."""
        counts = self._counts
        count = counts.get(shapes, 0) + 1
        if count == 1 and len(counts) >= self._most:
            self._make_room()
            counts = self._counts
        counts[shapes] = count
        return count

    def forget(self, shapes: Hashable) -> None:
        """These are counted elsewhere from now on."""
        self._counts.pop(shapes, None)

    def values(self) -> list[Hashable]:
        """The sets that are remembered."""
        return list(self._counts)

    def _make_room(self) -> None:
        """Half of what each was seen is forgotten, and those with nothing left are gone, at least a half of all."""
        left = {shapes: count // 2 for shapes, count in self._counts.copy().items() if count > 1}
        while len(left) > self._most // 2:
            floor = sorted(left.values())[len(left) // 2]
            left = {shapes: count - floor for shapes, count in left.items() if count > floor}
        self._counts = left
