"""What the runner knows of one kind of call: its signature, its variants, and the captures of these."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from pygraph_train.gradients.of_steps import Gradients
from pygraph_train.graphs.engine import Graph
from pygraph_train.graphs.memory import Storages
from pygraph_train.identity import identities
from pygraph_train.selection.arms import NOTHING, Arm
from pygraph_train.selection.returns import Returns, is_sampled
from pygraph_train.step.choice import Choice
from pygraph_train.step.families import Family
from pygraph_train.step.inputs import StaticInputs
from pygraph_train.step.lifecycle import Life, LifeEvent, Stage, StageLengths, next_life
from pygraph_train.step.moving import LoadedTensors
from pygraph_train.step.outputs import Outputs
from pygraph_train.step.plan import PositionInAccumulation
from pygraph_train.step.ways import Ways
from pygraph_train.torch_private.sharding import local_tensor
from pygraph_train.tracing.compiled_units import CompiledUnits
from pygraph_train.tracing.host_draws import Ahead
from pygraph_train.tracing.reproducing import ReproducingTrace
from pygraph_train.tracing.signature import Key
from pygraph_train.tracing.trace import Trace
from pygraph_train.verification import AuditLedger, Audits

__all__ = ["Capture", "CaptureKey", "Signature", "Variant"]

_PATIENCE = 32
"""Steps in a row that can have no graph, each of which is looked at."""

_SHARE = 8
"""Of the steps in a row so far that are not looked at next: at most so many replays are missed in the end."""

_MOST_UNSEEN = 64

_MOST_EXCUSED = 3
"""Exceptions in runs without a graph that the step itself does not raise, before they count."""

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
    pick_leaves: Callable[[Sequence[Tensor]], tuple[Tensor, ...]]
    addresses: list[int]
    rebound: list[Tensor]
    verified: bool
    hook_registrations: int
    audits: Audits
    sync: bool = True
    """Whether gradients are exchanged with other processes in it."""
    sharded: bool = False
    """Whether this process holds parts of the parameters, whose addresses count."""
    written: Storages | None = None
    """What its forward may write, and copies of the batch must not be taken of. None where it writes nothing."""
    number: int = 0
    """Of a capture that the ranks of a training have made together."""
    kept: list[Tensor] = field(default_factory=list)
    """What the loop gives other memory, and is brought home before a replay."""
    loaded: LoadedTensors | None = None
    """What the loop replaces, and each replay copies."""
    ids: list[int] = field(default_factory=list)
    """`id` of all that the step reads, as the capture has found it: `swap_tensors` wants no weak references."""
    optimized: bytes = b""
    """What tells the parameters that the optimizer holds: whose gradients are emptied before a step."""
    writer: ReproducingTrace | None = None
    """What makes the step's writes to Python after a replay. None where there are none."""
    leaf_identities: bytes = field(init=False)

    def fits(self) -> bool:
        """Whether gradients are as it found them: not where they were emptied in an accumulation. Hot path."""
        return self.gradients.fit()

    def __post_init__(self) -> None:
        self.leaf_identities = identities(tuple(self.leaves))


