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
FEW = 2  # of shapes that take turns
MOST_TRIALS = 4  # sets of shapes that get a graph before it is known whether it pays
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
    """Measurements of one region: of the same shapes with a graph and without.

    Args:
        active: False measures nothing.
        synchronize: waits for the device.
        clock: seconds; for tests.

    Attributes:
        changing: whether the region has run with several sets of shapes.
    """

    samples = SAMPLES

    def __init__(
        self, active: bool, synchronize: Callable[[], None], clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self.active = active
        self.changing = False
        self.clock = clock
        self._synchronize = synchronize
        self._timed = 0
        self.forget()

    def forget(self) -> None:
        """Begin anew: the shapes that were measured do not come back."""
        self._costs: dict[Way, list[Cost]] = {"plain": [], "graph": [], "indirect": []}
        self._candidates: dict[Hashable, list[Cost]] = {}  # runs without a graph, of shapes that have none
        self._trials: dict[Hashable, dict[Way, list[Cost]]] = {}  # by shapes that have a graph
        self._skipped: set[tuple[Way, Hashable]] = set()

    @property
    def looking(self) -> bool:
        """Whether further shapes may get a graph to measure it."""
        return self.active and len(self._trials) < (MOST_TRIALS if self.changing else 1)

    @property
    def adopted(self) -> bool:
        """Whether some shapes have a graph to measure it."""
        return bool(self._trials)

    def open(self, way: Way, shapes: Hashable = ()) -> bool:
        """Whether a run in this way is to be measured."""
        own = self._trials.get(shapes)
        return self.active and own is not None and len(own[way]) < self.samples and self.cost(way) is None

    def wants(self, shapes: Hashable, runs: int) -> bool:
        """Whether a run without a graph is to be measured.

        Args:
            shapes: of this run.
            runs: made on these shapes, this one included.
        """
        if runs < 2 or not self.looking or self.has(shapes):
            return False
        return self._timed < MOST_TIMED or runs > MOST_TIMED

    def has(self, shapes: Hashable) -> bool:
        """Whether these shapes were measured often enough without a graph."""
        return shapes in self._trials or len(self._candidates.get(shapes, ())) >= self._least

    @property
    def _least(self) -> int:
        return FEW if self.changing else self.samples

    @property
    def warm_runs(self) -> int:
        """Runs of some shapes that it takes to measure them without a graph."""
        return self._least + 1 if self.active else 0

    def time_plain(self, shapes: Hashable, run: Callable[[], T]) -> T:
        """As `time`, for a run without a graph of shapes that have none yet."""
        self._timed += 1
        result, cost = self._measure(run)
        self._candidates.setdefault(shapes, []).append(cost)
        return result

    def adopt(self, shapes: Hashable) -> None:
        """These shapes get a graph: what it gains is measured on them."""
        if self.active and shapes not in self._trials:
            plain = self._candidates.pop(shapes, [])
            self._trials[shapes] = {"plain": plain, "graph": [], "indirect": []}
            self._costs["plain"] += plain

    def typical(self) -> float | None:
        """Seconds of a run without a graph, of whatever shapes were measured."""
        found = [self._costs["plain"], *self._candidates.values()]
        return min((cost.total for costs in found for cost in costs), default=None)

    def time(self, way: Way, run: Callable[[], T], shapes: Hashable = ()) -> T:
        """Run once with nothing else on the device. The first replay after a capture is not counted."""
        self.adopt(shapes)
        result, cost = self._measure(run)
        if way == "plain" or (way, shapes) in self._skipped:
            self._trials[shapes][way].append(cost)
            self._costs[way].append(cost)
        else:
            self._skipped.add((way, shapes))
        return result

    def _measure(self, run: Callable[[], T]) -> tuple[T, Cost]:
        self._synchronize()
        start = self.clock()
        result = run()
        returned = self.clock()
        self._synchronize()
        return result, Cost(self.clock() - start, returned - start)

    def cost(self, way: Way) -> Cost | None:
        """The fastest run, once there are enough samples: whatever disturbs a run makes it slower.

        Of several sets of shapes it is the mean, over those that were measured in every way that is compared.
        """
        if len(self._costs[way]) < (self._least if way == "plain" else self.samples):
            return None
        ways = [other for other, costs in self._costs.items() if costs]
        trials = [own[way] for own in self._trials.values() if all(own[other] for other in ways)]
        if sum(map(len, trials)) < (self._least if way == "plain" else self.samples):
            return None
        totals = [min(cost.total for cost in costs) for costs in trials]
        hosts = [min(cost.host for cost in costs) for costs in trials]
        return Cost(sum(totals) / len(trials), sum(hosts) / len(trials))

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
