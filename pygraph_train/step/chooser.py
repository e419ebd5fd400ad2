"""Decides whether graphs of forward and backward are worth their while: before any is made, and when they replay."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

from pygraph_train.config import PyGraphConfig
from pygraph_train.graphs.engine import Engine
from pygraph_train.problems import Problem

__all__ = ["Chooser", "chooser_for"]

_PLAIN = 3
"""The first steps, which run as they are. They are timed, but for the first one, in which caches fill."""

_REPLAYS, _TIMED = 20, 4
"""Replayed steps before some are timed, and how many."""

_HOST_WAITS = 0.6
"""Of a step's time, what the host needs at least where the device waits for it."""

_COST, _COST_OF_MODULE, _SAVED, _MARGIN = 1.0, 0.016, 0.75, 1.1
"""Seconds that graphs cost: Dynamo's trace, recordings and comparisons took 1 second and 10 to 17 ms for each module of
six models (benchmarks.phases and benchmarks.recipes, H200). Which share of the host's time in a plain step they saved:
0.58 to 0.82. How often they have to pay.
"""


def _nobody(with_graphs: float, without: float) -> None:
    pass


class Chooser:
    """Looks at the ends of steps, one after the other.

    Args:
        engine: where graphs are made.
        timed: called with the seconds of a step with graphs, and of one without.
        left: how many further steps there will be, infinity where nobody knows.
        modules: how many there are in what is trained.

    Attributes:
        plain: whether the next step has to run without graphs.
    """

    def __init__(
        self,
        engine: Engine,
        timed: Callable[[float, float], None] = _nobody,
        left: Callable[[], float] = lambda: math.inf,
        modules: Callable[[], int] = lambda: 0,
    ) -> None:
        self.plain = True
        self._engine, self._timed, self._left, self._modules = engine, timed, left, modules
        self._steps = self._replays = 0
        self._began: float | None = None
        # least seconds: of the host in a plain step, of a plain step, of one with graphs
        self._host = self._without = self._with = math.inf

    def step_ended(self, replayed: bool) -> Problem | None:
        """A step has ended. Returns why no further one is to have graphs, None while they may. Hot path."""
        if self.plain:
            self._steps += 1
            host, whole = self._interval()
            self._host, self._without = min(self._host, host), min(self._without, whole)
            self.plain = self._steps < _PLAIN
            return None if self.plain else self._why_none()
        if not replayed:
            self._began = None
        elif self._replays < _REPLAYS + _TIMED:
            self._replays += 1
            if self._replays >= _REPLAYS:
                self._with = min(self._with, self._interval()[1])
            if self._replays == _REPLAYS + _TIMED:
                return self._why_no_more()
        return None

    def _interval(self) -> tuple[float, float]:
        """Seconds since the last step ended: until the host was done with this one, and until the device was."""
        host = time.perf_counter()
        self._engine.synchronize()
        now, began = time.perf_counter(), self._began
        self._began = now
        return (math.inf, math.inf) if began is None else (host - began, now - began)

    def _why_none(self) -> Problem | None:
        if self._host < _HOST_WAITS * self._without:
            ms = f"the host needs {self._host * 1e3:.1f} ms of a step of {self._without * 1e3:.1f} ms"
            return Problem(
                f"the device does not wait for the host, so graphs would save little: {ms}", fix=_ON
            )
        cost, left = _COST + _COST_OF_MODULE * self._modules(), self._left()
        fewest = math.ceil(_MARGIN * cost / (_SAVED * self._host))
        if left >= fewest:
            return None
        return Problem(f"{left:.0f} steps are left, and graphs pay after some {fewest} steps", fix=_ON)

    def _why_no_more(self) -> Problem | None:
        if self._with < math.inf:
            self._timed(self._with, self._without)
        if self._without >= 0.98 * self._with:
            return None
        ms = f"{self._without * 1e3:.2f} instead of {self._with * 1e3:.2f} ms"
        return Problem(f"steps are faster without graphs: {ms}")


_ON = 'forward="on" makes graphs all the same'


def chooser_for(
    config: PyGraphConfig,
    engine: Engine,
    timed: Callable[[float, float], None],
    left: Callable[[], float],
    modules: Callable[[], int],
) -> Chooser | None:
    """None where graphs are made in any case: times of the emulated engine say nothing."""
    asked = config.forward == "on" or config.on_failure == "raise"
    return None if asked or engine.name != "cuda" else Chooser(engine, timed, left, modules)
