"""Makes training steps whose phases are replayed one by one, each when the loop asks for it."""

from __future__ import annotations

import math
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from pygraph_train.boundary import Boundary, done, quietly
from pygraph_train.config import PyGraphConfig
from pygraph_train.core.region import RARE, PhaseRegions
from pygraph_train.graphs.engine import Engine
from pygraph_train.optimizers.phase import OptimizerPhase
from pygraph_train.optimizers.preparation import OptimizerPreparation
from pygraph_train.optimizers.program import why_update_is_plain
from pygraph_train.optimizers.several import preparation_of
from pygraph_train.plans import NOTHING, SEPARATE, graphs_apart
from pygraph_train.problems import Problem
from pygraph_train.report.announcements import FORWARD_IS_OFF
from pygraph_train.report.step_report import StepReport
from pygraph_train.step.chooser import chooser_for, pays_of
from pygraph_train.step.module_call import COMPILED_PART, HOPELESS, compiled_part, tensors_of
from pygraph_train.step.outside import around_the_step, uninitialized
from pygraph_train.step.program import Call, StepProgram, plain_call
from pygraph_train.step.sizes import Sizes
from pygraph_train.step.training_run import TrainingRun
from pygraph_train.torch_private.stock_dynamo import CompiledFunction, left_untraced, traces, traces_of_others

R = TypeVar("R")

_turn = threading.RLock()

_HOPE = 40
"""Steps with reasons against graphs, and none with one, after which there is no hope."""

_PATIENCE = 12
"""Steps in a row without a graph and without a reason, after which one is given."""


