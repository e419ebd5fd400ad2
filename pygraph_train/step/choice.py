"""Which arm one kind of steps runs with: turns of the controller, counted in real steps and timed."""

from __future__ import annotations

from collections.abc import Callable

from pygraph_train.selection.arms import Arm
from pygraph_train.selection.controller import Controller, Turn
from pygraph_train.selection.timing import StepTime, Stopwatch

__all__ = ["Choice"]

_MOST_UNREADY = 64
"""Steps that an arm may take to get its graphs; warm-up and captures are a few."""


class _Unit:
    """The micro-batches of one optimizer step: one sample."""

    def __init__(self, choice: Choice, turn: Turn) -> None:
        self._choice, self._turn = choice, turn
        self._times: list[StepTime] = []
        self._count: int | None = None

    def add(self, time: StepTime) -> None:
        self._times.append(time)
        self._deliver()

    def close(self, count: int) -> None:
        """All micro-batches were made; times may still be under way."""
        self._count = count
        self._deliver()

    def _deliver(self) -> None:
        if self._count is None or len(self._times) < self._count:
            return
        host = sum(t.host for t in self._times) / self._count
        device = sum(t.device for t in self._times) / self._count
        time = StepTime(host, device)
        self._choice.latest[self._turn.arm] = time
        self._turn.samples.append(device)  # nothing there ends before the host has launched it


class Choice:
    """The arm that steps of one signature run with.

    A step here is everything up to an update of the parameters. Only steps that ran wholly as their arm
    says count: those that warm up and capture do not.

    Args:
        controller: whose turns are taken.
        stopwatch: measures the steps that a turn wants measured.
        latest: filled with the last measured step of each arm, host and device apart.
        settled: told the arm of each turn for which nothing else is compared with it.

    Attributes:
        quiet: so many further steps need nothing of `begin` and `end`. The caller counts it down.
    """

    def __init__(
        self,
        controller: Controller,
        stopwatch: Stopwatch,
        latest: dict[Arm, StepTime],
        settled: Callable[[Arm], None] = lambda arm: None,
    ) -> None:
        self.controller = controller
        self.quiet = 0
        self.latest = latest
        self._stopwatch = stopwatch
        self._unit: _Unit | None = None
        self._settled = settled
        self._count = self._made = self._unready = 0
        self._turn = controller.turn()

    @property
    def arm(self) -> Arm:
        """What runs now."""
        return self._turn.arm

    def begin(self) -> None:
        """A step begins."""
        self._stopwatch.collect()
        turn = self._turn
        if self._made >= turn.steps:
            self._next()
            turn = self._turn
        self._count = 0
        measured = turn.skipped <= self._made < turn.skipped + turn.measured
        self._unit = _Unit(self, turn) if measured else None

    def start(self) -> None:
        """A micro-batch of it begins."""
        self._count += 1
        if self._unit is not None:
            self._stopwatch.start()

    def stop(self) -> None:
        """A micro-batch of it has ended."""
        if self._unit is not None:
            self._stopwatch.stop(self.arm, self._unit.add)

    def end(self, *, as_planned: bool) -> None:
        """The step has ended."""
        turn = self._turn
        if not as_planned:
            self._unready += 1
            if self._unready > _MOST_UNREADY:
                self.fail("its graphs could not be kept: what they rest on changes again and again")
            return
        self._made += 1
        if self._unit is not None:
            self._unit.close(self._count)
        if self._made >= turn.skipped + turn.measured:
            self.quiet, self._made = turn.steps - self._made, turn.steps

    def fail(self, why: str) -> None:
        """The arm cannot be run: take the next turn at once."""
        self._turn.problem = why
        self._next()

    def _next(self) -> None:
        before, self._turn = self._turn.arm, self.controller.turn()
        if self._turn.arm != before:  # a few times in a training: the first step of the turn is not measured
            self._stopwatch.drain()
        self._made = self._unready = self.quiet = 0
        self._unit = None
        if self.controller.settled:
            self._settled(self._turn.arm)
