"""Decides whether graphs of forward and backward are worth their while: before any is made, and when they replay."""

from __future__ import annotations

import math
import time
from collections.abc import Callable

import torch
from torch import nn

from pygraph_train.config import PyGraphConfig
from pygraph_train.graphs.engine import Engine
from pygraph_train.patches import nothing
from pygraph_train.problems import Problem

_PLAIN = 8
"""The first steps, which run as they are. They are timed, but for the first one. The least counts: caches fill."""

_ALIKE, _TIMED = 20, 4
"""Steps that are alike, after those in which Dynamo traces, before some are timed, and how many."""

_HOST_WAITS = 0.6
"""Of a step's time, what the host needs at least where the device waits for it."""

_COST, _COST_OF_HOST, _RAGGED, _MARGIN = 0.6, 90, 2.0, 2.0
"""What graphs cost, before anything is known of it: seconds for each trace, and how many times the host's time in a
plain step, as Dynamo interprets the Python that the step runs (60 to 130 times in six of benchmarks.recipes on an H200,
where steps took the host 9 to 34 ms), less where a model is called again, whose trace serves; so much more where each
batch has another size. How often they have to pay where the number of steps is known.
"""

_OVER, _LONG, _SHARE = 1.5, 6.0, 0.05
"""No further function is traced once traces have taken so many times as long as graphs are expected to cost, or so many
seconds where that is less, and this share of what graphs save. Functions around graph breaks are traced one by one, and
some of them anew in each step.
"""

_SAVED, _OF_CALL, _OF_UPDATE = 0.75, 190, 60
"""What graphs save of the host's time in forward, backward and update: this share (0.58 to 0.82 of five of
benchmarks.recipes), less what replaying takes for each call with its backward and for each update: so many times what
the host needs to call an empty module (2.2 microseconds where a call took 420; others are half as fast). Data loading
and logs take as long as before.
"""

_UNKNOWN = 1000
"""So many steps are left at least where nobody knows, and at least as many as there were."""

_LITTLE = 0.05
"""Graphs that would save a smaller share of a step are not made."""

_QUIET = 8
"""Steps without a trace after which nothing is traced for a while; steps in a row that nothing traced fits, after which
Dynamo traces again.
"""


