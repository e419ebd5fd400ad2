"""Phases, plans and arms: what of a step runs from a graph. All of it is data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cache, cached_property

__all__ = [
    "BACKWARD",
    "BACKWARD_AND_OPTIMIZER",
    "FORWARD",
    "FORWARD_AND_OPTIMIZER",
    "FORWARD_BACKWARD",
    "NOTHING",
    "OPTIMIZER",
    "REGIONS",
    "SEPARATE",
    "SPLIT",
    "WHOLE",
    "Arm",
    "Phase",
    "Plan",
    "graphs_apart",
]


class Phase(str, Enum):
    """A part of a training step. Clipping and the scaler's update belong to the optimizer phase."""

    FORWARD = "F"
    BACKWARD = "B"
    OPTIMIZER = "O"

    __hash__ = str.__hash__  # that of `Enum` is written in Python, and each step is counted by its plan


@dataclass(frozen=True)
class Plan:
    """Which phases run from a graph, and which of them share one.

    Prints as `{F B O}` (one graph), `{F B} {O}` (two), `{F} {B} {O}` (three),
    `{F B} O` (the optimizer outside), `{F} B {O}` (the backward outside), `F B O` (no graph).
    """

    graphs: tuple[tuple[Phase, ...], ...] = ()
    phases: tuple[Phase, ...] = (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)

    @cached_property
    def fused(self) -> bool:
        """Whether the optimizer is in the graph of the backward."""
        return any(Phase.BACKWARD in graph and Phase.OPTIMIZER in graph for graph in self.graphs)

    @cached_property
    def forward_backward(self) -> bool:
        """Whether forward and backward share a graph."""
        return any(Phase.FORWARD in graph and Phase.BACKWARD in graph for graph in self.graphs)

    @cached_property
    def regions(self) -> bool:
        """Whether forward or backward has graphs of its own, the regions of the compile backend."""
        return (Phase.FORWARD,) in self.graphs or (Phase.BACKWARD,) in self.graphs

    @cached_property
    def optimizer_alone(self) -> bool:
        """Whether the optimizer has a graph of its own."""
        return (Phase.OPTIMIZER,) in self.graphs

    def __str__(self) -> str:
        parts = []
        for phase in self.phases:
            graph = next((g for g in self.graphs if phase in g), None)
            if graph is None:
                parts.append(phase.value)
            elif graph[0] is phase:
                parts.append("{" + " ".join(p.value for p in graph) + "}")
        return " ".join(parts)


_F, _B, _O = Phase

WHOLE = Plan(((_F, _B, _O),))
SPLIT = Plan(((_F, _B), (_O,)))
SEPARATE = Plan(((_F,), (_B,), (_O,)))
REGIONS = Plan(((_F,), (_B,)))
FORWARD_AND_OPTIMIZER = Plan(((_F,), (_O,)))
BACKWARD_AND_OPTIMIZER = Plan(((_B,), (_O,)))
FORWARD = Plan(((_F,),))
BACKWARD = Plan(((_B,),))
FORWARD_BACKWARD = Plan(((_F, _B),))
OPTIMIZER = Plan(((_O,),))
NOTHING = Plan()


@cache
def graphs_apart(forward: bool, backward: bool, optimizer: bool) -> Plan:
    """The plan in which each of these phases has a graph of its own."""
    kept = zip(Phase, (forward, backward, optimizer), strict=True)
    return Plan(tuple((phase,) for phase, graphed in kept if graphed))


@dataclass(frozen=True)
class Arm:
    """One way to run a step, among those that are compared: a plan, with Inductor's kernels or without.

    Attributes:
        parts: whether some regions have graphs, and others of the same phase have none.
    """

    plan: Plan
    compiled: bool = False
    parts: bool = False

    @cached_property
    def regions(self) -> bool:
        """Whether regions of forward or backward run from graphs."""
        return self.parts or self.plan.regions

    @cached_property
    def without_graphs(self) -> bool:
        """Whether nothing runs from a graph."""
        return self.plan == NOTHING and not self.parts

    @cached_property
    def update_alone(self) -> bool:
        """Whether the update is all that runs from a graph."""
        return self.plan == OPTIMIZER and not self.parts

    def __str__(self) -> str:
        words = [str(self.plan), *["compiled"] * self.compiled, *["with graphs of parts"] * self.parts]
        return " ".join(words)
