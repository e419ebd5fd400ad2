"""The step of an optimizer as a graph of its own, from its preparation to what the report is told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pygraph_train.config import PyGraphConfig
from pygraph_train.graphs.engine import Engine
from pygraph_train.optimizers.phase import OptimizerPhase
from pygraph_train.optimizers.preparation import OptimizerPreparation
from pygraph_train.optimizers.program import UNSCALED, UpdateProgram, optimized, why_update_is_plain
from pygraph_train.optimizers.several import preparation_of
from pygraph_train.problems import Problem
from pygraph_train.report.step_report import StepReport
from pygraph_train.torch_private.memory import local_tensor


class OptimizerGraph:
    """Runs one optimizer's step, from a graph where that is proved to be the same.

    Gradients are wherever the user's backward left them, see `OptimizerPhase`.

    Args:
        program: for the optimizer, and what else its step writes.
        engine: where graphs are made; may be shared with other optimizers.
        config: options.
        report: filled while running.
        tell: called with each reason against a graph.

    Attributes:
        optimizer: which is stepped.
        replayed: whether the last step ran from a graph.
        over: whether no further step can come from a graph, whoever looks after the optimizer.
        suspended: whether something else looks after this optimizer, or several others do.
    """

    def __init__(
        self,
        program: UpdateProgram,
        engine: Engine,
        config: PyGraphConfig,
        report: StepReport,
        tell: Callable[[Problem], object],
    ) -> None:
        assert program.optimizer is not None
        self.optimizer = program.optimizer
        self.replayed, self.over = False, config.optimizer == "off"
        self._others: list[object] = []  # that look after the optimizer
        self._program, self._engine, self._config = program, engine, config
        self._report, self._tell = report, tell
        self._preparation: OptimizerPreparation | None = None
        self._phase: OptimizerPhase | None = None  # where it is prepared
        self._told = False
        self._held: Any = None  # by a hook of the optimizer

    def run(
        self,
        body: Callable[[], None],
        constants: Any = (),
        *,
        step: int,
        later: Callable[[], bool] = lambda: False,
        made: Any = None,
    ) -> None:
        """Make one step. Hot path.

        Args:
            body: the step in Python.
            constants: Python values that a capture of `body` bakes in.
            step: the training step, for the report.
            later: see `OptimizerPhase.run`.
            made: see `Delivery.made`.
        """
        self.replayed = False
        if self._phase is None and not self.serves():
            return body()
        phase, preparation, scaling = self._phase, self._preparation, self._program.scaling
        assert phase is not None and preparation is not None
        if scaling.on and scaling.unscaled:
            if not self._told:
                self._told = True
                self._tell(UNSCALED)
            with preparation.prepared():  # the kernels of the graph from the first step on
                return body()
        given = constants, scaling.numbers() if scaling.on else ()
        phase.run(body, given, step=step, later=later, made=made)
        self.replayed = phase.replayed
        self._report.update_ended(phase.replayed, phase.waits)
        if phase.problem is not None:
            self._turn_off(phase.problem)

    def serves(self) -> bool:
        """Whether `run` may replay the next step. Before the first one this is found out."""
        if self._preparation is None and not (self.over or self._others):
            self._preparation = preparation_of(self.optimizer, self._engine)
            problem = why_update_is_plain(self._program, self._preparation)
            if problem is not None:
                self._turn_off(problem)
            else:
                given = self._program, self._preparation, self._engine, self._config, self._report
                self._phase = OptimizerPhase(*given)
        return self._phase is not None

    def settle(self) -> None:
        """See `OptimizerPreparation.settle`."""
        if self._preparation is not None:
            self._preparation.settle(self._engine)

    @property
    def suspended(self) -> bool:
        return bool(self._others)

    def suspend(self, other: object) -> None:
        """Release the graph and give the optimizer back as it was, until `resume` was called as often.

        Args:
            other: looks after the optimizer from now on. It exists for as long as this object, or until `resume`.
        """
        self._others.append(other)
        self._give_back()

    def resume(self, other: object) -> None:
        """One of the others looks after the optimizer no longer."""
        self._others = [one for one in self._others if one is not other]

    def lives_with_its_optimizer(self) -> bool:
        """Let the optimizer hold this object until `close`, if it can: both go when nobody needs the optimizer."""
        try:
            self._held = self.optimizer.register_load_state_dict_post_hook(self._stay)
        except AttributeError:  # a wrapper of another library
            return False
        return True

    def _stay(self, optimizer: torch.optim.Optimizer) -> None:
        """A hook of the optimizer that does nothing. No copy of the optimizer has it."""

    def close(self) -> None:
        """Release the graph and give the optimizer back as it was. Later steps run as they are."""
        self.over = True
        self._give_back()
        if self._held is not None:
            self._held.remove()

    def _give_back(self) -> None:
        phase, preparation = self._phase, self._preparation
        self._phase = self._preparation = None
        if phase is not None:
            phase.close()
        if preparation is not None:
            preparation.close()

    def _turn_off(self, problem: Problem) -> None:
        self.over = True
        self._give_back()
        self._tell(problem)


class SteppedByLoop(UpdateProgram):
    """Of an optimizer that a loop steps. The loop clips, and a scaler of sharded gradients is refused."""

    def why_update_stays_outside(self, preparation: OptimizerPreparation) -> str | None:
        reason = self.scaling.why_update_stays_outside(preparation)
        parameters = optimized(self.optimizer)
        if reason is None and self.scaling.on and any(local_tensor(p) is not p for p in parameters):
            return (
                "parameters are sharded, and the GradScaler asks all ranks whether gradients have overflowed"
            )
        return reason
