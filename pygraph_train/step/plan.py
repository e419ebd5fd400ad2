"""Where a micro-batch stands."""

from __future__ import annotations

from typing import NamedTuple


class PositionInAccumulation(NamedTuple):
    """Where a micro-batch stands.

    Attributes:
        fresh: gradients start from nothing (the first, or the only micro-batch).
        update: the optimizer steps after it (the last, or the only micro-batch).
        sync: gradients are exchanged with the other processes after it.
    """

    fresh: bool = True
    update: bool = True
    sync: bool = True
