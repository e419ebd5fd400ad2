"""Steps whose forward and backward share no graph: plain ones, and those whose regions have graphs of their own."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import TypeVar

from pygraph_train.optimizers.program import optimized
from pygraph_train.problems import NotLegal, Problem
from pygraph_train.step.choice import Choice
from pygraph_train.step.decisions import Decisions
from pygraph_train.step.flight import Ran, StepInFlight
from pygraph_train.step.program import Call, plain_call
from pygraph_train.step.regions import Regions
from pygraph_train.step.training_run import TrainingRun
from pygraph_train.step.updates import Updates
from pygraph_train.tracing.refusals import may_be_of_step
from pygraph_train.tracing.reproducing import ReproducingTrace

__all__ = ["UngraphedSteps"]

R = TypeVar("R")


class UngraphedSteps:
    """Runs them.

    Args:
        training, updates, regions, decisions: of the runner.

    Attributes:
        choice: the comparison of plans for steps that can have no graph of both, once it is known what there is to
            compare.
        over: whether nothing of any further step can have a graph.
    """

    def __init__(
        self, training: TrainingRun, updates: Updates, regions: Regions, decisions: Decisions
    ) -> None:
        self.choice: Choice | None = None
        self.over = False
        self._training = training
        self._updates = updates
        self._regions = regions
        self._decisions = decisions

    def no_regions(self, problem: Problem) -> None:
        """Neither forward nor backward gets a graph of its own."""
        self._regions.problem = problem

    def plainly(self, run: Callable[[Call], R]) -> R:
        """Make a step as the user wrote it. Its update may have other kernels, see `StepInFlight.update`."""
        if not self._training.program.by_hand:
            return run(plain_call)
        with self._updates.context():  # the step makes its updates itself
            return run(plain_call)

    def with_code(self, step: StepInFlight, code: ReproducingTrace, run: Callable[[Call], R]) -> R:
        """Make a step with code of Inductor that was just found to hold for it.

        Gradients are added up in the stream of this step, as in plain training, where nothing of it is left to keep
        its autograd graph: see `Engine.warm_up`.
        """
        program, adds = self._training.program, None
        if code.effects or not program.detaches_results:
            owned = optimized(program.optimizer) or program.model.parameters()
            adds = self._training.engine.warm_up(owned if step.position.fresh else ())
        code.known_to_hold = True
        try:
            with self._updates.context(), adds or nullcontext():
                return run(code)
        finally:
            code.known_to_hold = False

    def before_refusal(
        self, step: StepInFlight, refused: NotLegal, run: Callable[[Call], R]
    ) -> Ran[R] | None:
        """Make a step whose capture or comparison has raised an exception, before that counts against graphs.

        Where the step raises as well, as for a bad batch, nothing speaks against graphs.

        Returns:
            None where the reason is not such an exception. The step was not made then.
        """
        training = self._training
        if training.config.on_failure == "raise" or training.program.replication.group is not None:
            return None
        if not may_be_of_step(refused):
            return None
        step.give_up()
        return Ran(self.plainly(run))

    def as_its_arm_says(self, step: StepInFlight, run: Callable[[Call], R]) -> R:
        """Make a step of a plan without a graph of both."""
        if not step.arm.plan.regions:
            settled = self.choice is not None and self.choice.controller.settled
            return self.plainly(lambda call: run(self._regions.make_way(call, for_long=settled)))
        return self._regions.run(run, watched=step.choice is not None)

    def with_the_best_plan(self, step: StepInFlight, run: Callable[[Call], R]) -> R:
        """Make a step that can have no graph of both: its regions and its update may still have graphs."""
        step.given_up = True
        if self.over:
            return self.plainly(run)
        self._updates.prepare()
        if self.choice is None:
            if self._regions.problem is None and not self._regions.found:
                return self._regions.run(run)
            if (problem := self._regions.problem) is not None:
                self._training.report.note(str(problem))
            plans = self._updates.plans(forward_backward=False)
            if len(plans) == 1 and not plans[0].graphs:
                self.over = True
                return self.plainly(run)
            self.choice = self._decisions.choice(None, plans, self._training.steps_made)
        if self.choice.arm.plan.regions and self._regions.problem is not None:
            self.choice.quiet = 0  # the arm cannot be run any more
        step.count_for(self.choice)
        step.arm = self.choice.arm
        if step.choice is not None and step.arm.plan.graphs and step.may_rest:
            # where steps without graphs are kept, they do without what was done up to here
            step.choice.add(time.perf_counter() - step.began)
        if not self._updates.serve(step.arm.plan):  # the optimizer was refused while it had no graph
            self.choice = None
            step.give_up()
            return self.plainly(run)
        return self.as_its_arm_says(step, run)
