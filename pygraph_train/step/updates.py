"""The update of the parameters in all steps: its kernels, a graph of its own, and whether other graphs may hold it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from pygraph_train.identity import identities
from pygraph_train.optimizers.phase import OF_SHARDS, OptimizerPhase
from pygraph_train.optimizers.preparation import OptimizerPreparation
from pygraph_train.optimizers.program import optimized
from pygraph_train.optimizers.several import preparation_of
from pygraph_train.problems import Problem
from pygraph_train.selection.arms import NOTHING, WHOLE, Plan
from pygraph_train.step.plan import legal_plans
from pygraph_train.step.regions import Regions
from pygraph_train.step.training_run import TrainingRun
from pygraph_train.step.variants import Capture

__all__ = ["Updates"]


class Updates:
    """The update of the parameters, whoever graphs it.

    Args:
        training: the training run.
        regions: graphs of forward and backward, which plans without a graph of both have.

    Attributes:
        preparation: of the optimizer, once forward and backward were proved legal or given up.
        phase: graphs of the update alone, None where there can be none.
        between: what acts before the update, and keeps it out of the graph of the backward.
        made: updates that ran with the kernels of graphs.
        changes: how often captures were thrown away because of the optimizer.
        whole_steps: whether forward and backward may be in one graph.
        at_rest: whether the optimizer was given back because no plan that is kept has a graph of the update.
    """

    def __init__(self, training: TrainingRun, regions: Regions) -> None:
        self.preparation: OptimizerPreparation | None = None
        self.phase: OptimizerPhase | None = None
        self.between: str | None = None
        self.made = self.changes = 0
        self.whole_steps = True
        self.at_rest = self._closed = False
        self._training = training
        self._regions = regions

    def plans(self, *, forward_backward: bool = True) -> tuple[Plan, ...]:
        """The legal plans: see `legal_plans`."""
        plans = legal_plans(
            self._training.config,
            forward_backward=forward_backward,
            optimizer=self.phase is not None or self.at_rest,
            between=self.between is not None,
            regions=self._regions.problem is None,
        )
        if self._training.program.by_hand:  # all of it, or nothing
            plans = tuple(plan for plan in plans if plan in (WHOLE, NOTHING)) or (NOTHING,)
        return plans

    @property
    def fusable(self) -> bool:
        """Whether graphs of the backward may hold the update."""
        return self.phase is not None and self.whole_steps and WHOLE in self.plans()

    def prepare(self) -> None:
        """From the first legal step on, every update uses the kernels that graphs will hold."""
        training, program = self._training, self._training.program
        if self.preparation is not None or program.optimizer is None or self.at_rest or self._closed:
            return
        self.preparation = preparation = preparation_of(program.optimizer, training.engine)
        if training.config.optimizer == "off":
            preparation.close()
            return
        reason = preparation.reason or program.why_update_stays_outside(preparation)
        if reason is not None:
            preparation.close()
            training.note(Problem(f"the optimizer runs outside of the graph: {reason}"))
            return
        self.phase = OptimizerPhase(
            program, preparation, training.engine, training.config, training.report, training.addresses
        )
        if program.exchanges():
            self.phase.problem = OF_SHARDS
        self.between = program.acts_before_update()
        if self.fusable:
            preparation.settle(training.engine)
        elif self.whole_steps:
            training.note(Problem(f"the optimizer has a graph of its own: {self.between}"))

    def context(self) -> AbstractContextManager[None]:
        """Around a step without a graph: where graphs may hold the update, it runs with their kernels."""
        return self.preparation.prepared() if self.preparation is not None and self.fusable else nullcontext()

    def ran(self) -> None:
        """A step that is to be captured has made its update without a graph."""
        if self.preparation is not None:
            self.made += 1
            self.preparation.state.leave()

    def has_state(self) -> bool:
        """Whether the state that a capture will read exists."""
        return self.preparation is None or (self.made > 0 and self.preparation.state.as_left())

    def optimized(self) -> bytes:
        """What tells the parameters that the optimizer holds, in their order. Hot path."""
        return identities(optimized(self._training.program.optimizer))

    def state_is_that_of(self, capture: Capture) -> bool:
        """Whether the optimizer holds the parameters of a capture, and its state lies where that found it. Hot path.

        Where the capture holds the update, the parameters may be among the hyperparameters.
        """
        optimizer = self.preparation
        if optimizer is None or not capture.updates:
            return capture.optimized == self.optimized()
        if not optimizer.watches_parameters and capture.optimized != self.optimized():
            return False
        return capture.optimizer_generation == optimizer.generation and optimizer.state_unchanged()

    def hyperparameters_are_those_of(self, capture: Capture) -> bool:
        """Whether everything that a capture bakes in of optimizer and GradScaler is as it was. Hot path."""
        optimizer = self.preparation
        if optimizer is None or not capture.updates:
            return True
        now = optimizer.hyperparameters(), self._training.program.scaling.numbers()
        return bool(now == capture.hyperparameters)

    def release_graphs(self, plan: Plan, *, whole_steps: bool) -> None:
        """This plan was settled on: let go of graphs of the update that it has no use for.

        Args:
            whole_steps: whether any graph of forward and backward is left, or will be made. Otherwise the memory of
                those that there were, the largest of all, goes back: regions have a pool of their own. A graph of the
                update is captured again, because it lies among the others.
        """
        training, engine = self._training, self._training.engine
        give_back = engine.shares_memory and training.has_memory and not whole_steps
        if self.phase is not None and (give_back or not plan.optimizer_alone):
            self.phase.close()
        if give_back:
            training.has_memory = False
            engine.fresh_pool()()
            engine.trim()

    def rest(self) -> None:
        """No plan that is kept has a graph of the update: the loop's own call of the optimizer makes it from now on.

        The optimizer is as plain training would have it, until `serve` is called for another plan.
        """
        if self.phase is None or self._training.program.replication.group is not None:
            return
        self._give_back()
        self.preparation = None
        self.at_rest, self.made = True, 0

    def serve(self, plan: Plan) -> bool:
        """Get ready for a step of this plan. Returns whether the update can have the graph that the plan has of it."""
        if self.at_rest and (plan.forward_backward or plan.optimizer_alone):
            self.at_rest = False
            self.prepare()
        return self.phase is not None or not plan.optimizer_alone

    def close(self) -> None:
        """Give the optimizer back as it was, for good."""
        self.at_rest, self._closed = False, True
        self._give_back()

    def _give_back(self) -> None:
        if self.phase is not None:
            self.phase.close()
            self.phase = None
        if self.preparation is not None:
            self.preparation.close()
