"""What the runner knows of each kind of call: signatures, their variants, and the captures of these."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from pygraph_train.graphs.engine import Graph
from pygraph_train.step.gradients import Gradients
from pygraph_train.step.inputs import StaticInputs
from pygraph_train.step.legality import Problem, Trace
from pygraph_train.step.outputs import Outputs
from pygraph_train.step.plan import PositionInAccumulation

__all__ = ["Capture", "Signature", "Variant", "picker", "same_memory"]


@dataclass
class Capture:
    """One graph for one position in accumulation, and all that must still be true when it is replayed."""

    graph: Graph
    loss: Tensor
    outputs: Outputs
    gradients: Gradients
    updates: bool
    hyperparameters: Any
    optimizer_generation: int
    leaves: list[Tensor]
    pick_leaves: Callable[[Sequence[Tensor]], Sequence[Tensor]]
    addresses: list[int]
    verified: bool
    hook_registrations: int


@dataclass
class Variant:
    """One signature under one set of guards."""

    trace: Trace
    used: list[bool] = field(default_factory=list)
    watched: int = 0
    looked_twice: bool = False
    prepared_runs: int = 0
    compiled: Trace | None = None
    inputs: StaticInputs | None = None
    captures: dict[PositionInAccumulation, Capture] = field(default_factory=dict)
    compile_next: bool = False
    replays: int = 0
    last_used: int = 0
    moves: int = 0
    writes_parameters: bool = False
    off: Problem | None = None

    def forget_captures(self) -> None:
        for capture in self.captures.values():
            capture.graph.close()
        self.captures.clear()
        self.prepared_runs = 0


@dataclass
class Signature:
    """One key of arguments: its variants, latest hit first."""

    seen: int = 0
    retraces: int = 0
    variants: list[Variant] = field(default_factory=list)
    off: Problem | None = None


def same_memory(tensors: Sequence[Tensor], capture: Capture) -> bool:
    """Whether a graph works on these very tensors: parameters are the same objects, all are where they were."""
    if list(map(Tensor.data_ptr, tensors)) != capture.addresses:
        return False
    return all(map(operator.is_, capture.leaves, capture.pick_leaves(tensors)))


def picker(indices: list[int]) -> Callable[[Sequence[Tensor]], Sequence[Tensor]]:
    """`operator.itemgetter`, which returns a tuple only for two or more."""
    if len(indices) < 2:
        return lambda items: [items[i] for i in indices]
    return operator.itemgetter(*indices)
