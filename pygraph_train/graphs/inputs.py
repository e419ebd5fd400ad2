"""Inputs of a graph that are copied to it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from pygraph_train.graphs.engine import Graph, IndirectionUnavailable
from pygraph_train.graphs.memory import overlaps_itself
from pygraph_train.torch_private.memory import copy_all


class CopiedInputs:
    """See `graphs.engine.Inputs`. Replays work on copies.

    Args:
        inputs: plain tensors.
    Raises:
        IndirectionUnavailable: elements of one share memory.
    """

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        if any(map(overlaps_itself, inputs)):
            raise IndirectionUnavailable(
                "elements of a gradient share memory, so nothing can be copied back there"
            )
        self.stand_ins: Sequence[Tensor] = [tensor.detach().clone() for tensor in inputs]

    def follow(self, graph: Graph) -> None:
        """Nothing to find."""

    def fit(self, addresses: list[int]) -> bool:
        """Copies stay where they are. Hot path."""
        return True

    def take(self, inputs: Sequence[Tensor], addresses: list[int]) -> None:
        """Copy them. Hot path."""
        with torch.no_grad():
            copy_all(self.stand_ins, inputs)

    def give_back(self, inputs: Sequence[Tensor]) -> None:
        """Copy what replays have written: who holds a gradient sees that it was clipped. Hot path."""
        with torch.no_grad():
            copy_all(inputs, self.stand_ins)

    def close(self) -> None:
        """Let go of the copies."""
        self.stand_ins = ()
