"""What the processes that train together decide, each alone or all of them the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import distributed

__all__ = ["OneProcess", "Processes", "SeveralProcesses", "processes"]


class Processes(Protocol):
    """What the decisions about a training step need to know of the processes that train together."""

    why_no_comparison: str | None
    """Why plans are not compared, and none of an earlier run is taken over; None where they may be."""

    def agree(self, numbers: Sequence[float]) -> Sequence[float]:
        """Element-wise maximum of these numbers over all ranks. Every rank calls it at the same steps."""


class OneProcess:
    """What it measures, it may decide by."""

    why_no_comparison: str | None = None

    def agree(self, numbers: Sequence[float]) -> Sequence[float]:
        """The numbers themselves."""
        return numbers


class SeveralProcesses:
    """Ranks of a loop that the user wrote, which exchange nothing with each other.

    Plans are not compared: steps that get ready are not counted, and each rank gets ready in its own time. What an
    earlier run settled on is not taken over: caches of different machines may differ.
    """

    why_no_comparison: str | None = "several processes: the first plan is kept, without a comparison"

    def agree(self, numbers: Sequence[float]) -> Sequence[float]:
        """The rank's own numbers: nothing is decided by them."""
        return numbers


def processes() -> Processes:
    """Those of the present process group; one where there is none."""
    grouped = distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1
    return SeveralProcesses() if grouped else OneProcess()
