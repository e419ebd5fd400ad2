"""What a reason against a graph ends, whoever has found it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from pygraph_train.problems import Problem
from pygraph_train.selection.arms import NOTHING
from pygraph_train.step.decisions import Decisions
from pygraph_train.step.flight import Ran, StepInFlight
from pygraph_train.step.lifecycle import Life, LifeEvent, Scope, Stage, refusal
from pygraph_train.step.program import Call
from pygraph_train.step.signatures import Signatures
from pygraph_train.step.training_run import TrainingRun
from pygraph_train.step.ungraphed import UngraphedSteps
from pygraph_train.step.updates import Updates
from pygraph_train.step.variants import Signature, Variant
from pygraph_train.torch_private.tracing import why_no_traces
from pygraph_train.tracing.gradient_hooks import backward_hook
from pygraph_train.tracing.plain_parts import COMPILED_PART

__all__ = ["Refusing"]

R = TypeVar("R")


class Refusing:
    """Ends graphs, says why, and lets go of what they have used.

    Args:
        training, updates, decisions, signatures, ungraphed: of the runner.

    Attributes:
        off: why no graph holds forward and backward any more.
        stopped: whether not even the update has one.
    """

    def __init__(
        self,
        training: TrainingRun,
        updates: Updates,
        decisions: Decisions,
        signatures: Signatures,
        ungraphed: UngraphedSteps,
    ) -> None:
        self.off: Problem | None = None
        self.stopped = False
        self._training = training
        self._updates = updates
        self._decisions = decisions
        self._signatures = signatures
        self._ungraphed = ungraphed

    def ask_for_reasons(self) -> None:
        """On the first step: why forward and backward cannot be in a graph at all."""
        config, program = self._training.config, self._training.program
        off = [f"{p}='off'" for p in ("forward", "backward") if getattr(config, p) == "off"]
        off += ["fuse='off'"] if config.fuse == "off" and not off else []
        asked = Problem(f"{', '.join(off)} is set, so forward and backward share no graph") if off else None
        problem = (
            asked
            or why_no_traces()
            or program.replication.problem
            or program.acts_before_backward()
            or backward_hook(program.model)
        )
        if problem is not None:
            self.run(problem, asked=asked is not None)

    def taken_back(self, step: StepInFlight, run: Callable[[Call], R]) -> Ran[R]:
        """Make a step whose replay has raised an exception, and was taken back."""
        step.give_up()
        return Ran(self._ungraphed.plainly(run))

    def calls(
        self, step: StepInFlight, signature: Signature, variant: Variant | None, problem: Problem
    ) -> None:
        """Calls cannot have the graph that they were to have. `lifecycle.refusal` says what that ends.

        Args:
            variant: the kind of call; None where no trace is for it.
        """
        step.give_up()
        if problem.reason == COMPILED_PART.reason:
            self._ungraphed.no_regions(Problem("forward and backward get no graphs of their own either"))
        choice = None if variant is None else variant.choice
        first, replayed = self._signatures.is_first(signature), self._training.replays > 0
        scope = refusal(other_plans=choice is not None, first=first, replayed=replayed)
        if variant is not None and choice is not None:
            variant.keep_captures_of(choice.controller.best)
            choice.fail(str(problem))
        else:
            signature.life = Life(Stage.REFUSED)
            if variant is not None:
                variant.forget_captures()
                variant.meets(LifeEvent.REFUSED)
        if scope is Scope.RUN:
            self.run(problem)
        else:
            self._training.note(problem)

    def run(self, problem: Problem, *, everything: bool = False, asked: bool = False) -> None:
        """No graph holds forward and backward from now on.

        Args:
            everything: nor the update.
            asked: an option asked for it.
        """
        self.off = problem
        self._updates.whole_steps = False
        self._training.report.start_over()
        self._training.report.runs_with(NOTHING)  # until another plan is chosen
        if everything:
            self.stopped = True
            self._updates.close()
        self._training.note(problem, asked=asked)

    def refuses(self, problem: Problem | None) -> bool:
        """Whether there is a reason against graphs of forward and backward, from now on. Hot path."""
        if problem is not None:
            self.run(problem)
        return problem is not None

    def plain_step(self, problem: Problem, *, for_good: bool) -> None:
        """The present step has to run as it is, and with `for_good` all that follow."""
        if self.stopped:
            return
        if for_good:
            self.run(problem, everything=True)
        else:
            self._training.note(problem)

    def update(self, step: StepInFlight, problem: Problem) -> None:
        """The update has no graph from now on, and no other graph holds it."""
        if self._training.program.by_hand:
            step.give_up()
            return self.run(problem, everything=True)
        self._updates.close()
        self._ungraphed.choice = None
        step.give_up()
        report = self._training.report
        report.start_over()
        for variant in self._signatures.variants():
            variant.forget_captures()
            variant.choice, variant.arm = None, self._decisions.arms(variant, self._updates.plans())[0]
        if self.off is None:
            report.runs_with(self._updates.plans()[0])
        self._training.note(problem)

    def close(self) -> None:
        """The run is over."""
        self._updates.close()
        self.off = self.off or Problem("the runner was closed")
        self.stopped = True
