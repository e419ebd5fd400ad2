"""A training step from its call to its end: `begin`, the forward and backward, `update`, `finish`."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pygraph_train.boundary import Boundary, done, once
from pygraph_train.gradients.places import Source
from pygraph_train.optimizers.preparation import OptimizerPreparation
from pygraph_train.optimizers.program import UNSCALED
from pygraph_train.problems import Problem
from pygraph_train.selection.arms import FORWARD_BACKWARD, NOTHING, SPLIT, WHOLE, Arm, Phase, Plan
from pygraph_train.step.choice import Choice
from pygraph_train.step.plan import PositionInAccumulation
from pygraph_train.step.program import Call, plain_call
from pygraph_train.step.regions import Regions
from pygraph_train.step.training_run import TrainingRun
from pygraph_train.step.turns import in_turn
from pygraph_train.step.updates import Updates

__all__ = ["NO_GRAPH", "Ran", "Replayed", "StepInFlight", "made_once"]

R = TypeVar("R")

NO_GRAPH = Arm(NOTHING)


@dataclass(slots=True)  # to make a frozen one takes three times as long
class Replayed:
    """The step ran from a graph.

    Attributes:
        outputs: the program's tree of results, as ordinary tensors.
        updated: whether the optimizer's step was part of the graph.
    """

    outputs: Any
    updated: bool


@dataclass(frozen=True)
class Ran(Generic[R]):
    """The step ran without a graph; `result` is what the caller's `run` returned."""

    result: R


