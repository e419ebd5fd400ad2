"""Inductor's code for batches of changing shapes: when it is made, and which shapes it is for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from pygraph_train.selection.arms import NOTHING
from pygraph_train.step.capturing import Capturing
from pygraph_train.step.decisions import Decisions
from pygraph_train.step.families import Family
from pygraph_train.step.flight import StepInFlight
from pygraph_train.step.lifecycle import LifeEvent
from pygraph_train.step.program import Call
from pygraph_train.step.signatures import Signatures
from pygraph_train.step.training_run import TrainingRun
from pygraph_train.step.ungraphed import UngraphedSteps
from pygraph_train.step.updates import Updates
from pygraph_train.step.variants import Signature, Variant
from pygraph_train.tracing.trace import Trace

__all__ = ["CodeForShapes"]

R = TypeVar("R")


class CodeForShapes:
    """Has it made.

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

    def is_wanted(self, family: Family) -> bool:
        """Whether Inductor's kernels were asked for, and enough steps ran without them to be worth its time."""
        wanted = self._training.config.compile is True and self._decisions.compiles
        return wanted and not family.steps_before_compiling(self._training.step)

    def is_looked_for_again(self, family: Family, lead: Variant) -> bool:
        """Whether it has to be found out whether there is code of Inductor for a shape that ran with eager kernels."""
        return family.looks_again() or self.is_wanted_again(family, lead)

    def is_wanted_again(self, family: Family, lead: Variant) -> bool:
        """Whether Inductor is to compile for shapes that its code so far is not for."""
        return self.is_wanted(family) and family.may_recompile(lead)

    def holds(self, lead: Variant, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the compiled trace is for this call: Inductor may have set further guards."""
        program = self._training.program
        with program.context():
            return isinstance(lead.compiled, Trace) and lead.compiled.holds(program.function(), args, kwargs)

    def compile(
        self,
        step: StepInFlight,
        signature: Signature,
        lead: Variant,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        run: Callable[[Call], R],
    ) -> R:
        """Let Inductor compile the step, for all shapes that its trace holds for. Graphs of other kernels go."""
        self._updates.prepare()
        self.prepare_for(lead)
        self._give_back()
        lead.arm = self._decisions.arms(lead, self._updates.plans())[0]
        if not lead.arm.compiled:
            return self._ungraphed.plainly(run)
        lead.meets(LifeEvent.WANTS_INDUCTOR)
        times, family = self._training.times, lead.family
        before = times.compiling
        result = self._capturing.compiled(step, lead, args, kwargs, run)
        if family is not None and self._training.engine.name == "cuda":
            family.compile_seconds = times.compiling - before
        if lead.compiled is not None:  # for this shape, and perhaps not for the one that was traced
            self._signatures.moves(lead, signature)
            self._signatures.forget_kernels()
        return result

    def ask_for(self, variant: Variant) -> None:
        """A kind of call is to have Inductor's kernels, and with it those that it shares a trace with."""
        lead, family = variant.lead or variant, variant.family
        if family is not None and family.leads and lead.one_of_many:  # the latest trace is for all shapes
            lead = family.leads[0]
        if lead.compiled is not None:  # its code is not for this shape: see `Family.may_recompile`
            return
        self.prepare_for(lead)

    def _give_back(self) -> None:
        """Graphs of other kernels are gone: let go of the gradients that they have written, and of their memory."""
        left = {compiled for v in self._signatures.variants() for _, _, compiled in v.captures}
        self._training.addresses.keep(left)
        if not left:
            self._updates.release_graphs(NOTHING, whole_steps=False)

    def prepare_for(self, lead: Variant) -> None:
        """Inductor is to compile this trace: graphs of eager kernels go that others have of it or in its place."""
        family = lead.family
        lead.choice, lead.compile_next = None, True
        lead.forget_captures()
        if family is not None:
            family.steps_without_inductor = family.replays_without_inductor = 0
        for other in list(self._signatures.variants()):
            if other.compiled is not None:
                continue
            follows = other.lead is not None and other.lead.trace is lead.trace
            replaced = family is not None and other.family is family and lead.trace.dynamic
            if follows or (replaced and not other.trace.dynamic):
                self._signatures.drop(other, doubled=False)
                if other.family is not None:
                    other.family.drop(other)
