"""Which arm one kind of steps runs with: windows of the controller, counted in real steps and timed."""

from __future__ import annotations

from collections.abc import Callable

from pygraph_train.selection.arms import Arm
from pygraph_train.selection.controller import Controller, Window
from pygraph_train.selection.timing import StepTime, Stopwatch

__all__ = ["Choice"]

_MOST_UNREADY = 64
"""Steps that an arm may take to get its graphs; warm-up and captures are a few."""


class _Unit:
    """The micro-batches of one optimizer step: one sample."""

    def __init__(self, choice: Choice, window: Window) -> None:
        self._choice, self._window = choice, window
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
        self._choice.latest[self._window.arm] = time
        self._window.samples.append(device)  # nothing there ends before the host has launched it


class Choice:
    """The arm that steps of one signature run with.

    A step here is everything up to an update of the parameters. Only steps that ran wholly as their arm
    says count: those that warm up and capture do not.

    Args:
        controller: whose windows are run.
        stopwatch: measures the steps that a window wants measured.
        latest: filled with the last measured step of each arm, host and device each.
        settled: is called with the arm of each window in which nothing is compared with it any more.

    Attributes:
        quiet: so many further steps need nothing of `begin` and `end`. The caller counts it down.
        as_planned: whether the present step ran wholly as its arm says. The caller clears it.
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
        self.as_planned = True
        self.latest = latest
        self._stopwatch = stopwatch
        self._unit: _Unit | None = None
        self._settled = settled
        self._count = self._made = self._unready = 0
        self._window = controller.next_window()

    @property
    def arm(self) -> Arm:
        """What runs now."""
        return self._window.arm

    def begin(self) -> None:
        """A step begins."""
        self.as_planned = True
        self._stopwatch.collect()
        window = self._window
        if self._made >= window.steps:
            self._next()
            window = self._window
        self._count = 0
        measured = window.skipped <= self._made < window.skipped + window.measured
        self._unit = _Unit(self, window) if measured else None

    def start(self) -> None:
        """A micro-batch of it begins."""
        self._count += 1
        if self._unit is not None:
            self._stopwatch.start()

    def add(self, seconds: float) -> None:
        """See `Stopwatch.add`: of the micro-batch that has begun."""
        if self._unit is not None:
            self._stopwatch.add(seconds)

    def stop(self) -> None:
        """A micro-batch of it has ended."""
        if self._unit is not None:
            self._stopwatch.stop(self.arm, self._unit.add)

    def end(self) -> None:
        """The step has ended."""
        window = self._window
        if not self.as_planned:
            self._unready += 1
            if self._unready > _MOST_UNREADY:
                self.fail(
                    "its graphs could not be kept: their tensors or their values change again and again"
                )
            return
        self._made += 1
        if self._unit is not None:
            self._unit.close(self._count)
        if self._made >= window.skipped + window.measured:
            self.quiet, self._made = window.steps - self._made, window.steps

    def fail(self, why: str) -> None:
        """The arm cannot be run: the next window begins at once."""
        self._window.problem = why
        self._next()

    def _next(self) -> None:
        before, self._window = self._window.arm, self.controller.next_window()
        if (
            self._window.arm != before
        ):  # a few times in a training: the first step of the window is not measured
            self._stopwatch.drain()
        self._made = self._unready = self.quiet = 0
        self._unit = None
        if self.controller.settled:
            self._settled(self._window.arm)