class PhaseRunner:
    """Runs training steps; the forward, the backward and the update have graphs of their own.

    Args:
        training: whose steps they are.
    """

    def __init__(self, training: TrainingRun) -> None:
        engine, config, report = training.engine, training.config, training.report
        self._training = training
        known: Any = weakref.ref(self)  # Dynamo keeps regions, which must not keep the model
        self._boundary = Boundary(lambda why: known()._training.note(why), lambda: known().stop(_TOO_OFTEN))
        self._told: list[Problem] = []  # of regions, while Dynamo traces or the step runs
        alone = not training.program.replication.shared
        self._regions = PhaseRegions(
            engine,
            config,
            lambda: tensors_of(known()._training.program.model),
            self._told.append,
            self._boundary,
            delivers=alone,
            leads=training.program.differentiates,
        )
        self._regions.settle = lambda: known()._settle()
        self._compiled: CompiledFunction | None = None
        self._sizes = Sizes(fixed=self._regions.compiles, even=training.even)
        self._update_phase: OptimizerPhase | None = None
        self._preparation: OptimizerPreparation | None = None
        self._prepared = self._initialized = self._runs_plain = self.stopped = False
        self._hopeless = self._silent = 0
        self._chooser = chooser_for(config, engine, report.timed, training.left)
        if self._chooser is not None:
            self._regions.pays = pays_of(self._chooser)
        report.runs_with(SEPARATE)
        if config.forward == "off":
            report.note(FORWARD_IS_OFF)
        for phase in ("backward", "optimizer"):
            if getattr(config, phase) == "off":
                report.note(f"{phase}='off' is set, so it runs without a graph")
        self._why_plain = why_no_phases(training.program)
        if self._why_plain is not None:
            self._training.note(self._why_plain)

    # -- one step --------------------------------------------------------------------------------------

    def begin(self, updates: bool) -> StepOfPhases:
        """A training step begins, or one micro-batch of it, with or without an update."""
        self._training.step += 1
        self._training.report.step_began()
        return StepOfPhases(self, updates)

    def make(self, run: Callable[[Call], R]) -> R:
        """Make the step: `run` is called once, with the way in which its function is called."""
        regions = self._regions
        regions.replays = regions.plain = regions.parts = 0
        regions.end = regions.delivery.made = None
        if not _turn.acquire(blocking=False):  # a recording changes what all threads see
            self._training.note(_OTHER_THREAD)
            return run(plain_call)
        try:
            timing = self._chooser is not None and self.timing
            early = timing or self._training.step == 1
            call = self._call if self._may_replay() else self._early_call if early else plain_call
            config = self._training.config
            untouched = self._training.step <= config.warmup_steps or (timing and config.optimizer != "on")
            if not (self._prepared or untouched):
                self._prepare()
            if self._training.step > 1:
                if not timing:
                    return run(call)
                began = time.perf_counter()
                made = run(call)
                quietly(lambda: self.worked(time.perf_counter() - began, 1))
                return made
            before = traces_of_others()  # in the first step parts that the user compiled are traced
            made = run(call)
            quietly(lambda: self._look_for_compiled_part(before))
            return made
        finally:
            _turn.release()

    @property
    def timing(self) -> bool:
        """Whether the present step is a plain one that is timed."""
        chooses = self._why_plain is None and not self._runs_plain
        return chooses and self._chooser is not None and self._chooser.timing

    def worked(self, seconds: float, calls: int = 0) -> None:
        """See `Chooser.worked`; seconds below zero for what no graph replaces."""
        if self._chooser is not None:
            self._chooser.worked(seconds, calls)

    def _look_for_compiled_part(self, before: int) -> None:
        if traces_of_others() != before:
            self._why_plain = COMPILED_PART
            self._training.note(COMPILED_PART)

    def _may_replay(self) -> bool:
        training = self._training
        if self.stopped or self._runs_plain or training.config.forward == "off":
            return False  # eager kernels have no graph of a backward alone
        if self._why_plain is not None or (self._chooser is not None and self._chooser.plain):
            return False
        if training.step == 1:  # in which caches of the user's code fill
            return False
        if not self._initialized:
            self._initialized = uninitialized(training.program.model) is None
        if not self._initialized:
            return False
        problem = next(around_the_step(), None)
        if problem is not None:
            training.note(problem)
        return problem is None

    def _call(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the step's function through `torch.compile`. Hot path."""
        if self._compiled is None or self._compiled.fn != fn:
            self._compiled = CompiledFunction(fn, self._regions)
            self._compiled.around = self._sizes.dynamic
        chooser = self._chooser
        self._compiled.patience = math.inf if chooser is None else chooser.patience
        made = self._compiled(*args, **kwargs)
        if chooser is not None and chooser.misses(self._regions.parts):
            left_untraced()
        return made

    def _early_call(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call it as it is, before Dynamo traces it."""
        quietly(lambda: self._sizes.look(args, kwargs))
        return plain_call(fn, args, kwargs)

    # -- the update --------------------------------------------------------------------------------------

    def _prepare(self) -> None:
        """From now on, updates run with the kernels that graphs hold."""
        self._prepared = True
        training, program = self._training, self._training.program
        if program.optimizer is None or self.stopped or training.config.optimizer == "off":
            return
        preparation = preparation_of(program.optimizer, training.engine)
        problem = why_update_is_plain(program, preparation)
        if problem is not None:
            preparation.close()
            training.note(problem)
            return
        self._preparation = preparation
        self._update_phase = OptimizerPhase(
            program, preparation, training.engine, training.config, training.report
        )

    def _settle(self) -> None:
        if self._preparation is not None:
            self._preparation.settle(self._training.engine)

    def _awaits_graphs(self) -> bool:
        """Whether those of forward and backward may still come."""
        off = self._runs_plain or self._training.config.forward == "off"
        return self._why_plain is None and not off and self._regions.awaited

    def _make_update(
        self, step: StepOfPhases, body: Callable[[], None], constants: Callable[[], Any], at_once: bool
    ) -> None:
        training, phase = self._training, self._update_phase
        scaling = training.program.scaling
        if phase is None or self._preparation is None:
            return body()
        if scaling.on and scaling.unscaled:
            with self._preparation.prepared():
                return body()
        given = constants(), scaling.numbers() if scaling.on else ()
        made = self._regions.delivery.made if at_once else None
        phase.run(body, given, step=training.step, later=self._awaits_graphs, made=made)
        step.update_replayed = phase.replayed
        if phase.replayed:
            training.report.update_replayed()
        else:
            training.report.update_waited(phase.waits)
        if phase.problem is not None:
            training.note(phase.problem)
            self._drop_update()

    def _drop_update(self) -> None:
        phase, self._update_phase = self._update_phase, None
        if phase is not None:
            phase.close()
        if self._preparation is not None:
            self._preparation.close()

    def _finish(self, step: StepOfPhases) -> None:
        training, regions = self._training, self._regions
        while self._told:
            training.note(self._told.pop(0))
        chooser = self._chooser
        missed = chooser is not None and chooser.misses(regions.parts)
        if missed and training.replays:  # else another reason stands against all steps
            training.note(RARE)
        graphed = regions.replays > 0 and not regions.plain and not missed
        step.replayed = graphed
        plan = graphs_apart(graphed, graphed and training.config.backward != "off", step.update_replayed)
        training.report.step_ended(plan, updated=step.updates)
        self._hopeless = self._hopeless + 1 if not graphed and regions.hopeless else 0
        if self._hopeless == HOPELESS:
            regions.close()
            self._runs_plain = True
        regions.report_to(training.report, training.step)
        speaks = regions.replays or training.reasons or training.config.forward == "off"
        self._silent = 0 if speaks else self._silent + 1
        if self._silent == training.config.warmup_steps + _PATIENCE:
            training.note(NO_GRAPH)
        training.replays += graphed
        training.report.forward_ended(training.step, replayed=graphed)
        if chooser is None or self.stopped or self._runs_plain or self._why_plain is not None:
            return
        if (why := chooser.step_ended(graphed, regions.parts, traces())) is not None:
            self.stop(why) if not chooser.waits else training.note(why)

    # -- what else loops ask -----------------------------------------------------------------------------

    def count(self, updated: bool = True) -> None:
        """A step was made without this runner."""
        self._training.step_made_elsewhere(updated)

    @property
    def at_rest(self) -> bool:
        """Whether all further steps are the loop's own. Those of several processes are not: they exchange gradients."""
        return self.stopped and not self._training.program.replication.shared

    @property
    def hopeless(self) -> bool:
        """Whether many steps have brought reasons and no replay, and more are tried."""
        run = self._training
        waits = self._chooser is not None and self._chooser.waits
        return not (self.stopped or waits) and run.step >= _HOPE and run.reasons > 0 and not run.replays

    def stop(self, problem: Problem) -> None:
        """Run every further step without a graph, and say why."""
        self.stopped = True
        self._regions.close()
        self._drop_update()
        self._training.report.runs_with(NOTHING)
        self._training.note(problem)

    def close(self) -> None:
        """Release every graph and give the optimizer back as it was."""
        self.stopped = True
        quietly(self._regions.close, self._drop_update, self._training.engine.close)


_OTHER_THREAD = Problem(
    "another thread of this process was in its training step", fix="Start a process for each training"
)


def why_no_phases(program: StepProgram) -> Problem | None:
    """Why forward and backward of such a step get no graphs."""
    return program.replication.problem or compiled_part(program.model)


NO_GRAPH = Problem(
    "Dynamo finds no graph of this step that serves the next one: it breaks the graph, or traces it anew in each step",
    fix="explain and TORCH_LOGS=recompiles,graph_breaks say where. A number that the step changes is a usual cause",
)
_TOO_OFTEN = Problem("pygraph-train has failed too often in this training")


class StepOfPhases:
    """One training step, or one micro-batch of it.

    Attributes:
        updates: whether the optimizer steps after it.
        replayed: whether forward and backward came from graphs.
        update_replayed: whether the update did.
    """

    __slots__ = ("_runner", "replayed", "update_replayed", "updates")

    def __init__(self, runner: PhaseRunner, updates: bool) -> None:
        self._runner, self.updates = runner, updates
        self.replayed = self.update_replayed = False

    @property
    def graphs_update(self) -> bool:
        """Whether the update has to go through `update`."""
        return self._runner._update_phase is not None

    def update(
        self, body: Callable[[], None], constants: Callable[[], Any] = tuple, *, at_once: bool = False
    ) -> Callable[[], None]:
        """What makes the optimizer phase, from its own graph where there is one. Nothing is executed yet.

        Args:
            body: the phase in Python, which says what it executes.
            constants: what gives the Python values that a capture of `body` bakes in.
            at_once: whether nothing else happens between the backward and it.
        """
        runner = self._runner

        def made() -> None:
            body()
            done(None)

        make = partial(runner._make_update, self, made, constants, at_once)
        return partial(runner._boundary.make, make, made)

    def finish(self) -> None:
        """The step has ended, its update included."""
        self._runner._boundary.make(partial(self._runner._finish, self), lambda: None)


def runner_for(
    program: StepProgram,
    config: PyGraphConfig,
    engine: Engine,
    report: StepReport,
    *,
    left: Callable[[], float] = lambda: math.inf,
    even: Callable[[], bool] = lambda: False,
) -> PhaseRunner:
    """What makes the steps of a training.

    Args: as the attributes of `TrainingRun`.
    """
    return PhaseRunner(TrainingRun(program, config, engine, report, left, even))
