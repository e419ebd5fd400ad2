"""Families: kinds of calls that differ in the sizes of their tensors alone, and have what was found out in common."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections import Counter, OrderedDict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from pygraph_train.problems import Problem
from pygraph_train.selection.arms import Arm
from pygraph_train.selection.returns import Costs, TraceReturns, is_sampled, sampled_share
from pygraph_train.step.inputs import InputMemory
from pygraph_train.tracing.signature import Dims, Key, Sizes, family_of
from pygraph_train.verification import AuditLedger

if TYPE_CHECKING:
    from pygraph_train.step.variants import CaptureKey, Signature, Variant

__all__ = ["STEPS_BEFORE_COMPILING", "Families", "Family", "WithoutGraph", "volume_of"]

_MOST_FAMILIES = 64
"""Kinds of batches remembered; the oldest are forgotten."""

STEPS_BEFORE_COMPILING = 100
"""Steps without Inductor's kernels, of shapes other than the first one, that prove that these are worth their time."""

_CHANGING = 3
"""The same, where at least every other step of the training has another shape than the first one."""

_TIMED = 3
"""Steps of each kind of kernels, without a graph, that are timed."""

_MOST_LEADS = 4
"""Traces that new shapes are tried with."""

_MOST_RECOMPILED = 3
"""Times that Inductor compiles one trace: its code may be for some of the shapes only."""

_MOST_TRACES = 3
"""Traces of one family after the first one, before replays have to pay for more."""

_REPLAYS_PER_TRACE = 50
"""Replays that pay for one more."""

_MIDDLE = 0.35, 0.65
"""Shapes that are neither among the smallest nor among the largest, by their share of those met."""

_MOST_WAITING = 16
"""Steps that wait for such a shape."""

_MOST_SIZES = 1024
"""Shapes whose sizes are remembered."""

_MOST_FAILURES = 3
"""Shapes whose captures fail, after which no other shape is tried."""


class WithoutGraph(NamedTuple):
    """The step has no graph: its shape is rare so far.

    Attributes:
        signature, family: of the shape.
        lead: whose trace holds for it, None where no trace does.
        holds: whether that one's code of Inductor is for it as well.
    """

    signature: Signature
    family: Family
    lead: Variant | None = None
    holds: bool = False


