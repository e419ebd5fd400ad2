"""A graph of the optimizer phase, and what it rests on."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from pygraph_train.core.memory import Memory
from pygraph_train.gradients.places import Layout
from pygraph_train.graphs.engine import Graph
from pygraph_train.verification import Audits

__all__ = ["CapturedUpdate"]


@dataclass
class CapturedUpdate:
    """A graph of the phase and what it rests on.

    Attributes:
        memory: in which it computes.
        addresses: of the parameters.
        gradients: where they were; with buffers only what they look like counts.
        buffers: copies of the gradients that the graph works on, None where it works on them as they lie.
        number: how many graphs there were in a row, with this one, that differ in nothing but where gradients were.
    """

    graph: Graph
    memory: Memory
    addresses: list[int]
    gradients: Layout
    buffers: list[Tensor] | None
    hyperparameters: Any
    constants: Any
    generation: int
    verified: bool
    audits: Audits
    replays: int = 0
    number: int = 1

    def reaches(self, gradients: Layout) -> bool:
        """Whether it works on gradients that lie like these."""
        return self.buffers is not None or gradients.addresses == self.gradients.addresses

    def follow(self, before: CapturedUpdate, verify: str, seconds: float) -> None:
        """Take the place of a graph for gradients at other addresses. Of such graphs a sample is compared.

        Args:
            before: that graph.
            verify: see `PyGraphConfig`.
            seconds: what a comparison takes.
        """
        if verify == "sample" and before.verified and self.buffers is before.buffers:
            self.number = before.number + 1
            self.verified = (
                self.number & (self.number - 1) != 0
            )  # the 1st, 2nd, 4th, 8th and so on are compared
            if self.verified:
                self.audits = Audits(verify, time.perf_counter(), seconds)
