"""When a shape of batches has earned a graph: the rule of whoever rents skis for an unknown number of days.

A capture costs as much as some steps without a graph lose. Who captures a shape when it has lost as much as the capture
costs never pays more than twice what would have been best, however often the shape comes back. The same goes for the
trace that the shapes share. Nothing here looks at a clock.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

__all__ = ["Costs", "Returns", "TraceReturns", "is_sampled", "sampled_share"]


_ENOUGH = 3
"""Captures that have to be measured before their cost decides: the first ones set up what all others use."""

_SEEN = 2
"""Times that a shape has to come before they say how often it will come in the steps that are left."""


@dataclass
class Costs:
    """What is known of the steps and the captures of one family of shapes. Seconds; nothing where it was not measured.

    Attributes:
        plain: a step without a graph: with eager kernels, and with those of Inductor (True).
        replay: a step from a graph, in the same way.
        capture: another capture: the shortest one so far.
        compared: what the comparison of a first replay adds: the shortest one so far.
        captures: that were measured.
    """

    plain: dict[bool, float] = field(default_factory=dict)
    replay: dict[bool, float] = field(default_factory=dict)
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

    def ran(self, seconds: float, *, compiled: bool) -> None:
        """A step without a graph took so long."""
        self.plain[compiled] = min(seconds, self.plain.get(compiled, seconds))

    def replayed(self, seconds: float, *, compiled: bool) -> None:
        """A step from a graph took so long."""
        self.replay[compiled] = min(seconds, self.replay.get(compiled, seconds))

    def compiled_is_faster(self) -> bool:
        """Whether Inductor's kernels without a graph are faster than eager ones, as far as is known."""
        return True in self.plain and (False not in self.plain or self.plain[True] < self.plain[False])

    def saved_by_kernels(self, steps: int, replays: int) -> float | None:
        """What Inductor's kernels would have saved in so many steps without a graph and replays of eager kernels."""
        if not {True, False} <= self.plain.keys():
            return None
        saved = steps * (self.plain[False] - self.plain[True])
        if {True, False} <= self.replay.keys():
            return saved + replays * (self.replay[False] - self.replay[True])
        return saved + replays * (self.plain[False] - self.plain[True])

    def steps(self, unmeasured: int, *, compared: float, compiled: bool = False, code: bool = False) -> float:
        """After how many steps without a graph a capture has been paid for; infinity where replays gain nothing.

        Args:
            unmeasured: the answer as long as something is not measured.
            compared: the share of captures whose first replay is compared with a step without a graph.
            compiled: whether its graph has Inductor's kernels.
            code: whether steps of it without a graph may have them.
        """
        plain = [self.plain[kind] for kind in {False, code} if kind in self.plain]
        replay = self.replay.get(compiled)
        if not plain or replay is None or self.capture is None or self.captures < _ENOUGH:
            return unmeasured
        gain = min(plain) - replay
        price = self.capture + (self.compared or 0.0) * compared
        return math.inf if gain <= 0 else max(1.0, price / gain)


_STEPS_PER_TRACE = 150
"""A trace for many shapes takes as long as so many steps on the host: Dynamo goes through the same Python, much more
slowly. BERT of 6 layers on an H100: 130 to 200 steps, and half as many for one shape."""

_DYNAMIC = 2
"""So many times longer than a trace for one shape takes one for many of them."""

_SAVED = 1 / 2
"""The share of a step that waits for the host which a graph is taken to save."""

_CAPTURES = 2
"""So many times what the trace costs has to be saved: captures come on top of it."""


@dataclass
class TraceReturns:
    """Whether another trace of a family of shapes is worth its time. Seconds, None where nothing was measured.

    Attributes:
        step: a step without a graph, on the host: the shortest one so far.
        steps: made for shapes that no trace is for, since the last trace.
        trace: the longest trace so far, for one shape or for many.
    """

    step: float | None = None
    steps: int = 0
    trace: float | None = None

    def ran(self, seconds: float) -> None:
        """A step of a shape that no trace is for took so long."""
        self.steps += 1
        self.step = seconds if self.step is None else min(seconds, self.step)

    def traced(self, seconds: float, *, dynamic: bool) -> None:
        """A trace took so long, for one shape or for many (`dynamic`)."""
        price = seconds if dynamic else _DYNAMIC * seconds
        self.trace = price if self.trace is None else max(price, self.trace)
        self.steps = 0

    def pays(self, left: float | None) -> bool:
        """Whether a graph for each of the steps so far would have saved what the trace and captures cost.

        Args:
            left: how many steps training will still make, None where nobody knows. Those that are known decide alone.
        """
        if self.step is None:
            return True
        price = _STEPS_PER_TRACE * self.step if self.trace is None else self.trace
        return (self.steps if left is None else left) * _SAVED * self.step >= _CAPTURES * price


@dataclass
class Returns:
    """How often one shape has come, since its last graph was dropped for want of room.

    Attributes:
        steps: so often.
        price: how many times the price of a capture it has to pay: a dropped graph doubles it.
    """

    steps: int = 0
    price: int = 1

    def earned(self, steps: float, made: int = 0, left: float | None = None) -> bool:
        """Whether it pays for a capture.

        Args:
            steps: see `Costs.steps`.
            made: steps of the training so far.
            left: how many training will still make: the shape is expected to come as often in them as it has come in
                those so far. None where nobody knows: then it is expected to come once more as often as it has come.
        """
        if left is None or not made:
            return self.steps >= steps * self.price
        seen = self.steps >= min(steps, _SEEN) and math.isfinite(steps)
        return seen and self.steps / made * left >= steps * self.price

    def dropped(self) -> None:
        """Its graph had to make room, or there was no room for one."""
        self.steps = 0
        self.price *= 2


def is_sampled(count: int) -> bool:
    """Whether the capture with this number, counted from 1, is compared: the 1st, 2nd, 4th, 8th and so on."""
    return count & (count - 1) == 0


def sampled_share(count: int) -> float:
    """Of so many captures the share that is compared.

    Each shape pays for that share. If those paid whose turn it is, all shapes would wait for the one that has.
    """
    return count.bit_length() / max(count, 1)