def made_once(run: Callable[[Call], R], boundary: Boundary) -> Callable[[Call], R]:
    """`run`, a whole step without a graph. Where a way to call its function fails, the function is called as it is."""

    def running(call: Call) -> R:
        def called(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            return boundary.make(call, plain_call, fn, args, kwargs)

        result = run(call if call is plain_call else called)
        done(Ran(result))
        return result

    return running


class StepInFlight:
    """One training step, or one micro-batch of it. Made by `StepRunner.begin`.

    Args:
        position: where it stands in gradient accumulation.
        under_way: the comparison of plans that the step before belongs to, if its update has not been made yet.
        training, updates, regions: of the runner.
        leave: called with the reason why the update has no graph any more.
        boundary: of the runner.

    Attributes:
        began: when, by `time.perf_counter`.
        arm: what it runs with.
        choice: the comparison of plans that it counts for, None when for none.
        replayed: whether forward and backward came from a graph.
        given_up: whether no step that is called like this one will have a graph of both.
    """

    __slots__ = (
        "_boundary",
        "_leave",
        "_regions",
        "_training",
        "_update_replayed",
        "_updates",
        "_whole",
        "arm",
        "began",
        "choice",
        "given_up",
        "position",
        "replayed",
        "under_way",
    )

    def __init__(
        self,
        position: PositionInAccumulation,
        under_way: Choice | None,
        training: TrainingRun,
        updates: Updates,
        regions: Regions,
        leave: Callable[[StepInFlight, Problem], None],
        boundary: Boundary,
    ) -> None:
        self.began = time.perf_counter()
        self.position = position
        self.under_way = under_way
        self.arm = NO_GRAPH
        self.choice: Choice | None = None
        self.replayed = self.given_up = False
        self._update_replayed = False
        self._whole: bool | None = None
        self._training = training
        self._updates = updates
        self._regions = regions
        self._leave = leave
        self._boundary = boundary

    def count_for(self, choice: Choice) -> None:
        """Count the step for a comparison; only a whole step, not a micro-batch, may switch to another arm."""
        if self.position.fresh or self._training.program.optimizer is None:
            if choice.quiet:
                choice.quiet -= 1
                return
            choice.begin()
        elif choice is not self.under_way:
            return
        self.choice = choice
        choice.start()

    def came_from_graph(self, *, updated: bool) -> None:
        """Forward and backward came from one graph, with the update if `updated`. Only the report asks for it."""
        self._whole = updated

    def give_up(self) -> None:
        """It runs without a graph of forward and backward after all, and counts for nothing."""
        self.arm, self.choice, self._whole = NO_GRAPH, None, None

    @property
    def may_rest(self) -> bool:
        """Whether later steps are left to the plain loop where steps without graphs are kept: see `Resting`."""
        return self._training.program.replication.group is None

    @property
    def graphs_update(self) -> bool:
        """Whether the update has to go through `update`."""
        return self._updates.phase is not None

    def update_begins(self) -> None:
        """The update begins, of a step whose adapter does not need `update`."""
        self._training.clock.mark("O")

    def update(self, body: Callable[[], None], constants: Any = ()) -> None:
        """Make the optimizer phase, from its own graph where the plan says so.

        Args:
            body: the phase in Python: everything from here to the next step that a graph may hold.
            constants: Python values that a capture of `body` bakes in.
        """
        made = once(body)
        self._boundary.make(lambda: self._update(made, constants), made)

    @in_turn
    def _update(self, body: Callable[[], None], constants: Any) -> None:
        self._training.clock.mark("O")
        updates, plan = self._updates, self.arm.plan
        phase = updates.phase
        if phase is None:
            if plan.optimizer_alone and self.choice is not None:
                self.choice.as_planned = False
            return body()
        if not plan.optimizer_alone:
            # all plans use the same kernels, and keep the state where these want it
            assert updates.preparation is not None
            if self.choice is not None and not plan.graphs and self.may_rest:
                return self._without_preparation(self.choice, updates.preparation, body)
            with updates.preparation.prepared():
                return body()
        if self._training.program.scaling.unscaled:
            assert updates.preparation is not None
            with updates.preparation.prepared():
                body()
            return self._has_no_graph(UNSCALED)
        of_regions = (Phase.BACKWARD,) in plan.graphs
        source: Source = "graph" if plan.forward_backward else "regions" if of_regions else "autograd"
        baked = constants, self._training.program.scaling.numbers()
        phase.run(body, baked, source=source, step=self._training.step)
        if phase.replayed:
            self._update_replayed = True
            self._training.report.update_replayed()
        elif self.choice is not None:
            self.choice.as_planned = False
        if phase.problem is not None:
            self._leave(self, phase.problem)
        elif phase.restless is not None:
            self._has_no_graph(phase.restless)

    def _without_preparation(
        self, choice: Choice, preparation: OptimizerPreparation, body: Callable[[], None]
    ) -> None:
        """Make the update of a step that is compared. What prepares it is gone where steps without graphs are kept."""
        entered = time.perf_counter()
        with preparation.prepared():
            began = time.perf_counter()
            body()
            ended = time.perf_counter()
        choice.add((ended - began) - (time.perf_counter() - entered))

    def finish(self) -> None:
        """The step has ended, its update included."""
        self._boundary.make(self._finish, lambda: None)

    def _finish(self) -> None:
        self._training.report.step_ended(self._ran(), updated=self.position.update)
        choice = self.choice
        if choice is None:
            return
        choice.stop()
        plan = self.arm.plan
        if plan.regions:
            if (problem := self._regions.problem) is not None:
                return self._has_no_graph(problem)
            choice.as_planned &= self._regions.as_planned()
        choice.as_planned &= self.replayed or not plan.forward_backward
        if self.position.update or self._training.program.optimizer is None:
            self.choice = None
            choice.end()

    def _ran(self) -> Plan:
        """What of the step ran from graphs."""
        if self._whole is None:
            return self._regions.runs.plan(optimizer=self._update_replayed)
        if self._whole:
            return WHOLE
        return SPLIT if self._update_replayed else FORWARD_BACKWARD

    def _has_no_graph(self, problem: Problem) -> None:
        """The arm that is compared cannot run from its graphs, and the others go on."""
        choice, self.choice = self.choice, None
        self._training.note(problem)
        if choice is not None:
            choice.fail(str(problem))
