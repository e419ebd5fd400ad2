"""Does the GPU wait for the host at all? Asked before anything is traced or captured.

Where the host needs a small part of the time that the device needs for a step, the device is never idle without
graphs, and a graph of the same kernels has nothing to gain: the step is left as it is, at no cost. The same holds
where it needs up to half of that time, and is so far ahead of the device that it launches the whole of a step while
earlier ones are still being made. A loop that waits for each step is never ahead.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from pygraph_train.config import PyGraphConfig
from pygraph_train.selection.compile_time import saved_by_compiling, steps_until_compiling_pays

__all__ = ["LaunchBoundCheck"]

R = TypeVar("R")

_SHARE = 0.25
"""A host that is done after this share of the step stays ahead of the device whatever disturbs it."""

_AHEAD = 0.5
"""The same for a host that is ahead: even where the device is idle between launches of a step that it was waited for,
it is busy for longer than the host takes."""

_UNTIL_AHEAD = 4
"""Steps from one look to the next, in which the host may get ahead."""

_TRIAL_STEPS = 300
"""Tracing, capturing and comparing a step take about as long as so many steps."""

_TRIAL_SHARE = 0.01
"""Of a run: so much may finding out take whether a graph is faster for a device that does not wait."""

_AGREEING = 2
"""Measured steps that must say so; the very first one, which sets things up, is not measured. So many looks in a row
must find a host that is not ahead."""

_FIRST_DISTANCE = 256
"""Steps from the first look to the next: sequences may get shorter, or the GPU may change. Each look that finds the
same as before doubles the distance."""

_LARGEST_DISTANCE = 16 * _FIRST_DISTANCE


class LaunchBoundCheck:
    """Runs plain steps until one of them shows that the device waits for the host.

    Args:
        synchronize: waits for the device.
        compile_seconds: what Inductor is taken to cost; None where it is not to be used.
        steps_left: how many steps training will still make, None when unknown: then as many as were made.
        settled: called once, with words, when steps are left as they are.
        clock: seconds; for tests.

    Attributes:
        open: whether graphs may be of use, so that this class is not asked any more.
    """

    def __init__(
        self,
        synchronize: Callable[[], None],
        compile_seconds: float | None,
        steps_left: Callable[[], float | None],
        settled: Callable[[str], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.open = False
        self._synchronize = synchronize
        self._compile_seconds = compile_seconds
        self._steps_left = steps_left
        self._settled = settled
        self._clock = clock
        self._steps = self._agreeing = 0
        self._behind = 0  # looks in a row
        self._next = 2
        self._distance = _FIRST_DISTANCE

    @staticmethod
    def wanted(config: PyGraphConfig, engine: str) -> bool:
        """Whether the question is open: not where graphs, or Inductor's kernels, were asked for."""
        insists = "on" in (config.forward, config.backward, config.optimizer, config.fuse)
        return engine == "cuda" and not insists and config.compile is not True and config.verify != "always"

    def run(self, step: Callable[[], R]) -> R:
        """Make one step."""
        self._steps += 1
        if self._steps < self._next:
            return step()
        begun = self._clock()
        self._synchronize()
        started = self._clock()
        result = step()
        host = self._clock() - started
        self._synchronize()
        whole = self._clock() - started
        self._judge(host, whole, ahead=started - begun)
        return result

    def _judge(self, host: float, whole: float, *, ahead: float) -> None:
        """Decide what a look has shown.

        Args:
            ahead: seconds of earlier steps that the device had still to make when this one began.
        """
        close = host > _SHARE * whole
        self._behind = self._behind + 1 if close and ahead < host else 0
        may_gain = close and (host > _AHEAD * whole or self._trial_is_cheap())
        if may_gain or self._compiling_pays(whole):
            self.open = True
            return
        if self._behind:  # after the first step, or something else that was waited for, nothing is ahead
            self.open = self._behind >= _AGREEING
            self._next = self._steps + _UNTIL_AHEAD
            return
        self._agreeing += 1
        if self._agreeing == _AGREEING:
            self._settled(
                f"the GPU does not wait for the host: launching a step takes {host * 1000.0:.3g} ms, and the step "
                f"takes {whole * 1000.0:.3g} ms"
            )
        if self._agreeing < _AGREEING:
            self._next = self._steps + (_UNTIL_AHEAD if close else 1)
        else:
            self._next = self._steps + max(1, min(self._distance, self._until_compiling_pays(whole)))
            self._distance = min(2 * self._distance, _LARGEST_DISTANCE)

    @property
    def rest(self) -> int:
        """So many further steps are not looked at."""
        return max(0, self._next - self._steps - 1) if self._agreeing >= _AGREEING else 0

    def skip(self, steps: int) -> None:
        """So many of them are made elsewhere."""
        self._steps += steps

    def _compiling_pays(self, seconds: float) -> bool:
        if self._compile_seconds is None:
            return False
        saved = saved_by_compiling(seconds, steps=self._steps, left=self._steps_left())
        return saved > self._compile_seconds

    def _trial_is_cheap(self) -> bool:
        """Whether graphs may be tried that can gain a few percent at most."""
        left = self._steps_left()
        return _TRIAL_SHARE * (self._steps + (left or 0)) >= _TRIAL_STEPS

    def _until_compiling_pays(self, seconds: float) -> int:
        """Steps from now on, where nobody knows how many training will make. Others only get fewer."""
        if self._compile_seconds is None or self._steps_left() is not None:
            return _LARGEST_DISTANCE
        return steps_until_compiling_pays(seconds, self._compile_seconds) - self._steps
