"""What the runner knows of each kind of call: signatures, their variants, and the captures of these."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from pygraph_train.gradients.of_steps import Gradients
from pygraph_train.graphs.engine import Graph
from pygraph_train.problems import Problem
from pygraph_train.selection.arms import NOTHING, Arm
from pygraph_train.step.choice import Choice
from pygraph_train.step.inputs import StaticInputs
from pygraph_train.step.outputs import Outputs
from pygraph_train.step.plan import PositionInAccumulation
from pygraph_train.tracing.signature import Key
from pygraph_train.tracing.trace import Trace
from pygraph_train.verification import Audits

__all__ = ["Capture", "CaptureKey", "Signature", "Variant", "picker", "same_memory"]


CaptureKey = tuple[PositionInAccumulation, bool, bool]
"""Position in accumulation, whether the optimizer is inside, whether the kernels are Inductor's."""


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
    rebound: list[Tensor]
    verified: bool
    hook_registrations: int
    audits: Audits


@dataclass
class Variant:
    """One signature under one set of guards."""

    trace: Trace
    key: Key = ()
    used: list[bool] = field(default_factory=list)
    watched: int = 0
    looked_twice: bool = False
    prepared_runs: int = 0
    compiled: Trace | None = None
    inputs: StaticInputs | None = None
    captures: dict[CaptureKey, Capture] = field(default_factory=dict)
    arm: Arm = field(default_factory=lambda: Arm(NOTHING))
    choice: Choice | None = None
    compile_next: bool = False
    warmup_seconds: float | None = None
    replays: int = 0
    last_used: int = 0
    moves: int = 0
    writes_parameters: bool = False
    off: Problem | None = None

    def capture_key(self, position: PositionInAccumulation) -> CaptureKey:
        """Where the capture is that serves this position under the present arm."""
        return (position, self.arm.plan.fused, self.arm.compiled)

    def seen_in_warmup(self, seconds: float) -> None:
        """Note a step that ran without a graph."""
        self.warmup_seconds = min(seconds, self.warmup_seconds or seconds)

    def keep_captures_of(self, arm: Arm) -> None:
        """Release the captures that only other arms use."""
        plan = arm.plan
        for place in list(self.captures):
            _, fused, compiled = place
            if not plan.forward_backward or fused != plan.fused or compiled != arm.compiled:
                self.captures.pop(place).graph.close()

    def forget_captures(self) -> None:
        for capture in self.captures.values():
            capture.graph.close()
        self.captures.clear()
        self.prepared_runs = 0


@dataclass
class Signature:
    """One key of arguments: its variants, latest hit first."""

    key: Key = ()
    seen: int = 0
    retraces: int = 0
    variants: list[Variant] = field(default_factory=list)
    no_graphs: Choice | None = None  # of a signature that settled on no graphs
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
