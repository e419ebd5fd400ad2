"""Makes training steps whose phases are replayed one by one, each when the loop asks for it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from pygraph_train.boundary import Boundary, done, quietly
from pygraph_train.config import PyGraphConfig
from pygraph_train.optimizers.graph import OptimizerGraph
from pygraph_train.patches import held_weakly, nothing
from pygraph_train.plans import NOTHING, SEPARATE
from pygraph_train.problems import Problem
from pygraph_train.report.announcements import FORWARD_IS_OFF
from pygraph_train.report.step_report import StepReport
from pygraph_train.step.loop import Loop
from pygraph_train.step.program import Call, StepProgram, plain_call
from pygraph_train.step.traced_call import TracedCall, compiled_part
from pygraph_train.torch_private.stock_dynamo import CompiledFunction, left_untraced

R = TypeVar("R")

_turn = threading.RLock()

_OTHER_THREAD = Problem(
    "another thread of this process was in its training step", fix="Start a process for each training"
)


class PhaseRunner(Loop):
    """Runs training steps that are one function; the forward, the backward and the update have graphs of their own.

    Args:
        program: the step.
        config, report, left, even: see `Loop`.

    Attributes:
        stopped: whether every further step runs without a graph.
        replayed: whether forward and backward of the present step came from graphs.
        update_replayed: whether its update did.

    Raises:
        ValueError: the engine asked for cannot work on that device.
    """

    stopped = replayed = update_replayed = _prepared = _updates = _updated = False
    _graph: OptimizerGraph | None = None
    _compiled: CompiledFunction | None = None  # whichever object the function of the step is

    def __init__(self, program: StepProgram, config: PyGraphConfig, report: StepReport, **known: Any) -> None:
        super().__init__(config, program.device, report=report, **known)
        self._program = program
        self._told: list[Problem] = []  # of regions, while Dynamo traces or the step runs
        if not self.active:
            return
        self.boundary = Boundary(held_weakly(self.tell), held_weakly(self.give_up))
        given: dict[str, Any] = {"delivers": not program.replication.shared, "leads": program.differentiates}
        regions = self.regions_of(program.model, self._told.append, **given)
        self._function = TracedCall(program.model, regions, self.even)
        self._calls.add(self._function)
        report.runs_with(SEPARATE)
        if config.forward == "off":  # eager kernels have no graph of a backward alone
            report.note(FORWARD_IS_OFF)
            self._function.remove()
        for phase in ("backward", "optimizer"):
            if getattr(config, phase) == "off":
                report.note(f"{phase}='off' is set, so it runs without a graph")
        problem = why_no_phases(program)
        if problem is not None:
            self._function.remove()
            self.tell(problem)

    # -- one step --------------------------------------------------------------------------------------

    def begin(self, updates: bool) -> None:
        """A training step begins, or one micro-batch of it, with or without an update."""
        self.steps, self.within = self.steps + 1, True
        self.report.step_began()
        self._updates, self._updated = updates, False
        self.replayed = self.update_replayed = False

    def make(self, run: Callable[[Call], R]) -> R:
        """Make the step: `run` is called once, with the way in which its function is called."""
        function, config, chooser = self._function, self.config, self.chooser
        regions = function.regions
        regions.replays = regions.plain = regions.parts = regions.eager = 0
        regions.end = regions.delivery.made = None
        if not _turn.acquire(blocking=False):  # a recording changes what all threads see
            self.tell(_OTHER_THREAD)
            return run(plain_call)
        try:
            first, timing = self.steps == 1, chooser is not None and self.timing
            waits = first or regions.closed or (chooser is not None and chooser.plain)
            call: Call = plain_call
            if not waits and function.may_replay():
                call = self._traced
            elif first or timing:
                call = self._early
            untouched = self.steps <= config.warmup_steps or (timing and config.optimizer != "on")
            if not (self._prepared or untouched):
                self._prepare()
            if first:
                return function.first(partial(run, call))
            if chooser is None or not timing:
                return run(call)
            began = time.perf_counter()
            made = run(call)
            quietly(lambda: chooser.worked(time.perf_counter() - began, 1))
            return made
        finally:
            _turn.release()

    def _traced(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call the function of the step through `torch.compile`. Hot path."""
        function, compiled = self._function, self._compiled
        if compiled is None or compiled.fn != fn:
            compiled = self._compiled = CompiledFunction(fn, function.regions)
            compiled.around = function.sizes.dynamic
        compiled.patience = function.patience
        made = compiled(*args, **kwargs)
        if self.chooser is not None and self.chooser.misses(function.regions.parts):
            left_untraced()
        return made

    def _early(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call it as it is, before Dynamo traces it."""
        quietly(lambda: self._function.sizes.look(args, kwargs))
        return plain_call(fn, args, kwargs)

    @property
    def timing(self) -> bool:
        """Whether the present step is a plain one that is timed."""
        return self.chooser is not None and self.chooser.timing and not self._function.regions.closed

    def _prepare(self) -> None:
        """From now on, updates run with the kernels that graphs hold."""
        self._prepared = True
        if self._program.optimizer is None or self.stopped:
            return
        graph = self.graph_of(self._program)
        if graph.serves():
            self._graph = graph
            self._optimizers.add(graph)

    @property
    def graphs_update(self) -> bool:
        """Whether the update has to go through `updating`."""
        return self._graph is not None and not self._graph.over

    def updating(
        self, body: Callable[[], None], constants: Callable[[], Any] = tuple, *, at_once: bool = False
    ) -> Callable[[], None]:
        """What makes the optimizer phase, from its own graph where there is one. Nothing is executed yet.

        Args:
            body: the phase in Python, which says what it executes.
            constants: what gives the Python values that a capture of `body` bakes in.
            at_once: whether nothing else happens between the backward and it.
        """

        def made() -> None:
            body()
            done(None)

        return partial(self.boundary.make, partial(self._make_update, made, constants, at_once), made)

    def _make_update(self, body: Callable[[], None], constants: Callable[[], Any], at_once: bool) -> None:
        graph, self._updated = self._graph, True
        if graph is None or graph.over:
            return body()
        made = self._function.regions.delivery.made if at_once else None
        graph.run(body, constants(), step=self.steps, later=self.awaits_graphs, made=made)
        self.update_replayed = graph.replayed

    def finish(self) -> None:
        """The step has ended, its update included."""
        self.boundary.make(self._finish, nothing)

    def _finish(self) -> None:
        while self._told:
            self.tell(self._told.pop(0))
        calls = () if self._function.regions.closed else [self._function]
        updated = self._updates and (self._updated or not self.graphs_update)  # else the loop left it out
        self.replayed = self.count(calls, updates=self.update_replayed, updated=updated)

    # -- what else loops ask -----------------------------------------------------------------------------

    @property
    def at_rest(self) -> bool:
        """Whether all further steps are the loop's own. Those of several processes are not: they exchange gradients."""
        return self.stopped and not self._program.replication.shared

    def stop(self, problem: Problem) -> None:
        """Run every further step without a graph, and say why."""
        self.give_up()
        self.tell(problem)

    def give_up(self) -> None:
        self.stopped = True
        quietly(self._function.remove, *[graph.close for graph in self._optimizers])
        self.report.runs_with(NOTHING)

    def release(self) -> None:
        self.stopped = True
        super().release()


def why_no_phases(program: StepProgram) -> Problem | None:
    """Why forward and backward of such a step get no graphs."""
    return program.replication.problem or compiled_part(program.model)
