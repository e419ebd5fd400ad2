"""Phases and plans: what of a step runs from a graph. All of it is data."""

from __future__ import annotations

from enum import Enum
from functools import cache
from typing import NamedTuple


class Phase(str, Enum):
    """A part of a training step. Clipping and the scaler's update belong to the optimizer phase."""

    FORWARD = "F"
    BACKWARD = "B"
    OPTIMIZER = "O"

    __hash__ = str.__hash__  # that of `Enum` is written in Python, and each step is counted by its plan


class Plan(NamedTuple):
    """Which phases run from a graph of their own.

    Prints as `{F} {B} {O}` (each has a graph), `{F} {B} O` (the optimizer runs without one), `F B O` (no graph).
    """

    graphs: tuple[Phase, ...] = ()

    def __str__(self) -> str:
        return " ".join(f"{{{p.value}}}" if p in self.graphs else p.value for p in Phase)


@cache
def graphs_apart(forward: bool, backward: bool, optimizer: bool) -> Plan:
    """The plan in which each of these phases has a graph of its own."""
    kept = zip(Phase, (forward, backward, optimizer), strict=True)
    return Plan(tuple(phase for phase, graphed in kept if graphed))


NOTHING = graphs_apart(False, False, False)
SEPARATE = graphs_apart(True, True, True)
