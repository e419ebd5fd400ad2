"""Finds out once whether graphs of forward and backward are worth their while."""

from __future__ import annotations

import time
from collections.abc import Callable

from pygraph_train.graphs.engine import Engine

__all__ = ["Trial"]

_REPLAYS_BEFORE_TRIAL = 20
_WINDOW = 6
"""Steps with graphs, and then as many without, that are timed once."""


def _ignored(with_graphs: float, without: float) -> None:
    pass


class Trial:
    """Finds out once whether steps are faster without their graphs.

    Args:
        engine: where graphs are made.
        timed: called with the seconds of a step with graphs, and of one without.

    Attributes:
        without_graphs: whether the next step runs without graphs, to be timed.
    """

    def __init__(self, engine: Engine, timed: Callable[[float, float], None] = _ignored) -> None:
        self.without_graphs = False
        self._engine, self._timed = engine, timed
        self._steps = 0
        self._began = self._seconds = 0.0

    def step_ended(self, replayed: bool) -> str | None:
        """A step has ended. Returns why no further one is to have graphs, None while they may."""
        if self._steps > _REPLAYS_BEFORE_TRIAL + 2 * _WINDOW or (not replayed and not self.without_graphs):
            return None
        self._steps += 1
        place = self._steps - _REPLAYS_BEFORE_TRIAL
        if place in (0, _WINDOW, _WINDOW + 1, 2 * _WINDOW + 1):
            self._engine.synchronize()
            now = time.perf_counter()
            seconds, self._began = now - self._began, now
            if place == _WINDOW:
                self._seconds, self.without_graphs = seconds, True  # the first one without is not timed
            elif place == 2 * _WINDOW + 1:
                self.without_graphs = False
                with_graphs, without = self._seconds / _WINDOW, seconds / _WINDOW
                self._timed(with_graphs, without)
                if without < 0.98 * with_graphs:
                    ms = f"{without * 1e3:.2f} instead of {with_graphs * 1e3:.2f} ms"
                    return f"steps are faster without graphs: {ms}"
        return None