@dataclass
class Variant:
    """One signature under one set of guards: a kind of call.

    Attributes:
        trace: what Dynamo says of it, and whether a call is of this kind.
        lengths: of its life.
        key: of the signature.
        life: where it stands.
        used: which leaves of the arguments the step reads.
        anchored: leaves that are tensors which the step also reads from somewhere else (a buffer of the model that is
            passed to it): their positions, and those in `trace.inputs`. Dynamo takes them from there.
        compiled: how the step runs with Inductor's kernels.
        inputs: where graphs read the batch.
        arm: what it runs with.
        choice: the comparison of its plans, once one of them has a graph.
        compile_next: whether its plans begin with Inductor's kernels.
        warmup_seconds: the shortest step without a graph.
        replays, last_used: how often it was replayed, and in which step last.
        moves: how often captures were thrown away because something had moved.
        excused: how often a run without a graph has raised what the step itself does not.
        writes_parameters: whether forward changes parameters in place.
        ahead: what the present step draws and reads on the host, where the trace depends on such numbers.
        moving: which of `trace.inputs` the loop has given other memory; True where it is another tensor then.
        stay: those of `moving` for which no copy can stand.
        family: of kinds of calls that differ in sizes alone.
        way: the answers after which its trace was made, of a signature that has traces of other ways; None otherwise.
        lead: whose trace it shares, and whose plan it follows. None for a kind of call with a trace of its own.
        opened: whether objects of its call are opened from now on, so that their tensors are leaves.
        proved: how many graphs of each kind there were that made way, since one of them was compared with a plain step.
        makes_way: whether its graphs had to make way for steps without them.
        capture_seconds, compare_seconds: of its latest capture, and of the latest comparison of a first replay.
    """

    trace: Trace
    lengths: StageLengths
    key: Key = ()
    life: Life = field(default_factory=lambda: Life(Stage.FIRST_LOOK))
    used: list[bool] = field(default_factory=list)
    anchored: list[tuple[int, int]] = field(default_factory=list)
    compiled: Trace | CompiledUnits | None = None
    inputs: StaticInputs | None = None
    captures: dict[CaptureKey, Capture] = field(default_factory=dict)
    arm: Arm = field(default_factory=lambda: Arm(NOTHING))
    choice: Choice | None = None
    compile_next: bool = False
    warmup_seconds: float | None = None
    replays: int = 0
    last_used: int = 0
    moves: int = 0
    excused: int = 0
    writes_parameters: bool = False
    ahead: Ahead | None = None
    way: tuple[Any, ...] | None = None
    moving: dict[int, bool] = field(default_factory=dict)
    stay: set[int] = field(default_factory=set)
    family: Family | None = None
    lead: Variant | None = None
    opened: bool = False
    proved: Counter[CaptureKey] = field(default_factory=Counter)
    makes_way: bool = False
    capture_seconds: float = 0.0
    compare_seconds: float = 0.0

    def member(self, key: Key, *, prepared: bool = False) -> Variant:
        """A kind of call with other sizes that this one's trace holds for. Nothing has to be found out for it.

        Args:
            prepared: whether a step with these sizes has run with the kernels that a graph will hold.
        """
        return Variant(
            self.trace,
            self.lengths._replace(prepared=1),
            key,
            Life(Stage.GRAPHED, 1) if prepared else Life(Stage.PREPARED),
            used=self.used,
            anchored=self.anchored,
            arm=self.arm,
            writes_parameters=self.writes_parameters,
            moving=self.moving,
            stay=self.stay,
            family=self.family,
            lead=self,
        )

    def recompiled(self) -> Variant:
        """A kind of call with the same trace, for which Inductor is to compile other code."""
        again = self.member(self.key)
        again.lengths, again.life, again.lead = self.lengths, self.life, None
        return again

    @property
    def one_of_many(self) -> bool:
        """Whether its trace is for one of several shapes: Inductor's kernels should rather be for all of them."""
        return self.family is not None and self.family.shapes > 1 and not self.trace.dynamic

    def is_for(self, leaves: Sequence[Any]) -> bool:
        """Whether `anchored` leaves are still those tensors. Hot path; the trace holds for this call."""
        return all(leaves[i] is self.trace.latest_tensors[k] for i, k in self.anchored)

    def movable(self) -> dict[int, bool]:
        """Those of `moving` that a capture may follow: not what is passed as well, and not what the step rebinds."""
        fixed = {k for _, k in self.anchored} | self.stay
        return {} if self.trace.rebound else {k: other for k, other in self.moving.items() if k not in fixed}

    def load(self, capture: Capture, leaves: Sequence[Any]) -> None:
        """Draw what the step draws on the host, and copy what a replay reads from elsewhere into the graph's memory.

        Hot path; the trace holds.
        """
        assert self.inputs is not None
        if self.ahead is not None and self.ahead.end is not None:
            self.ahead.end.restore(but=self.trace.draws_in_graph)
        self.inputs.load(leaves)
        if capture.loaded is not None:
            capture.loaded.load(self.trace.latest_tensors)

    def maybe_written(self, reads: Sequence[Tensor]) -> Storages | None:
        """The memory of what the forward may change of `reads`: buffers, and parameters if it was seen to do that.

        Args:
            reads: all that the step reads, without what is loaded from elsewhere.
        """
        found = [t for t in reads if self.writes_parameters or not t.requires_grad]
        return Storages(map(local_tensor, found)) if found else None

    def is_unwritten_parameter(self, tensor: Tensor) -> bool:
        """Whether this is a parameter, trained or frozen, that forward and backward do not write."""
        return not self.writes_parameters and (tensor.requires_grad or isinstance(tensor, nn.Parameter))

    def excuses(self) -> bool:
        """Whether such an exception says nothing against graphs: the step may catch what a gap raises."""
        self.excused += 1
        return self.trace.gaps.left and self.excused <= _MOST_EXCUSED

    def meets(self, event: LifeEvent) -> None:
        """Go on in life."""
        self.life = next_life(self.life, event, self.lengths)

    def audits(self, verify: str, now: float, reference: float) -> Audits:
        """When its next capture is compared again. Graphs of shapes that share a trace share the time for that."""
        family = None if self.lead is None else self.family
        if family is not None and family.audits is None:
            family.audits = AuditLedger(now)
        return Audits(verify, now, reference, None if family is None else family.audits)

    def last_comparison(self) -> float:
        """Seconds that an audit of a capture will take, which was not compared itself."""
        known = None if self.family is None else self.family.costs.compared
        return self.compare_seconds if self.lead is None else known or 0.0

    def capture_key(self, position: PositionInAccumulation) -> CaptureKey:
        """Where the capture is that serves this position under the present arm."""
        return (position, self.arm.plan.fused, self.arm.compiled)

    def replayed(self, step: int) -> int:
        """Note a replay in this training step. Hot path.

        Returns:
            How many steps went without Inductor's kernels: of all shapes, where they share the trace.
        """
        self.last_used = step
        self.replays += 1
        if (family := self.family) is None:
            return self.replays
        family.replays += 1
        if self.compiled is not None or not self.trace.dynamic:
            return self.replays
        family.replays_without_inductor += 1
        return family.replays_without_inductor + family.steps_without_inductor

    def follow(self) -> None:
        """Run with the plan that was found to be the best one for other shapes. Hot path."""
        if self.family is not None:
            self.arm = self.family.arm_for(self.arm)

    def seen_in_warmup(self, seconds: float, *, compiled: bool) -> None:
        """Note a step that ran without a graph."""
        if self.family is not None and (self.trace.dynamic or not compiled):
            self.family.ran_without_graph(seconds, compiled=compiled)
        self.warmup_seconds = min(seconds, self.warmup_seconds or seconds)

    def keep_captures_of(self, arm: Arm) -> None:
        """Release the captures that only other arms use."""
        plan = arm.plan
        for place in list(self.captures):
            _, fused, compiled = place
            if not plan.forward_backward or fused != plan.fused or compiled != arm.compiled:
                self._release(place)

    def make_way(self) -> None:
        """Release graphs that may come back: all that they rest on is as it was."""
        for place in list(self.captures):
            self._release(place)
        self.makes_way, self.inputs = True, None
        self._has_no_graphs()

    def _release(self, place: CaptureKey) -> None:
        capture = self.captures.pop(place)
        capture.graph.close()
        self.proved[place] += capture.verified

    def is_compared(self, place: CaptureKey, verify: str) -> bool:
        """Whether the first replay of its next capture is compared: a sample, where the same kernels were compared."""
        made = self.proved[place]
        return verify != "sample" or not made or (made > 1 and is_sampled(made + 1))

    def forget_captures(self) -> None:
        """Release them: they rest on something that has changed."""
        for capture in self.captures.values():
            capture.graph.close()
        self.captures.clear()
        self.proved.clear()
        self._has_no_graphs()

    def _has_no_graphs(self) -> None:
        if self.life.stage in (Stage.PREPARED, Stage.COMPILED, Stage.GRAPHED):
            self.meets(LifeEvent.STALE)


