"""Makes training steps whose phases are replayed one by one, each when the loop asks for it."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from pygraph_train.boundary import STEP, Boundary, executes, once, quietly
from pygraph_train.config import PyGraphConfig
from pygraph_train.core.region import PhaseRegions
from pygraph_train.gradients.places import Source
from pygraph_train.graphs.devices import let_go
from pygraph_train.graphs.engine import Engine
from pygraph_train.optimizers.phase import OptimizerPhase
from pygraph_train.optimizers.preparation import OptimizerPreparation
from pygraph_train.optimizers.several import preparation_of
from pygraph_train.problems import Problem
from pygraph_train.report.step_report import CaptureRecord, StepReport
from pygraph_train.selection.arms import Plan, graphs_apart
from pygraph_train.selection.controller import Switch
from pygraph_train.step.flight import Ran, StepInFlight
from pygraph_train.step.outside import around_the_step, uninitialized
from pygraph_train.step.plan import PositionInAccumulation
from pygraph_train.step.program import Call, StepProgram, plain_call
from pygraph_train.step.runner import StepRunner
from pygraph_train.step.training_run import TrainingRun
from pygraph_train.torch_private.stock_dynamo import CompiledFunction
from pygraph_train.torch_private.tracing import why_no_traces

__all__ = ["Flight", "PhaseRunner", "Runner", "runner_for"]

_HOPE = 40
"""Steps with reasons against graphs, and none with one, after which there is no hope."""

_REPLAYS_BEFORE_TRIAL = 20
_WINDOW = 6
"""Steps with graphs, and then as many without, that are timed once."""

_PATIENCE = 12
"""Steps without a graph and without a reason, after which one is given."""


class PhaseRunner:
    """Runs training steps; the forward, the backward and the update have graphs of their own.

    It has the methods of `StepRunner`, and serves the same loops.

    Args:
        training: whose steps they are.
    """

    def __init__(self, training: TrainingRun) -> None:
        engine, config, report = training.engine, training.config, training.report
        self._training = training
        self._boundary = Boundary(self._training.note, lambda: self.stop(_TOO_OFTEN))
        self._told: list[Problem] = []  # of regions, while Dynamo traces or the step runs
        self._regions = PhaseRegions(engine, config, self._tensors, self._told.append)
        self._compiled: CompiledFunction | None = None
        self._update_phase: OptimizerPhase | None = None
        self._preparation: OptimizerPreparation | None = None
        self._prepared = self.stopped = False
        self._trial = _Trial(engine)
        report.runs_with("{F} {B} {O}")
        reason = self._why_none()
        if reason is not None:
            self.stop(reason)

    def _why_none(self) -> Problem | None:
        program = self._training.program
        if program.replication.group is not None or program.replication.sharded:
            return Problem("steps of several processes run without graphs on this torch")
        if program.by_hand:
            return why_no_traces() or Problem(
                "a step that makes its backwards itself has no phases to replay"
            )
        return program.replication.problem

    def _tensors(self) -> list[Any]:
        model = self._training.program.model
        return [*model.parameters(), *model.buffers()]

    # -- one step --------------------------------------------------------------------------------------

    def begin(self, position: PositionInAccumulation) -> StepOfPhases:
        """A training step begins, or one micro-batch of it."""
        self._training.step_began()
        return StepOfPhases(self, position)

    def make(
        self,
        step: Flight,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        run: Callable[[Call], Any],
        flat: Any = None,
    ) -> Ran[Any]:
        """Make the step: `run` is called once, with the way in which its function is called."""
        regions = self._regions
        regions.replays, regions.plain, regions.hooked = 0, 0, False
        call = self._call if self._may_replay() else plain_call
        if not self._prepared and self._training.step > self._training.config.warmup_steps:
            self._prepare()
        executes(STEP)
        return Ran(run(call))

    def _may_replay(self) -> bool:
        training = self._training
        if self.stopped or self._trial.without_graphs or training.config.forward == "off":
            return False  # eager kernels have no graph of a backward alone
        if training.step == 1:  # in which caches of the user's code fill
            return False
        if uninitialized(training.program.model) is not None:
            return False
        problem = next(around_the_step(), None)
        if problem is not None:
            training.note(problem)
        return problem is None

    def _call(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the step's function through `torch.compile`. Hot path."""
        if self._compiled is None or self._compiled.fn != fn:
            self._compiled = CompiledFunction(fn, self._regions)
        return self._compiled(*args, **kwargs)

    # -- the update --------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        """From now on, updates run with the kernels that graphs hold."""
        self._prepared = True
        training, program = self._training, self._training.program
        if program.optimizer is None or self.stopped or training.config.optimizer == "off":
            return
        preparation = preparation_of(program.optimizer, training.engine)
        reason = preparation.reason or program.why_update_stays_outside(preparation)
        if reason is not None:
            preparation.close()
            training.note(Problem(f"the optimizer runs outside of the graph: {reason}"))
            return
        preparation.settle(training.engine)
        self._preparation = preparation
        self._update_phase = OptimizerPhase(
            program, preparation, training.engine, training.config, training.report, training.addresses
        )

    def update(self, step: StepOfPhases, body: Callable[[], None], constants: Any) -> None:
        """The optimizer phase of a step."""
        made = once(body)
        self._boundary.make(lambda: self._make_update(step, made, constants), made)

    def _make_update(self, step: StepOfPhases, body: Callable[[], None], constants: Any) -> None:
        phase, scaling = self._update_phase, self._training.program.scaling
        if phase is None or self._preparation is None:
            return body()
        if scaling.unscaled:
            with self._preparation.prepared():
                return body()
        regions = self._regions
        source: Source = (
            "graph" if regions.replays and not regions.plain and not regions.hooked else "autograd"
        )
        phase.run(body, (constants, scaling.numbers()), source=source, step=self._training.step)
        if phase.replayed:
            step.update_replayed = True
            self._training.report.update_replayed()
        for problem in filter(None, (phase.problem, phase.restless)):
            self._training.note(problem)
        if phase.problem is not None:
            self._drop_update()

    def _drop_update(self) -> None:
        phase, self._update_phase = self._update_phase, None
        if phase is not None:
            phase.close()
        if self._preparation is not None:
            self._preparation.close()

    def finish(self, step: StepOfPhases) -> None:
        """The step has ended."""
        self._boundary.make(lambda: self._finish(step), lambda: None)

    def _finish(self, step: StepOfPhases) -> None:
        training, regions = self._training, self._regions
        told = self._told[:]
        self._told.clear()
        for problem in told:
            training.note(problem)
        graphed = regions.replays > 0 and not regions.plain
        step.replayed = graphed
        plan = graphs_apart(graphed, graphed and training.config.backward != "off", step.update_replayed)
        training.report.step_ended(plan, updated=step.position.update)
        if regions.recorded:
            record = CaptureRecord("{F} {B}", regions.seconds, -1, False, training.step)
            training.report.captured(record)
            regions.recorded, regions.seconds = 0, 0.0
        if training.step == training.config.warmup_steps + _PATIENCE and not (
            training.replays or training.reasons
        ):
            training.note(_NO_GRAPH)
        if graphed:
            training.replays += 1
            training.clock.replayed(training.step)
        elif training.step > 1 and not self._trial.without_graphs:
            training.report.ran_without_graph(time.perf_counter() - step.began)

        if training.engine.name == "cuda" and not self.stopped:
            slower = self._trial.step_ended(graphed)
            if slower is not None:
                self.stop(Problem(slower))

    # -- what else loops ask -----------------------------------------------------------------------------

    def count(self, updated: bool = True) -> None:
        """A step was made without this runner."""
        self._training.step_made_elsewhere(updated)

    def take_rest(self) -> float:
        """So many further steps are the loop's own. Those of several processes are not: they exchange gradients."""
        return math.inf if self.stopped and self._training.program.replication.group is None else 0

    @property
    def hopeless(self) -> bool:
        """Whether many steps have brought reasons and no replay."""
        run = self._training
        return run.step >= _HOPE and run.reasons > 0 and not run.replays

    def share(self, flag: bool) -> list[bool] | None:
        """Ranks exchange nothing here."""
        return None

    def stop(self, problem: Problem) -> None:
        """Run every further step without a graph, and say why."""
        self.stopped = True
        self._regions.close()
        self._drop_update()
        self._training.report.runs_with(Plan())
        self._training.note(problem)

    def close(self) -> None:
        """Release every graph and give the optimizer back as it was."""
        self.stopped = True
        quietly(self._regions.close, self._drop_update)
        let_go(self._training.engine)


