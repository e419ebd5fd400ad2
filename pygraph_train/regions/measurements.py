"""Does a graph pay for this region? Measured on its real runs (selective CUDA graphs, as in GraCE)."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

__all__ = ["Cost", "Measurements", "Way", "choose"]

T = TypeVar("T")

Way = Literal["plain", "graph", "indirect"]

SAMPLES = 4
MOST_TIMED = 64  # runs that are timed before it is known which shapes come back
TOLERANCE = 1.01  # a graph may take this much longer: noise
GAIN = 0.02  # least share of the run that a graph must save on the device or on the host


@dataclass(frozen=True)
class Cost:
    """Seconds of one run: until the device was done, and until the call returned."""

    total: float
    host: float

    @property
    def device(self) -> float:
        """What the device still worked on when the call had returned: a graph is launched at its end."""
        return self.total - self.host

    def __add__(self, other: Cost) -> Cost:
        return Cost(self.total + other.total, self.host + other.host)


class Measurements:
    """Measurements of one region, of its runs on the same shapes.

    Args:
        active: False measures nothing.
        synchronize: waits for the device.
        clock: seconds; for tests.
    """

    samples = SAMPLES

    def __init__(
        self, active: bool, synchronize: Callable[[], None], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.active = active
        self._synchronize = synchronize
        self.clock = clock
        self._plain: dict[Hashable, list[Cost]] = {}  # by shapes, until one of these is captured
        self._timed = 0
        self.forget()

    def forget(self) -> None:
        """Begin anew: the shapes that were measured do not come back."""
        self._costs: dict[Way, list[Cost]] = {"plain": [], "graph": [], "indirect": []}
        self._skipped: set[Way] = {"plain"}  # the region drops its first plain run itself
        self.adopted = False
        self._of: Hashable = None
        self._plain.clear()

    def open(self, way: Way) -> bool:
        """Whether a run in this way is to be measured."""
        return self.active and len(self._costs[way]) < self.samples

    def wants(self, shapes: Hashable, runs: int) -> bool:
        """Whether a run without a graph is to be measured.

        Args:
            shapes: of this run.
            runs: made on these shapes, this one included.
        """
        if self.adopted or not self.active or runs < 2:
            return False
        return not self.has(shapes) and (self._timed < MOST_TIMED or runs > MOST_TIMED)

    def has(self, shapes: Hashable) -> bool:
        """Whether these shapes were measured often enough without a graph, and are those in question."""
        if self.adopted:
            return shapes == self._of
        return len(self._plain.get(shapes, ())) >= self.samples

    def time_plain(self, shapes: Hashable, run: Callable[[], T]) -> T:
        """As `time`, for a run without a graph while several shapes are in question."""
        own = self._costs["plain"]
        self._costs["plain"] = self._plain.setdefault(shapes, [])
        self._timed += 1
        try:
            return self.time("plain", run)
        finally:
            self._costs["plain"] = own

    def adopt(self, shapes: Hashable) -> None:
        """These shapes are captured: what a graph gains is measured on them."""
        if not self.adopted:
            self.adopted, self._of = True, shapes
            self._costs["plain"] = self._plain.get(shapes, [])
            self._plain.clear()

    def typical(self) -> float | None:
        """Seconds of a run without a graph, of whatever shapes were measured."""
        costs = [cost.total for costs in (self._costs["plain"], *self._plain.values()) for cost in costs]
        return min(costs, default=None)

    def time(self, way: Way, run: Callable[[], T]) -> T:
        """Run once with nothing else on the device. The first replay after a capture is not counted."""
        self._synchronize()
        start = self.clock()
        result = run()
        returned = self.clock()
        self._synchronize()
        done = self.clock()
        if way in self._skipped:
            self._costs[way].append(Cost(done - start, returned - start))
        else:
            self._skipped.add(way)
        return result

    def cost(self, way: Way) -> Cost | None:
        """The fastest run, once there are enough samples: whatever disturbs a run makes it slower."""
        costs = self._costs[way]
        if len(costs) < self.samples:
            return None
        return Cost(min(c.total for c in costs), min(c.host for c in costs))

    def __getitem__(self, way: Way) -> Cost:
        cost = self.cost(way)
        assert cost is not None, f"{way} was not measured"
        return cost

    def to_dict(self) -> dict[str, Any]:
        """Costs in microseconds, by way, as far as they were measured."""
        return {
            way: {"total_us": round(cost.total * 1e6, 1), "host_us": round(cost.host * 1e6, 1)}
            for way in self._costs
            if (cost := self.cost(way)) is not None
        }


def choose(plain: Cost, graph: Cost, feeds: bool = False) -> tuple[bool, str]:
    """Whether to keep the graph, and why in words.

    A graph is kept when it is not slower and saves something worth the trouble. Time of the host counts
    like time of the device: in isolation both ways may take equally long, and the host may still be what
    the whole step waits for.

    Args:
        plain, graph: costs without and with a graph.
        feeds: another graph reads what this one writes, where it lies, and would have to copy it otherwise: not
            being slower is enough.
    """
    text = f"{graph.total * 1e6:.0f} µs with a graph, {plain.total * 1e6:.0f} µs without"
    if graph.total > plain.total * TOLERANCE:
        return False, f"slower as a graph: {text}"
    if (plain.total - graph.total) + (plain.host - graph.host) >= GAIN * plain.total:
        return True, text
    if feeds:
        return True, f"{text}, and another graph reads what it writes"
    return False, f"nothing to gain: {text}"
