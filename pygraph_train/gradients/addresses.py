"""Every address of a gradient that a graph rests on."""

from __future__ import annotations

from pygraph_train.gradients.places import Layout, Place, Source

__all__ = ["GradientAddresses"]

_MOST_SETS = 32
"""Sets of parameters without gradients, of all sources, after which no end of them is expected."""


class GradientAddresses:
    """Where the gradients of a training loop lie.

    Graphs of the update read gradients wherever regions or autograd leave them, and it is found out whether that is
    the same place each time.

    Args:
        weighs: see `Place`.
    """

    def __init__(self, *, weighs: bool = False) -> None:
        self._weighs = weighs
        self._places: dict[tuple[Source, tuple[bool, ...]], Place] = {}

    def found(self, source: Source, layout: Layout) -> Place | None:
        """Note where the gradients of this step are. None where there are too many sets of those that are missing."""
        key = source, tuple(layout.missing)
        place = self._places.get(key)
        if place is None:
            if len(self._places) >= _MOST_SETS:
                return None
            place = self._places[key] = Place(source, weighs=self._weighs)
        place.follow(layout)
        return place
