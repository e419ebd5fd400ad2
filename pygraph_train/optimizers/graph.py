"""`optimizer.step()` of a loop that the user wrote, as a graph of its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pygraph_train.config import PyGraphConfig
from pygraph_train.graphs.engine import Engine
from pygraph_train.optimizers.phase import OptimizerPhase
from pygraph_train.optimizers.preparation import OptimizerPreparation
from pygraph_train.optimizers.program import UNSCALED, UpdateProgram, optimized, why_update_is_plain
from pygraph_train.problems import Problem
from pygraph_train.report.announcements import give_reason
from pygraph_train.report.step_report import StepReport
from pygraph_train.torch_private.memory import local_tensor


class OptimizerGraph:
    """Runs one optimizer's step, from a graph where that is proved to be the same.

    Gradients are wherever the user's backward left them, see `OptimizerPhase`.

    Args:
        optimizer: stepped by the user's loop.
        engine: where graphs are made; may be shared with other optimizers.
        config: options.
        report: filled while running.
        scaler: the GradScaler of the loop, if there is one.

    Attributes:
        runs: steps made so far.
        replayed: whether the last one ran from a graph.
        suspended: whether something else looks after this optimizer, or several others do.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        engine: Engine,
        config: PyGraphConfig,
        report: StepReport,
        scaler: torch.amp.GradScaler | None = None,
    ) -> None:
        self.optimizer = optimizer
        self.runs = 0
        self.replayed = False
        self._others: list[object] = []  # that look after the optimizer
        self._engine = engine
        self._config = config
        self._report = report
        self._program = _OptimizerProgram(optimizer, engine.device, scaler)
        self._preparation: OptimizerPreparation | None = None
        self._phase: OptimizerPhase | None = None
        self._off = config.optimizer == "off"
        self._told = False
        self._held: Any = None  # by a hook of the optimizer

    def run(
        self,
        body: Callable[[], None],
        constants: Any = (),
        *,
        hold: bool = False,
        later: Callable[[], bool] = lambda: False,
    ) -> None:
        """Make one step.

        Args:
            body: the step in Python.
            constants: Python values that a capture of `body` bakes in.
            hold: whether nothing is done for a graph yet.
            later: see `OptimizerPhase.run`.
        """
        self.runs += 1
        self.replayed = False
        if hold or not self.serves():
            return body()
        assert self._preparation is not None
        if self._program.scaling.on and self._program.scaling.unscaled:
            if not self._told:
                self._told = True
                self._note(UNSCALED)
            with self._preparation.prepared():  # the kernels of the graph from the first step on
                return body()
        self._run_phase(body, constants, later)

    def settle(self) -> None:
        if self._preparation is not None:
            self._preparation.settle(self._engine)

    @property
    def over(self) -> bool:
        """Whether no further step can come from a graph, whoever looks after the optimizer."""
        return self._off

    def serves(self) -> bool:
        """Whether `run` may replay the next step. It is found out before the first one."""
        return not (self._off or self.suspended or self._refused())

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
        self._off = True
        self._give_back()
        if self._held is not None:
            self._held.remove()

    def _give_back(self) -> None:
        if self._phase is not None:
            self._phase.close()
            self._phase = None
        if self._preparation is not None:
            self._preparation.close()
            self._preparation = None

    def _run_phase(self, body: Callable[[], None], constants: Any, later: Callable[[], bool]) -> None:
        assert self._preparation is not None
        if self._phase is None:
            self._phase = OptimizerPhase(
                self._program,
                self._preparation,
                self._engine,
                self._config,
                self._report,
            )
        constants = constants, self._program.scaling.numbers()
        self._phase.run(body, constants, step=self.runs, later=later)
        self.replayed = self._phase.replayed
        if self.replayed:
            self._report.update_replayed()
        else:
            self._report.update_waited(self._phase.waits)
        if self._phase.problem is not None:
            self._turn_off(self._phase.problem)

    def _refused(self) -> bool:
        if self._preparation is None:
            self._preparation = OptimizerPreparation(self.optimizer, emulated=self._engine.name == "emulated")
            problem = why_update_is_plain(self._program, self._preparation)
            if problem is not None:
                self._turn_off(problem)
        return self._off

    def _turn_off(self, problem: Problem) -> None:
        self._off = True
        self._give_back()
        self._note(problem)

    def _note(self, problem: Problem) -> None:
        step = max(self.runs, 1)  # what is found out before the first one is about it
        give_reason(self._report, problem, step, self._config, warn=self._config.optimizer == "on")


class _OptimizerProgram(UpdateProgram):
    """Of an optimizer that a loop steps. The loop clips, and a scaler of sharded gradients is refused."""

    def why_update_stays_outside(self, preparation: OptimizerPreparation) -> str | None:
        reason = self.scaling.why_update_stays_outside(preparation)
        parameters = optimized(self.optimizer)
        if reason is None and self.scaling.on and any(local_tensor(p) is not p for p in parameters):
            return (
                "parameters are sharded, and the GradScaler asks all ranks whether gradients have overflowed"
            )
        return reason