class Chooser:
    """Looks at the ends of steps, one after the other.

    Args:
        engine: where graphs are made.
        timed: called with the seconds of a step with graphs, and of one without, and of the latter those of the host in
            forward, backward and update.
        left: how many further steps there will be, infinity where nobody knows.
        empty: seconds of the host in a call of an empty module.

    Attributes:
        plain: whether the next step has to run without graphs.
        waits: whether this is so because graphs would pay too late.
        settled: whether Dynamo must not trace in the next step. A last batch with fewer rows costs as much to trace as
            hundreds of such steps, so rare steps run as they are written.
        ragged: whether each batch has another size; set by who sees them.
    """

    ragged = False

    def __init__(
        self,
        engine: Engine,
        timed: Callable[[float, float, float], None] = nothing,
        left: Callable[[], float] = lambda: math.inf,
        empty: float = 2e-6,
    ) -> None:
        self.plain, self.settled, self.waits = True, False, False
        self._engine, self._timed, self._left = engine, timed, left
        self._steps = self._alike = self._traces = 0
        self._quiet = self._missed = self._in_a_row = 0
        self._parts = math.inf  # the fewest in a step, since Dynamo last traced
        self._empty, self._wanted = empty, 0
        self._work, self._calls, self._updates, self._called = 0.0, 0, 0, 0  # of the present step
        self._expects, self._again = 1, 1.0  # so many traces, and calls of each model in a step
        self._cost = 0.0  # seconds that traces, recordings and comparisons took when Dynamo last traced
        self._began: float | None = None
        # least seconds: of the host in a plain step, of a plain step, of one with graphs, of what graphs would save
        self._host = self._without = self._with = self._saves = math.inf
        self._worked = math.inf  # of the host in forward, backward and update of a plain step

    @property
    def timing(self) -> bool:
        """Whether the next step is a plain one that is timed."""
        return self.plain and not self.waits

    @property
    def patience(self) -> float:
        """Seconds that traces may still take: what they are expected to, or more where graphs save much. Hot path."""
        if self.settled:
            return 0.0
        may = max(min(_OVER * self._expected, _LONG), _SHARE * self._further * self._saves)
        return max(0.0, may - self._cost)

    @property
    def _expected(self) -> float:
        """Seconds that graphs are expected to cost."""
        traced = self._host / self._again * (_RAGGED if self.ragged else 1)
        return _COST * self._expects + _COST_OF_HOST * traced

    @property
    def _further(self) -> float:
        """How many further steps there will be, or are believed to be where nobody knows."""
        return _UNKNOWN if (left := self._left()) == math.inf else left

    def misses(self, parts: int) -> bool:
        """Whether a step differs from those that were traced: fewer parts of it than usual were called."""
        return self.settled and parts < self._parts

    def pays(self, share: float, seconds: float) -> bool:
        """Whether graphs that take so long to make pay, where they serve this share of all further steps."""
        return self._further * share * self._saves >= seconds

    def worked(self, seconds: float, calls: int = 0) -> None:
        """The host has worked in a plain step on what graphs would replay.

        Args:
            seconds: in forward, backward or update; below zero for what no graph replaces.
            calls: how many replays that would be, each with its backward; 0 for an update.
        """
        self._work += seconds
        self._calls += calls
        self._updates += not calls and seconds > 0
        self._called += calls > 0

    def step_ended(self, replayed: bool, parts: int, traces: int) -> Problem | None:
        """A step has ended. Hot path.

        Args:
            replayed: whether all of its forward and backward came from graphs.
            parts: how many parts that Dynamo has found were called in it.
            traces: how often Dynamo has traced so far.
        Returns:
            Why no further step is to have graphs, None while they may.
        """
        if self.waits:
            self._steps += 1
            if self._steps >= self._wanted:
                self.plain = self.waits = False
                self._traces, self._began = traces, time.perf_counter()
            return None
        if self.plain:
            self._steps += 1
            host, whole = self._interval()
            self._host, self._without = min(self._host, host), min(self._without, whole)
            saves = _SAVED * host
            if self._steps > 1 and self._calls:
                replaying = self._empty * (_OF_CALL * self._calls + _OF_UPDATE * self._updates)
                saves = min(saves, _SAVED * self._work - replaying)
                self._worked = min(self._worked, self._work)
            self._saves = min(self._saves, saves)
            self._again = self._calls / self._called if self._calls > self._called > 0 else 1.0
            if self._called > 1:  # a GAN calls its networks often, and each is traced about twice
                self._expects = max(self._expects, min(self._calls, 2 * self._called))
            self._work, self._calls, self._updates, self._called = 0.0, 0, 0, 0
            self.plain = self._steps < _PLAIN
            self._traces = traces
            return None if self.plain else self._why_none()
        if not self.settled:
            self._settle(parts, traces)
        elif self.misses(parts):
            self._miss(traces)
        else:
            self._in_a_row = 0
            if self._alike < _ALIKE + _TIMED:
                return self._time(replayed)
        return None

    def _time(self, replayed: bool) -> Problem | None:
        """A step has ended that is like those that were traced."""
        self._alike += 1
        if self._alike >= _ALIKE:
            self._with = min(self._with, self._interval()[1])
        return self._why_no_more(replayed) if self._alike == _ALIKE + _TIMED else None

    def _settle(self, parts: int, traces: int) -> None:
        """A step has ended in which Dynamo might trace."""
        now, began = time.perf_counter(), self._began
        self._cost += 0.0 if began is None else max(0.0, now - began - self._host)
        self._began = now
        if traces != self._traces:
            self._traces, self._quiet, self._parts = traces, 1, math.inf
        elif self._quiet:  # it has traced
            self._parts = min(self._parts, parts)
            self._quiet += 1
            self.settled = self._quiet > _QUIET

    def _miss(self, traces: int) -> None:
        """A step has ended that ran as it is written because Dynamo did not trace it."""
        self._traces = traces
        self._missed += 1
        self._in_a_row += 1
        if self._in_a_row == _QUIET or self._missed * self._saves >= self._cost:
            self.settled, self._began, self._cost = False, None, 0.0
            self._quiet = self._missed = self._in_a_row = 0

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
        if self._saves < _LITTLE * self._without:
            ms = f"at most {max(self._saves, 0.0) * 1e3:.1f} ms of a step of {self._without * 1e3:.1f} ms"
            return Problem(f"graphs would save little: {ms}", fix=_ON)
        left = self._left()
        times = 1.0 if left == math.inf else _MARGIN
        fewest = math.ceil(times * self._expected / self._saves)
        if left == math.inf and fewest > _UNKNOWN:
            self.plain, self.waits, self._wanted = True, True, fewest
            late = f"graphs pay after some {fewest} steps, and nobody knows how many are left"
            return Problem(f"{late}: they come after as many", fix=_ON)
        if left >= fewest:
            return None
        return Problem(f"{left:.0f} steps are left, and graphs pay after some {fewest} steps", fix=_ON)

    def _why_no_more(self, replayed: bool) -> Problem | None:
        if replayed and self._with < math.inf:
            self._timed(self._with, self._without, min(self._worked, self._without))
        if self._with <= 0.98 * self._without:
            return None
        ms = f"{self._without * 1e3:.2f} instead of {self._with * 1e3:.2f} ms"
        return Problem(f"steps are faster without graphs: {ms}")


_ON = 'forward="on" makes graphs all the same'


def chooser_for(
    config: PyGraphConfig,
    engine: Engine,
    timed: Callable[[float, float, float], None],
    left: Callable[[], float],
) -> Chooser | None:
    """None where graphs are made in any case: times of the emulated engine say nothing."""
    asked = config.forward == "on" or config.on_failure == "raise"
    return None if asked or engine.name != "cuda" else Chooser(engine, timed, left, _of_an_empty_call())


def _of_an_empty_call() -> float:
    """Seconds of the host in a call of an empty module: the best of ten rows of twenty."""
    module, x, least = nn.Identity(), torch.empty(0), math.inf
    for _ in range(10):
        began = time.perf_counter()
        for _ in range(20):
            module(x)
        least = min(least, (time.perf_counter() - began) / 20)
    return least
