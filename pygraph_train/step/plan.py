"""Phases and plans: what of a step runs from a graph. Plans are data."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from pygraph_train.config import PyGraphConfig

__all__ = ["Phase", "Plan", "PositionInAccumulation", "plan_of"]


class Phase(str, Enum):
    """A part of a training step. Clipping and the scaler's update belong to the optimizer phase."""

    FORWARD = "F"
    BACKWARD = "B"
    OPTIMIZER = "O"


@dataclass(frozen=True)
class Plan:
    """Which phases run from a graph, and which of them share one.

    Prints as `{F B O}` (one graph), `{F B} O` (the optimizer outside), `F B O` (no graph).
    """

    graphs: tuple[tuple[Phase, ...], ...] = ()
    phases: tuple[Phase, ...] = (Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER)

    def graphed(self, phase: Phase) -> bool:
        """True when `phase` runs from a graph."""
        return any(phase in graph for graph in self.graphs)

    def __str__(self) -> str:
        parts = []
        for phase in self.phases:
            graph = next((g for g in self.graphs if phase in g), None)
            if graph is None:
                parts.append(phase.value)
            elif graph[0] is phase:
                parts.append("{" + " ".join(p.value for p in graph) + "}")
        return " ".join(parts)


@dataclass(frozen=True)
class PositionInAccumulation:
    """Where a micro-batch stands.

    Attributes:
        fresh: gradients start from nothing (the first, or the only micro-batch).
        update: the optimizer steps after it (the last, or the only micro-batch).
        constants: Python values of the loop around the step that a capture bakes in (Lightning: what the
            loss is divided by, the clipping threshold).
    """

    fresh: bool = True
    update: bool = True
    constants: tuple[Any, ...] = ()

    def __str__(self) -> str:
        """`{F B O}`, `{F B}`, and with a + where gradients are added to earlier ones."""
        return ("{F B O}" if self.update else "{F B}") + ("" if self.fresh else "+")


WHOLE = Plan(((Phase.FORWARD, Phase.BACKWARD, Phase.OPTIMIZER),))
FORWARD_BACKWARD = Plan(((Phase.FORWARD, Phase.BACKWARD),))
NOTHING = Plan()


def plan_of(config: PyGraphConfig, *, optimizer_capturable: bool) -> Plan:
    """The plan to aim for under these options.

    Forward and backward are captured together or not at all; graphs of single phases need the compile
    backend, which does not exist yet.
    """
    if config.fuse == "off" or "off" in (config.forward, config.backward):
        return NOTHING
    if config.optimizer == "off" or not optimizer_capturable:
        return FORWARD_BACKWARD
    return WHOLE
