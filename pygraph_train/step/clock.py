"""Step times: for the report, and for the question whether compiling pays."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from pygraph_train.diagnose.report import StepReport
from pygraph_train.graphs.engine import Engine

__all__ = ["Clock"]


class Clock:
    """Step times for the report, and the compile decision. Never makes a replayed step wait."""

    def __init__(self, engine: Engine, report: StepReport) -> None:
        self._cuda = engine.name == "cuda"
        self._report = report
        self._started = time.perf_counter()
        self._last: float | None = None
        self._intervals: deque[float] = deque(maxlen=2048)
        report.replay_intervals = self._intervals

    def replayed(self, step: int) -> None:
        now = time.perf_counter()
        if self._last is not None:
            self._intervals.append(now - self._last)
        elif self._report.first_replay_step is None:
            self._report.first_replay_step = step
            self._report.first_replay_seconds = now - self._started
        self._last = now
        self._report.steps_replayed += 1

    def undone(self) -> None:
        """The replay just counted was put back."""
        self._last = None
        self._report.steps_replayed -= 1
        if self._report.steps_replayed == 0:
            self._report.first_replay_step = self._report.first_replay_seconds = None

    def interrupted(self) -> None:
        """The next interval holds more than a step."""
        self._last = None

    @contextmanager
    def ungraphed(self) -> Iterator[None]:
        self._last = None
        if self._cuda:
            torch.cuda.synchronize()
        started = time.perf_counter()
        yield
        if self._cuda:
            torch.cuda.synchronize()
        self._report.ungraphed_seconds.append(time.perf_counter() - started)

    @contextmanager
    def compiling(self) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._report.compile_seconds += time.perf_counter() - started
        if self._report.ungraphed_seconds:
            self._report.ungraphed_seconds.pop()

    def compiling_pays(self, steps_left: float | None) -> bool:
        """Inductor usually saves a third of the device time and costs about a minute."""
        if steps_left is None or not self._intervals:
            return False
        step = sorted(self._intervals)[len(self._intervals) // 2]
        return steps_left * step / 3 > _COMPILE_SECONDS


_COMPILE_SECONDS = 120.0
"""Above this expected saving `compile="auto"` compiles: twice what a medium model takes."""
