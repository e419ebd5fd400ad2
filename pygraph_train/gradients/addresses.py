"""Every address of a gradient that a graph rests on."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor

from pygraph_train.gradients.of_steps import Gradients
from pygraph_train.gradients.places import Layout, Place, Source

__all__ = ["GradientAddresses"]

_MOST_SETS = 32
"""Sets of parameters without gradients, of all sources, after which no end of them is expected."""


class GradientAddresses:
    """Where graphs leave the gradients of a training loop, and where they find those that others have left.

    Graphs of whole steps write to fixed tensors: those of Inductor's kernels to tensors by themselves, lest they copy
    to where the graph of the eager kernels happened to leave its own. Graphs of the update read gradients wherever
    regions, autograd or another graph leave them, and it is found out whether that is the same place each time.

    Args:
        weighs: see `Place`.
    """

    def __init__(self, *, weighs: bool = False) -> None:
        self._weighs = weighs
        self._written: dict[bool, dict[Tensor, Tensor]] = {False: {}, True: {}}
        self._places: dict[tuple[Source, tuple[bool, ...]], Place] = {}

    def of_step(
        self, parameters: Iterable[Tensor], emptied: Iterable[Tensor], *, compiled: bool
    ) -> Gradients:
        """The gradients that one captured step can reach; see `Gradients`.

        Args:
            compiled: whether the step runs with Inductor's kernels.
        """
        return Gradients(parameters, emptied, self._written[compiled])

    def are_written(self, *, compiled: bool) -> bool:
        """Whether any graph with these kernels leaves gradients."""
        return bool(self._written[compiled])

    def keep(self, compiled: Iterable[bool]) -> None:
        """Let go of the tensors that only graphs with other kernels than these have written."""
        kept = set(compiled)
        for kind, gradients in self._written.items():
            if kind not in kept:
                gradients.clear()

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
