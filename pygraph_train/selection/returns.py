"""When a shape of batches has earned a graph: the rule of whoever rents skis for an unknown number of days.

A capture costs as much as some steps without a graph lose. Who captures a shape when it has lost as much as the capture
costs never pays more than twice what would have been best, however often the shape comes back. Nothing here looks at
a clock.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

__all__ = ["Costs", "Returns", "is_sampled"]


@dataclass
class Costs:
    """What is known of the steps and the captures of one family of shapes. Seconds, None where nothing was measured.

    Attributes:
        plain: a step without a graph.
        replay: a step from a graph.
        capture: another capture, with all that belongs to it.
        compared: what the comparison of a first replay adds.
    """

    plain: float | None = None
    replay: float | None = None
    capture: float | None = None
    compared: float | None = None

    def steps(self, unmeasured: int, *, compared: bool) -> float:
        """After how many steps without a graph a capture has been paid for; infinity where replays gain nothing.

        Args:
            unmeasured: the answer as long as something is not measured.
            compared: whether the first replay is compared with a step without a graph.
        """
        if self.plain is None or self.replay is None or self.capture is None:
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