class Family:
    """What shapes of one kind of batch share.

    Attributes:
        shapes: how many were met.
        leads: kinds of calls whose traces serve other shapes, the latest first.
        compared: kinds of calls with traces of their own, the latest first. Their plans are compared, for all shapes.
        static: whether a trace for many shapes was refused: each shape needs a trace of its own.
        traces: made after the first one.
        replays: of all shapes.
        costs: of steps and captures.
        trace_returns: whether another trace is worth its time, of a family of several shapes.
        told: whether it was said that there are no more traces.
        ended: why no further shape gets a graph.
        inputs: where the graphs of shapes that share a trace read their batches.
        differed: whether a replay differed from the step without a graph: no capture goes unchecked any more.
        audits: what the audits of its graphs have cost, but for those of kinds of calls with traces of their own.
        steps_without_inductor: without a graph and with eager kernels, of other shapes than the first one, since
            Inductor has compiled.
        replays_without_inductor: of eager kernels, in the same way.
        compile_seconds: what Inductor has taken the last time; None where that was not measured.
        timed_compiled: steps with Inductor's kernels that were timed, without the one in which it compiled.
        timed_eager: steps with eager kernels that were timed.
    """

    def __init__(self, sizes: Sizes) -> None:
        self.shapes = 0
        self.leads: list[Variant] = []
        self.compared: list[Variant] = []
        self.static = False
        self.traces = -1
        self.replays = 0
        self.costs = Costs()
        self.trace_returns = TraceReturns()
        self.told = False
        self.ended: Problem | None = None
        self.inputs = InputMemory()
        self.differed = False
        self.audits: AuditLedger | None = None
        self.steps_without_inductor = self.replays_without_inductor = 0
        self.compile_seconds: float | None = None
        self.timed_compiled, self.timed_eager = -1, 0
        self._failures = self._waited = self._beside = self._largest = self._with_eager = 0
        self._looks_after = 1
        self._volumes: list[int] = []
        self._first_sizes = sizes
        self._dynamic: dict[int, frozenset[int]] = {}
        self._captures: Counter[CaptureKey] = Counter()

    def meet(self, sizes: Sizes) -> None:
        """Another shape of it was met."""
        self.shapes += 1
        if len(self._volumes) < _MOST_SIZES:
            insort(self._volumes, _volume(sizes))
        for i, size in enumerate(sizes):
            first = self._first_sizes[i]
            if size != first:
                known = self._dynamic.get(i, frozenset())
                for dim, n in enumerate(size):
                    if n != first[dim] and dim not in known:
                        known = self._dynamic[i] = known | {dim}

    @property
    def dynamic(self) -> Dims:
        """Which sizes have been seen to change. Empty where a trace for many shapes cannot be had."""
        return {} if self.static else dict(self._dynamic)

    @property
    def without_inductor(self) -> int:
        """Steps and replays without Inductor's kernels, since it has compiled."""
        return self.steps_without_inductor + self.replays_without_inductor

    def steps_before_compiling(self, made: int) -> int:
        """How many more steps without Inductor's kernels prove that these are worth their time.

        Args:
            made: steps of the training so far.
        """
        without = self.without_inductor
        changes = self.shapes >= _CHANGING and without >= _CHANGING and 2 * without >= made
        if changes and self.timed_compiled < 0:
            return 0
        return max(0, STEPS_BEFORE_COMPILING - without)

    def may_trace(self) -> bool:
        """Whether another trace has a chance to be worth its time."""
        return self.traces < _MOST_TRACES + self.replays // _REPLAYS_PER_TRACE

    def may_trace_narrow(self, leaves: Sequence[Any]) -> bool:
        """Whether a shape may have a trace: one with a changing size of 0 or 1 only where replays have paid for it.

        Dynamo makes constants of these sizes, so such a trace serves few shapes or one.
        """
        narrow = any(leaves[i].shape[dim] < 2 for i, dims in self._dynamic.items() for dim in dims)
        return not narrow or self.traces <= self.replays // _REPLAYS_PER_TRACE

    def traced(self, variant: Variant) -> None:
        """A trace is being made for this kind of call."""
        self.traces += 1
        self.compared.insert(0, variant)
        del self.compared[_MOST_LEADS:]
        if variant.trace.dynamic:
            self.leads.insert(0, variant)
            del self.leads[_MOST_LEADS:]

    def may_recompile(self, lead: Variant) -> bool:
        """Whether Inductor may compile this trace once more, for shapes that its code so far is not for.

        Its kernels would have to have saved that time in the steps since it compiled last.
        """
        saved = self.costs.saved_by_kernels(self.steps_without_inductor, self.replays_without_inductor)
        if self.compile_seconds is not None and saved is not None and saved < self.compile_seconds:
            return False
        return sum(other.trace is lead.trace for other in self.leads) < _MOST_RECOMPILED

    def is_typical(self, volume: int) -> bool:
        """Whether Inductor should compile the trace in a step of a shape with so many elements, or wait for another.

        Where it asks in the middle of its work whether a size is above some bound, its code is for the shapes on the
        same side. That of a shape in the middle is for half of them at least.
        """
        self._waited += 1
        volumes = self._volumes
        first, last = (share * len(volumes) for share in _MIDDLE)
        typical = bisect_left(volumes, volume) <= last and bisect_right(volumes, volume) >= first
        if typical or self._waited >= _MOST_WAITING:
            self._waited = 0
            return True
        return False

    def leads_again(self, lead: Variant) -> None:
        """This kind of call has a trace that leads already, and other code of Inductor."""
        self.leads.insert(0, lead)

    def drop(self, variant: Variant) -> None:
        """Nothing is to be learned from this kind of call any more, nor from others that share its trace."""
        if any(lead is variant for lead in self.leads):
            self.leads = [lead for lead in self.leads if lead.trace is not variant.trace]
        self.compared = [other for other in self.compared if other is not variant]

    def arm_for(self, arm: Arm) -> Arm:
        """What a shape runs with that has graphs of this one. Hot path."""
        settled = self.settled()
        if settled is None or settled.plan == arm.plan:
            return arm
        return Arm(settled.plan, arm.compiled) if settled.plan.forward_backward else settled

    def settled(self) -> Arm | None:
        """The plan that a comparison has settled on, for shapes that compare none themselves.

        They go on with it while that comparison is open again, and get no graphs that the end of it would release.
        """
        before: Arm | None = None
        for variant in self.compared:
            if (choice := variant.choice) is not None and choice.controller.was_settled:
                if choice.controller.settled:
                    return choice.controller.best
                before = before or choice.controller.best
        return before

    def is_without_graphs(self) -> bool:
        """Whether shapes run without graphs of forward and backward, however often they come."""
        settled = self.settled()
        return settled is not None and not settled.plan.forward_backward

    def ran_without_graph(self, seconds: float, *, compiled: bool) -> None:
        """A step without a graph was timed."""
        if compiled:
            self.timed_compiled += 1
        else:
            self.timed_eager += 1
        if not compiled or self.timed_compiled:  # in the first one Inductor has compiled
            self.costs.ran(seconds, compiled=compiled)

    def times_eager(self, volume: int) -> bool:
        """Whether a step of a shape with so many elements should show how long eager kernels take.

        Those of smaller shapes do, as long as that is not known: they need no more memory than Inductor's for others.
        """
        smaller = bisect_left(self._volumes, volume)
        return self.timed_eager < _TIMED and 2 * smaller < len(self._volumes)

    def times_compiled(self) -> bool:
        """Whether the next step runs with Inductor's code, if that is for it, and is timed.

        The first ones do, and later ones that look again.
        """
        return self.timed_compiled < _TIMED or self.looks_again()

    def looks_again(self) -> bool:
        """Whether the next step looks once more for code of Inductor, also for shapes that have run without.

        Where eager kernels seem to be faster, one does after 1, 2, 4, ... steps with these: the host may have been slow
        when steps with Inductor's code were timed.
        """
        return self._with_eager >= self._looks_after and not self.compiled_is_faster()

    def looks_at_compiled(self) -> bool:
        """Whether the step that is being made is such a step. The next one waits twice as long."""
        looks = self.times_compiled()
        if looks:
            self._looks_after = max(1, 2 * self._with_eager)
        return looks

    def ran_with_eager(self) -> None:
        """A step without a graph had eager kernels, after Inductor has compiled."""
        self._with_eager += 1

    def compiled_is_faster(self) -> bool:
        """Whether Inductor's kernels without a graph are faster than eager ones, as far as is known."""
        return self.costs.compiled_is_faster()

    def is_compared(self, place: CaptureKey, verify: str) -> bool:
        """Whether the first replay of the next capture of this kind is compared with a step without a graph."""
        return verify != "sample" or self.differed or is_sampled(self._captures[place] + 1)

    def share_compared(self, verify: str) -> float:
        """The share of captures whose first replay is compared, if each shape gets one."""
        if verify == "off":
            return 0.0
        return 1.0 if verify != "sample" or self.differed else sampled_share(self.shapes)

    def may_leave_holes(self, volume: int) -> bool:
        """Whether a step without a graph and beside graphs, of a shape with so many elements, may need memory that no
        cached block fits.

        That is each of a larger shape than those since the last capture, and of the others the 1st, 2nd, 4th and so on.
        """
        if not self._captures:
            return False
        self._beside += 1
        if volume <= self._largest:
            return is_sampled(self._beside)
        self._largest = volume
        return True

    def captured(self, place: CaptureKey, seconds: float | None) -> None:
        """A capture was made, and took so long without a comparison."""
        self._captures[place] += 1
        self._beside = self._largest = 0
        if seconds is not None:
            self.costs.captured(seconds)

    def failed(self, problem: Problem) -> None:
        """A capture of a shape has failed."""
        self._failures += 1
        if self._failures >= _MOST_FAILURES and not self.replays:
            self.ended = problem


def _volume(sizes: Sizes) -> int:
    """How many elements the tensors of a batch have."""
    return sum(map(math.prod, sizes))


def volume_of(key: Key) -> int:
    """The same, of the batches with this key."""
    return _volume(family_of(key)[1])


class Families:
    """All families that were met, up to a number of them."""

    def __init__(self) -> None:
        self._by_key: OrderedDict[Key, Family] = OrderedDict()

    def meet(self, key: Key) -> Family:
        """The family of a shape that is met."""
        known, sizes = family_of(key)
        family = self._by_key.get(known)
        if family is None:
            family = self._by_key[known] = Family(sizes)
            if len(self._by_key) > _MOST_FAMILIES:
                self._by_key.popitem(last=False)
        self._by_key.move_to_end(known)
        family.meet(sizes)
        return family