_NO_GRAPH = Problem(
    "Dynamo finds no graph of this step that serves the next one: it breaks the graph, or traces it anew in each step",
    fix="TORCH_LOGS=recompiles,graph_breaks says where. A list that the step appends to is a usual cause",
)
_TOO_OFTEN = Problem("pygraph-train has failed too often in this training")


class _Trial:
    """Finds out once whether steps are faster without their graphs.

    Attributes:
        without_graphs: whether the next step runs without graphs, to be timed.
    """

    def __init__(self, engine: Engine) -> None:
        self.without_graphs = False
        self._engine = engine
        self._steps = 0
        self._began = self._seconds = 0.0

    def step_ended(self, replayed: bool) -> str | None:
        """A step has ended. Returns why no further one is to have graphs, None while they may."""
        if self._steps > _REPLAYS_BEFORE_TRIAL + 2 * _WINDOW or (not replayed and not self.without_graphs):
            return None
        self._steps += 1
        place = self._steps - _REPLAYS_BEFORE_TRIAL
        if place in (0, _WINDOW, _WINDOW + 1, 2 * _WINDOW + 1):
            self._engine.synchronize()
            now = time.perf_counter()
            seconds, self._began = now - self._began, now
            if place == _WINDOW:
                self._seconds, self.without_graphs = seconds, True  # the first one without is not timed
            elif place == 2 * _WINDOW + 1:
                self.without_graphs = False
                if seconds < 0.98 * self._seconds:
                    return (
                        f"steps are faster without graphs: {seconds / _WINDOW * 1e3:.2f} instead of "
                        f"{self._seconds / _WINDOW * 1e3:.2f} ms"
                    )
        return None


