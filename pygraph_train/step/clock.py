"""Step and phase times."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from pygraph_train.graphs.engine import Engine
from pygraph_train.report.step_report import StepReport
from pygraph_train.step.times import Times

__all__ = ["Clock"]


class Clock:
    """Step and phase times. Never makes a replayed step wait.

    Args:
        engine: makes the graphs.
        report: gets everything.
        times: is filled.
    """

    def __init__(self, engine: Engine, report: StepReport, times: Times) -> None:
        self._cuda = engine.name == "cuda"
        self._report = report
        self._times = times
        self._started = time.perf_counter()
        self._last: float | None = None
        self._marks: dict[str, Any] | None = None

    def replayed(self, step: int) -> None:
        now = time.perf_counter()
        interval = None if self._last is None else now - self._last
        self._last = now
        self._report.replayed(step, since_start=now - self._started, interval=interval)

    def undone(self) -> None:
        """The replay just counted was put back."""
        self._last = None
        self._report.replay_undone()

    def interrupted(self) -> None:
        """The next interval holds more than a step."""
        self._last = None

    @contextmanager
    def ungraphed(self, *, traced: bool = False) -> Iterator[None]:
        """A step of the warm-up: timed as a whole, and between the marks set meanwhile.

        Args:
            traced: whether Dynamo traces in it, so that the report takes its time for no step's.
        """
        self._last = None
        if self._cuda:
            torch.cuda.synchronize()
        started = time.perf_counter()
        self._marks = {"F": self._now()}
        try:
            yield
            marks, end = self._marks, self._now()
        finally:
            self._marks = None
        if self._cuda:
            torch.cuda.synchronize()
        self._times.ungraphed = time.perf_counter() - started
        if not traced:
            self._report.ran_without_graph(self._times.ungraphed)
        if len(marks) == 3:  # a step with an update
            for phase, begin, until in zip(marks, marks.values(), [*marks.values(), end][1:], strict=True):
                seconds = self._between(begin, until)
                self._times.phases[phase] = min(self._times.phases.get(phase, seconds), seconds)

    def mark(self, phase: str) -> None:
        """Phase "B" or "O" begins, in a step of the warm-up; anywhere else this does nothing."""
        if self._marks is not None and len(self._marks) < 3:
            self._marks[phase] = self._now()

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, begin: Any, end: Any) -> float:
        """Seconds between two marks; their steps were waited for."""
        return float(begin.elapsed_time(end)) / 1e3 if self._cuda else end - begin

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Inductor works in a step of the warm-up."""
        started = time.perf_counter()
        yield
        self.compiled(time.perf_counter() - started, in_step=True)

    def compiled(self, seconds: float, *, in_step: bool = False) -> None:
        """Something was compiled for so long, perhaps in a step of the warm-up."""
        self._times.compiling += seconds
        self._report.compiled(seconds, in_step=in_step)
