"""Batches of changing shapes: one trace serves many shapes, and a shape has a graph when it has paid for one."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from pygraph_train.problems import Problem
from pygraph_train.selection.arms import Arm
from pygraph_train.step.capturing import Capturing
from pygraph_train.step.code_for_shapes import CodeForShapes
from pygraph_train.step.decisions import Decisions
from pygraph_train.step.families import Family, WithoutGraph
from pygraph_train.step.flight import StepInFlight
from pygraph_train.step.launch_bound import LaunchBoundCheck
from pygraph_train.step.lifecycle import Life, Stage
from pygraph_train.step.program import Call, plain_call
from pygraph_train.step.signatures import Signatures
from pygraph_train.step.training_run import TrainingRun
from pygraph_train.step.ungraphed import UngraphedSteps
from pygraph_train.step.updates import Updates
from pygraph_train.step.variants import Signature, Variant
from pygraph_train.tracing.reproducing import ReproducingTrace

__all__ = ["Shapes"]

R = TypeVar("R")

_STAYS = 16
"""Steps in a row with one shape, after which shapes are not taken to change with each step."""

_EARLY = (Stage.FIRST_LOOK, Stage.SECOND_LOOK, Stage.WATCHED)


class Shapes:
    """Says what a step of another shape is for.

    Args:
        training, updates, decisions, signatures, ungraphed, capturing: of the runner.
    """

    def __init__(
        self,
        training: TrainingRun,
        updates: Updates,
        decisions: Decisions,
        signatures: Signatures,
        ungraphed: UngraphedSteps,
        capturing: Capturing,
    ) -> None:
        self._training = training
        self._updates = updates
        self._decisions = decisions
        self._signatures = signatures
        self._ungraphed = ungraphed
        self._capturing = capturing
        self._code = CodeForShapes(training, updates, decisions, signatures, ungraphed, capturing)
        # who asked for graphs does not wait for them
        self._weighs_traces = LaunchBoundCheck.wanted(training.config, training.engine.name)

    def served(
        self,
        step: StepInFlight,
        signature: Signature,
        variant: Variant | None,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        leaves: Sequence[Any],
    ) -> Variant | WithoutGraph | None:
        """What is known of a shape from others: the kind of call that its step counts for, None where it is on its own.

        Args:
            signature: of the shape.
            variant: of its own, None where there is none.
        """
        family = signature.family
        if family is None or (variant is not None and not _is_unused(variant)):
            return variant
        if family.ended is not None:
            signature.life = Life(Stage.REFUSED)
            return None
        if variant is None and (known := self._still_rare(signature, family, args, kwargs)) is not None:
            return known
        lead, holds = self._lead_for(family, args, kwargs, leaves)
        if lead is None:
            family.steps_without_inductor += 1
            own = variant is not None or self._signatures.is_first(signature)
            if own or (family.may_trace_narrow(leaves) and self._may_trace(family, args, kwargs)):
                if self._code.is_wanted(family) and signature.life.stage is Stage.MET:
                    # no shape comes back, and one trace is for all of them
                    signature.life = Life(Stage.FIRST_LOOK)
                signature.comes(self._training.step)
                is_met = signature.life.stage is Stage.MET
                if variant is not None or is_met or self._trace_pays(signature, family):
                    return variant
                signature.returns.steps += 1
            self._training.report.shapes.ran_as_rare()
            return WithoutGraph(signature, family)
        if lead.life.stage in _EARLY:
            return lead
        if variant is not None:  # it was on its own way to a trace, which nobody needs any more
            signature.variants.remove(variant)
            family.drop(variant)
        signature.lead = weakref.ref(lead)
        if not self._has_earned(signature, family, lead, code=holds):
            return self._rare(signature, family, lead, holds=holds)
        prepared = signature.ran_with(lead) is self._graph_is_compiled(family, code=holds)
        member = lead.member(signature.key, prepared=prepared)
        member.last_used = self._training.step
        signature.variants.insert(0, member)
        return member

    def _rare(
        self, signature: Signature, family: Family, lead: Variant, *, holds: bool = False
    ) -> WithoutGraph:
        signature.returns.steps += 1
        if not family.is_without_graphs():
            self._training.report.shapes.ran_as_rare()
        return WithoutGraph(signature, family, lead, holds)

    def _still_rare(
        self, signature: Signature, family: Family, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> WithoutGraph | None:
        """The step of a shape that has not earned a graph yet, where nothing else depends on guards.

        To check them takes several percent of a step: those of code of Inductor are checked, and once.
        """
        lead = None if signature.lead is None else signature.lead()
        if lead is None or not any(other is lead for other in family.leads):
            return None
        code = False
        if self._decisions.compiles and (self._training.config.compile is True or lead.compiled is not None):
            ran = signature.ran_with(lead)
            if (
                lead.compiled is None
                or ran is None
                or (not ran and self._code.is_looked_for_again(family, lead))
            ):
                return None  # the guards say with which kernels it runs
            code = ran
        if self._pays(signature, family, lead, code=code) or (
            code and not self._code.holds(lead, args, kwargs)
        ):
            return None
        return self._rare(signature, family, lead, holds=code)

    def _lead_for(
        self, family: Family, args: tuple[Any, ...], kwargs: dict[str, Any], leaves: Sequence[Any]
    ) -> tuple[Variant | None, bool]:
        """Whose trace holds for this call, with code of Inductor that is for it if there is any; whether there is."""
        found: Variant | None = None
        program = self._training.program
        with program.context():
            for lead in family.leads:
                if found is None or lead.trace is not found.trace:
                    known = lead.trace.traced and lead.trace.problem is None
                    known = known and lead.trace.host_draws is None  # these decide which way a step takes
                    if not known or not lead.trace.holds(program.function(), args, kwargs):
                        continue
                    if not lead.is_for(leaves):
                        continue
                if (holds := self._code.holds(lead, args, kwargs)) or lead.compiled is None:
                    return lead, holds
                found = found or lead
        return found, False

    def _trace_pays(self, signature: Signature, family: Family) -> bool:
        """Whether the steps that could have had a graph are worth the time of another trace."""
        stays = family.shapes < 2 or signature.in_a_row >= _STAYS
        pays = stays or not self._weighs_traces or family.trace_returns.pays(self._training.steps_left())
        self._training.report.shapes.waits_for_trace(not pays)
        return pays

    def _may_trace(self, family: Family, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether a shape may have a trace of its own, once it has come back. If not, a row says why, once."""
        if family.may_trace():
            return True
        if not family.told:
            family.told = True
            program = self._training.program
            with program.context():
                traces = [other.trace for other in family.compared]
                why = traces[0].why_not(program.function(), args, kwargs) if traces else Problem("its size")
            self._training.note(
                Problem(
                    f"the step was traced for {family.traces + 1} shapes of batches, and no trace is for the next one: "
                    f"{why.reason}",
                    why.where,
                    "Pad batches to fewer shapes, or let no Python of the step depend on the sizes",
                )
            )
        return False

    def _has_earned(self, signature: Signature, family: Family, lead: Variant, *, code: bool) -> bool:
        """Whether a graph for this shape is worth its price, and has room."""
        if not self._pays(signature, family, lead, code=code):
            return False
        if self._capturing.has_room(None):
            return True
        signature.returns.dropped()
        return False

    def _pays(self, signature: Signature, family: Family, lead: Variant, *, code: bool) -> bool:
        """Whether a graph for this shape is worth its price, with `code` of Inductor for it or without."""
        config, training = self._training.config, self._training
        if family.is_without_graphs():
            return False
        compiled = self._graph_is_compiled(family, code=code)
        share, least = family.share_compared(config.verify), max(1, self._signatures.lengths.met)
        price = family.costs.steps(least, compared=share, compiled=compiled, code=code)
        left = training.steps_left()
        if lead.compiled is None and config.compile is True and self._decisions.compiles:
            soon = 0 if lead.compile_next else family.steps_before_compiling(training.step)
            left = soon if left is None else min(left, soon)  # then graphs of eager kernels go
        return signature.returns.earned(price, training.step, left)

    def _graph_is_compiled(self, family: Family, *, code: bool) -> bool:
        """Whether the graph of a shape has Inductor's kernels, where there is code of Inductor for it."""
        settled = family.settled()
        return code and (self._training.config.compile is True or (settled is not None and settled.compiled))

    def arm_of(self, variant: Variant, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Arm:
        """What a kind of call runs with that follows a lead."""
        lead, family = variant.lead, variant.family
        assert lead is not None and family is not None
        if variant.compiled is None and self._code.holds(lead, args, kwargs):
            variant.compiled = lead.compiled
            variant.forget_captures()
        arms = self._decisions.arms(variant, self._updates.plans())
        settled = family.settled()
        if settled is not None and (settled in arms or not settled.plan.forward_backward):
            return settled
        compiled = settled is not None and settled.compiled
        fused = (arm for arm in arms if arm.plan.forward_backward and arm.compiled >= compiled)
        return next(fused, arms[0])

    def plainly(self, family: Family | None, run: Callable[[Call], R]) -> R:
        """Make a step of a shape that no trace is for."""
        if family is None or not self._weighs_traces:
            return self._ungraphed.plainly(run)
        started = time.perf_counter()
        result = self._ungraphed.plainly(run)
        family.trace_returns.ran(time.perf_counter() - started)
        return result

    def without_graph(
        self,
        step: StepInFlight,
        served: WithoutGraph,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        run: Callable[[Call], R],
    ) -> R:
        """Make a step of a shape that has no graph: with the kernels that were compiled for all shapes if they are
        faster, else as it is."""
        signature, family, lead, holds = served
        if family.may_leave_holes(signature.volume):
            self._capturing.close_holes()
        if lead is None:
            return self.plainly(family, run)
        settled = family.settled()
        if settled is not None and not settled.plan.forward_backward:
            self._updates.prepare()
            step.arm = settled
            return self._ungraphed.as_its_arm_says(step, run)
        looks = family.looks_at_compiled()
        if self._decisions.compiles and holds:
            if looks:
                return self._timed_with_code(step, signature, family, lead, run)
            if family.times_eager(signature.volume):
                return self._capturing.timed(step, lead, run, plain_call)
            if family.compiled_is_faster():
                signature.ran = weakref.ref(lead), True
                assert isinstance(lead.compiled, ReproducingTrace)
                return self._ungraphed.with_code(step, lead.compiled, run)
        elif self._decisions.compiles:
            family.steps_without_inductor += 1
            if lead.compiled is None and (lead.compile_next or self._code.is_wanted(family)):
                if family.is_typical(signature.volume):
                    return self._code.compile(step, signature, lead, args, kwargs, run)
                self._code.prepare_for(lead)  # shapes without graphs come by here
            if lead.compiled is not None and self._code.is_wanted_again(family, lead):
                again = lead.recompiled()
                result = self._code.compile(step, signature, again, args, kwargs, run)
                if again.compiled is not None:
                    family.leads_again(again)
                return result
        signature.ran = weakref.ref(lead), False
        if lead.compiled is not None:
            family.ran_with_eager()
        return self._ungraphed.plainly(run)

    def _timed_with_code(
        self,
        step: StepInFlight,
        signature: Signature,
        family: Family,
        lead: Variant,
        run: Callable[[Call], R],
    ) -> R:
        slower = not family.compiled_is_faster()
        result = self._capturing.timed(step, lead, run)
        if slower and family.compiled_is_faster():  # other shapes have run with eager kernels so far
            self._signatures.forget_kernels()
        signature.ran = weakref.ref(lead), True
        return result

    def wants_inductor(self, variant: Variant) -> None:
        """A kind of call is to have Inductor's kernels, and with it those that it shares a trace with."""
        self._code.ask_for(variant)

    def failed(self, variant: Variant, problem: Problem) -> None:
        """A capture has failed, or its first replay was another step than the one without a graph."""
        if variant.lead is not None and variant.family is not None:
            variant.family.failed(problem)

    def refused(self, variant: Variant) -> None:
        """A trace for many shapes is not legal: each shape gets a trace of its own now, as far as these go."""
        family = variant.family
        assert family is not None

        family.static = True
        family.drop(variant)
        self._signatures.drop(variant, doubled=False)


def _is_unused(variant: Variant) -> bool:
    """Whether a kind of call is on its way to a trace for one shape, and has got nowhere yet."""
    own = variant.lead is None and not variant.trace.dynamic and variant.choice is None
    return (
        own and not variant.captures and variant.compiled is None and variant.life.stage is not Stage.REFUSED
    )
