"""How long steps take, on the device and on the host, measured without making steady training wait.

A step's time runs from its beginning to its end: loading the next batch is in no step, so no plan is credited
with it. On CUDA two events enclose the device work; they are read when the device has passed them, which may be
many steps later.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from pygraph_train.selection.arms import Arm

__all__ = [
    "CudaStopwatch",
    "DeclaredStopwatch",
    "StepTime",
    "Stopwatch",
    "declared_capture_seconds",
    "declared_seconds",
]


@dataclass(frozen=True)
class StepTime:
    """One measured step, in seconds.

    Attributes:
        host: from its first to its last line of Python.
        device: from the beginning to the end of its device work, waiting for the host included.
    """

    host: float
    device: float

    @property
    def seconds(self) -> float:
        """What the step keeps the slower of the two busy."""
        return max(self.host, self.device)


class Stopwatch(Protocol):
    """Measures one step at a time."""

    def start(self) -> None:
        """The step begins. A measurement that was not stopped is forgotten."""

    def add(self, seconds: float) -> None:
        """So much is missing in the measurement of this step, or should not be in it where it is negative."""

    def stop(self, arm: Arm, deliver: Callable[[StepTime], None]) -> None:
        """The step has ended; `deliver` is called with its time from some later `collect`."""

    def collect(self) -> None:
        """Deliver what is known by now. Never waits."""

    def drain(self) -> None:
        """Wait for the device, once before another arm is measured.

        Behind a queue of earlier work the device would not see how long the host takes, and the host would
        wait for room in the queue.
        """


class CudaStopwatch:
    """Two events a step.

    Args:
        device: whose current stream runs the steps.
    """

    _MOST_PENDING = 64

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._free: list[torch.cuda.Event] = []
        self._begin: torch.cuda.Event | None = None
        self._began = self._added = 0.0
        self._pending: deque[
            tuple[torch.cuda.Event, torch.cuda.Event, float, float, Callable[[StepTime], None]]
        ] = deque()

    def start(self) -> None:
        """See `Stopwatch.start`."""
        self._began, self._added = time.perf_counter(), 0.0
        self._begin = self._begin or self._event()
        self._begin.record(torch.cuda.current_stream(self._device))

    def add(self, seconds: float) -> None:
        """See `Stopwatch.add`."""
        self._added += seconds

    def stop(self, arm: Arm, deliver: Callable[[StepTime], None]) -> None:
        """See `Stopwatch.stop`."""
        if self._begin is None:
            return
        end = self._event()
        end.record(torch.cuda.current_stream(self._device))
        self._pending.append((self._begin, end, time.perf_counter() - self._began, self._added, deliver))
        self._begin = None
        if len(self._pending) > self._MOST_PENDING:  # a device so far behind is measured by the others
            self._pending.popleft()

    def collect(self) -> None:
        """See `Stopwatch.collect`."""
        while self._pending and self._pending[0][1].query():
            begin, end, host, added, deliver = self._pending.popleft()
            deliver(StepTime(host + added, begin.elapsed_time(end) / 1e3 + added))
            self._free += (begin, end)

    def drain(self) -> None:
        """See `Stopwatch.drain`."""
        torch.cuda.current_stream(self._device).synchronize()

    def _event(self) -> torch.cuda.Event:
        return self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)


def declared_seconds(arm: Arm) -> float:
    """What the emulated engine declares a step to take, so that it shows graphs: its replays are slow.

    A millisecond for each phase without a graph, a tenth of one for each graph.
    """
    graphed = sum(map(len, arm.plan.graphs))
    return 1e-3 * (len(arm.plan.phases) - graphed) + 1e-4 * len(arm.plan.graphs)


def declared_capture_seconds(*, compared: bool) -> float:
    """What the emulated engine declares another capture of a step to take: nothing, its tapes are short.

    Args:
        compared: whether its first replay is compared with a step without a graph.
    """
    return 0.0


class DeclaredStopwatch:
    """Reports what was declared, at once."""

    def __init__(self, seconds: Callable[[Arm], float] | Mapping[Arm, float]) -> None:
        self._seconds = seconds.__getitem__ if isinstance(seconds, Mapping) else seconds
        self._running = False

    def start(self) -> None:
        """See `Stopwatch.start`."""
        self._running = True

    def add(self, seconds: float) -> None:
        """Nothing is measured."""

    def stop(self, arm: Arm, deliver: Callable[[StepTime], None]) -> None:
        """See `Stopwatch.stop`."""
        if self._running:
            self._running = False
            seconds = self._seconds(arm)
            deliver(StepTime(seconds, seconds))

    def collect(self) -> None:
        """Nothing is late."""

    def drain(self) -> None:
        """Nothing is under way."""
