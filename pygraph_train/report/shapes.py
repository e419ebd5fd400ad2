"""How many shapes of batches were met, and what became of them."""

from __future__ import annotations

from collections.abc import Hashable

__all__ = ["ShapeCounts"]


class ShapeCounts:
    """Filled while training runs; nobody who decides asks it.

    Attributes:
        met: shapes of batches. One that comes back after very many others counts again.
        rare_steps: steps without a graph because their shape is rare.
        waiting: whether a trace for the shapes that change is not worth its time yet.
    """

    def __init__(self) -> None:
        self.met = 0
        self.rare_steps = 0
        self.waiting = False
        self._graphed: set[Hashable] = set()

    def meets(self) -> None:
        """A batch has a shape that no batch before had."""
        self.met += 1

    def ran_as_rare(self) -> None:
        """A step ran without a graph because its shape is rare."""
        self.rare_steps += 1

    def waits_for_trace(self, waits: bool) -> None:
        """Whether a trace for the shapes that change has to wait until it is worth its time."""
        self.waiting = waits

    def got_graph(self, shape: Hashable) -> None:
        """A graph was captured for a shape."""
        self._graphed.add(shape)

    @property
    def with_graphs(self) -> int:
        """Shapes for which graphs were captured."""
        return len(self._graphed)

    def to_dict(self) -> dict[str, int]:
        """Plain numbers."""
        return {"met": self.met, "with_graphs": self.with_graphs, "rare_steps": self.rare_steps}

    def __str__(self) -> str:
        rare = (
            f", {self.rare_steps} steps ran without one because their shape is rare"
            if self.rare_steps
            else ""
        )
        return f"{self.met} shapes of batches, graphs for {self.with_graphs} of them{rare}"
