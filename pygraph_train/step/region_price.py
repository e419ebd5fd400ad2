"""What it may cost to find out whether regions of eager kernels pay.

They save the launches of their kernels. On every step, each of them costs what Dynamo does before it is called, and
each is traced, compared and captured before anything is known.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

__all__ = ["RegionPrice"]

_LEAST_OPERATIONS = 6
"""Of a part, on average. The launches of fewer take no longer than the call of the part."""

_MOST_PARTS = 24
"""Parts that are traced for themselves, each in some tenths of a second."""

_MOST_SECONDS = 10.0
"""Of steps in which parts are traced, compared or captured."""

_SHARE = 0.05
"""Of the time since the first of them: regions of a long training may cost more seconds."""


class RegionPrice:
    """Adds up what regions have cost.

    Args:
        counts: whether time counts: the emulation is slow by nature.
        clock: seconds; for tests.
    """

    def __init__(self, *, counts: bool, clock: Callable[[], float] = time.perf_counter) -> None:
        self.counts = counts
        self._clock = clock
        self._parts = self._operations = 0
        self._spent = 0.0
        self._began: float | None = None
        self._now = 0.0

    def traced(self, graph: torch.fx.Graph) -> None:
        """A part was traced."""
        self._parts += 1
        self._operations += sum(node.op.startswith("call") for node in graph.nodes)

    def why_not(self) -> str | None:
        """When all parts were traced: why they would not pay, None where they may."""
        if not self.counts or not self._parts:
            return None
        if self._parts > _MOST_PARTS:
            return f"they fall into {self._parts} parts, each of which would have to be traced and captured"
        if self._operations < _LEAST_OPERATIONS * self._parts:
            return (
                f"their {self._parts} parts have {self._operations} operations in all, and calling the parts would "
                "take as long as launching these"
            )
        return None

    def begin(self) -> None:
        """A step with regions begins."""
        self._now = self._clock()
        if self._began is None:
            self._began = self._now

    def end(self, *, quiet: bool) -> str | None:
        """It has ended. Returns why regions cost too much, None where they do not.

        Args:
            quiet: nothing was traced, compared or captured in it.
        """
        if quiet or not self.counts or self._began is None:
            return None
        now = self._clock()
        self._spent += now - self._now
        if self._spent <= max(_MOST_SECONDS, _SHARE * (now - self._began)):
            return None
        return f"{self._spent:.3g} s were spent on tracing, comparing and capturing their parts"
