"""When a shape of batches has earned a graph: the rule of whoever rents skis for an unknown number of days.

A capture costs as much as some steps without a graph lose. Who captures a shape when it has lost as much as the capture
costs never pays more than twice what would have been best, however often the shape comes back. Nothing here looks at
a clock.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["Costs", "Returns", "is_sampled"]


_ENOUGH = 2
"""Captures that have to be measured before their cost decides."""


@dataclass
class Costs:
    """What is known of the steps and the captures of one family of shapes. Seconds, None where nothing was measured.

    Attributes:
        plain: a step without a graph.
        replay: a step from a graph.
        capture: another capture: the shortest one so far.
        compared: what the comparison of a first replay adds: the shortest one so far.
        captures: that were measured. The first ones set things up that all others use.
    """

    plain: float | None = None
    replay: float | None = None
    capture: float | None = None
    compared: float | None = None
    captures: int = 0

    def captured(self, seconds: float) -> None:
        """A capture took so long."""
        self.captures += 1
        self.capture = seconds if self.capture is None else min(seconds, self.capture)

    def compares(self, seconds: float) -> None:
        """The comparison of a first replay took so long."""
        self.compared = seconds if self.compared is None else min(seconds, self.compared)

    def replayed(self, seconds: float) -> None:
        """A step from a graph took so long."""
        self.replay = seconds if self.replay is None else min(seconds, self.replay)

    def steps(self, unmeasured: int, *, compared: bool) -> float:
        """After how many steps without a graph a capture has been paid for; infinity where replays gain nothing.

        Args:
            unmeasured: the answer as long as something is not measured.
            compared: whether the first replay is compared with a step without a graph.
        """
        if self.plain is None or self.replay is None or self.capture is None or self.captures < _ENOUGH:
            return unmeasured
        gain = self.plain - self.replay
        price = self.capture + ((self.compared or 0.0) if compared else 0.0)
        return math.inf if gain <= 0 else max(1.0, price / gain)


@dataclass
class Returns:
    """How often one shape has come without a graph, since its last one was dropped.

    Attributes:
        steps: so often.
        price: how many times the price of a capture it has to pay: a dropped graph doubles it.
    """

    steps: int = 0
    price: int = 1

    def earned(self, steps: float) -> bool:
        """Whether it has paid for a capture.

        Args:
            steps: see `Costs.steps`.
        """
        return self.steps >= steps * self.price

    def dropped(self) -> None:
        """Its graph had to make room, or there was no room for one."""
        self.steps = 0
        self.price *= 2


def is_sampled(count: int) -> bool:
    """Whether the capture with this number, counted from 1, is compared: the 1st, 2nd, 4th, 8th and so on."""
    return count & (count - 1) == 0