@dataclass
class Signature:
    """One key of arguments: its variants, latest hit first.

    Attributes:
        life: until it has a variant, and when it gets no more of them.
        family: of signatures that differ in sizes alone; None where each one is on its own.
        returns: how often it has come without a graph, where its family has a trace for it.
        lead: whose trace that is, as long as somebody else has it; None where none was found.
        ran: whose kernels its latest step without a graph had, and whether these were Inductor's.
        latest: the number of its latest step of those that were looked at for a trace.
        in_a_row: such steps one after the other.
        no_graphs: the comparison of plans, of a signature that settled on no graphs.
        ways: how often steps went which way, of those where numbers of the host decide.
        other_way: what was drawn and read for the present step, which goes another way than any variant.
        refused: steps in a row for which no variant had a graph, and none can get one.
        unseen: so many further steps are taken for such ones without a look.
        volume: how many elements its batches have, where it has a family.
    """

    key: Key
    life: Life
    family: Family | None = None
    returns: Returns = field(default_factory=Returns)
    lead: weakref.ref[Variant] | None = None
    ran: tuple[weakref.ref[Variant], bool] | None = None
    latest: int = 0
    in_a_row: int = 0
    retraces: int = 0
    variants: list[Variant] = field(default_factory=list)
    no_graphs: Choice | None = None
    ways: Ways = field(default_factory=Ways)
    other_way: tuple[Any, ...] | None = None
    refused: int = 0
    unseen: int = 0
    volume: int = 0

    def ran_with(self, lead: Variant) -> bool | None:
        """Whether its latest step without a graph had Inductor's kernels of this trace; None where it had others."""
        return None if self.ran is None or self.ran[0]() is not lead else self.ran[1]

    def comes(self, step: int) -> None:
        """It is looked for a trace in the step with this number."""
        self.in_a_row = self.in_a_row + 1 if self.latest == step - 1 else 1
        self.latest = step

    def is_refused_again(self) -> None:
        """One more step in a row that can have no graph: the longer they go on, the more rarely they are looked at."""
        self.refused += 1
        if self.refused >= _PATIENCE:
            self.unseen = min(self.refused // _SHARE, _MOST_UNSEEN)

    def is_unseen(self) -> bool:
        """Whether a step is taken for a refused one without a look; it is counted as one then."""
        if not self.unseen:
            return False
        self.unseen -= 1
        self.refused += 1
        return True