class StepOfPhases:
    """One training step, or one micro-batch of it.

    Attributes:
        position: where it stands in accumulation.
        replayed: whether forward and backward came from graphs.
        update_replayed: whether the update did.
    """

    __slots__ = ("_runner", "began", "given_up", "position", "replayed", "update_replayed")

    def __init__(self, runner: PhaseRunner, position: PositionInAccumulation) -> None:
        self._runner, self.position = runner, position
        self.replayed = self.update_replayed = self.given_up = False
        self.began = time.perf_counter()

    @property
    def graphs_update(self) -> bool:
        """Whether the update has to go through `update`."""
        return self._runner._update_phase is not None

    def update_begins(self) -> None:
        """The update begins, of a step whose adapter does not need `update`."""

    def update(self, body: Callable[[], None], constants: Any = ()) -> None:
        """Make the optimizer phase, from its own graph where there is one."""
        self._runner.update(self, body, constants)

    def finish(self) -> None:
        """The step has ended, its update included."""
        self._runner.finish(self)


Runner = StepRunner | PhaseRunner
Flight = StepInFlight | StepOfPhases


def runner_for(
    program: StepProgram,
    config: PyGraphConfig,
    engine: Engine,
    report: StepReport,
    steps_left: Callable[[], float | None] = lambda: None,
    *,
    announce: Callable[[str], None] = lambda text: None,
    on_decision: Callable[[Switch], None] = lambda switch: None,
) -> Runner:
    """What makes the steps of a training: a `StepRunner` where Dynamo of this torch can be changed as it needs.

    Args: as the attributes of `TrainingRun`; training that does not end has no number of steps left.
    """
    kind = PhaseRunner
    return kind(TrainingRun(program, config, engine, report, steps_left, announce, on_decision))
