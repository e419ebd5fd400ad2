"""A training loop that the user wrote: its models run as regions of the compile backend, its optimizers as graphs.

What Accelerate and the transformers Trainer share. Nothing here knows either of them.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from pygraph_train.boundary import SETTING_UP, Boundary, arranged, done, once, quietly, surely
from pygraph_train.config import PyGraphConfig
from pygraph_train.graphs import Engine, make_engine
from pygraph_train.graphs.devices import let_go
from pygraph_train.integrations.first_calls import FirstCalls
from pygraph_train.integrations.living import Living
from pygraph_train.integrations.loop_report import LoopReport
from pygraph_train.integrations.regioned_call import RegionedCall
from pygraph_train.integrations.rounds import Rounds
from pygraph_train.integrations.silence import Silence
from pygraph_train.optimizers.graph import OptimizerGraph
from pygraph_train.parallel.sharing import replication_of
from pygraph_train.problems import Problem, PyGraphError
from pygraph_train.report.announcements import NO_DEVICE, graphs_are_off, switched_off, tell_why_off
from pygraph_train.report.backend_report import RegionRuns
from pygraph_train.report.step_report import Fallback
from pygraph_train.selection.arms import NOTHING
from pygraph_train.step.compile_wait import CompileWait, compiled_before
from pygraph_train.step.whole_loop import WholeLoop
from pygraph_train.torch_private.dynamo import compiled_call, is_optimized_module
from pygraph_train.torch_private.tracing import why_no_traces

__all__ = ["Loop"]

log = logging.getLogger("pygraph_train")


class Loop:
    """Everything that was taken over from one loop, and given back by `release`.

    Modules and optimizers go when the loop's owner lets go of them, as those of each fold do in a cross-validation:
    they hold what was made for them.

    Args:
        config: options.
        device: of the models.
        refused: why nothing of this loop can be graphed, None when nothing speaks against it.
        steps_left: how many steps the loop will still make, None when unknown.

    Attributes:
        over: whether nothing of this loop can have a graph any more.

    Raises:
        ValueError: the engine asked for cannot work on that device.
    """

    def __init__(
        self,
        config: PyGraphConfig,
        device: torch.device,
        refused: Problem | None = None,
        steps_left: Callable[[], float | None] = lambda: None,
    ) -> None:
        self.config = config
        self.report = surely(LoopReport, SETTING_UP)
        self.boundary = Boundary(self._failed, self.release)
        self._taken: Living[nn.Module] = Living()
        self._calls: Living[RegionedCall] = Living()
        self._optimizers: Living[OptimizerGraph] = Living()
        self._rounds = Rounds(self._optimizers)
        self._kept: list[OptimizerGraph] = []  # those that their optimizers cannot hold
        self._device = device
        self._engine: Engine | None = None
        self._whole: WholeLoop | None = None
        self._wait: CompileWait | None = None
        self._waiting: CompileWait | None = None  # the same while it is open
        self._steps = 0
        self._counts = (0, 0)
        self._runs = RegionRuns(self.report.regions)
        self._silence = Silence(self._calls, self.report, device, config.warmup_steps + 1)
        self._last: float | None = None
        self._replayed: list[bool] = []  # for each update of the present step
        self.over = False
        self._counts_steps = True
        self.active = False
        self.why_off = NO_DEVICE  # where there is no engine
        self.shared: Living[nn.Module] = Living()
        if switched_off() or config.engine == "off":
            self.report.note(graphs_are_off("training runs as you wrote it"))
            tell_why_off(config)
            return
        if arranged(lambda: self._start(config, device, refused, steps_left), self._failed) is None:
            self.active, self._engine, self._whole, self._wait = False, None, None, None

    def _start(
        self,
        config: PyGraphConfig,
        device: torch.device,
        refused: Problem | None,
        steps_left: Callable[[], float | None],
    ) -> bool:
        self._engine = make_engine(config.engine, device)
        if self._engine is None:
            self.report.note(NO_DEVICE)
            tell_why_off(config)
            return True
        if refused is not None:
            self.refuse(refused.reason, refused.fix)
            if config.on_failure == "raise":
                raise PyGraphError(str(refused))
            self._engine = None
            self.why_off = str(refused)
            return True
        self.active = True
        self.report.began(self._engine.name)
        self._whole = WholeLoop(config, self._engine, self.report, self._calls, self._optimizers)
        if CompileWait.wanted(config, self._engine.name):
            self._wait = CompileWait(self._calls, steps_left, self._engine.synchronize, self._end_the_wait)
            self.report.what_waits = self._wait.sentence
        return True

    # -- taking over --------------------------------------------------------------------------------

    def take_module(self, module: nn.Module, **compile_options: Any) -> None:
        """Run forward and backward of a module as regions, where nothing speaks against it."""
        arranged(lambda: self._take_module(module, **compile_options), self._failed)

    def _take_module(self, module: nn.Module, **compile_options: Any) -> None:
        whole = self._whole
        if not self.active or whole is None or any(taken is module for taken in self._taken):
            return
        config = self.config
        if config.region_phases == "none":
            self.report.note(
                "forward='off', backward='off' is set, so forward and backward run without graphs"
            )
        elif (name := replication_of(module).name) != "":
            self.shared.add(module)
            self.report.note(
                f"forward and backward run without graphs under {name}. Use a graphed step, which holds them"
            )
        elif (lack := why_no_traces()) is not None:
            self.refuse(lack.reason, lack.fix)
        elif config.compile is False:
            self.report.note(
                "compile=False is set, so forward and backward run without graphs: their graphs need Inductor"
            )
        elif is_optimized_module(module) or compiled_call(module):
            self.refuse(
                f"{type(module).__name__} is already compiled, so its forward and backward get no graphs of "
                "pygraph-train",
                "Pass the module without torch.compile: pygraph-train uses Inductor's kernels, too",
            )
        else:
            options = {
                "engine": config.engine,
                "phases": config.region_phases,
                "indirection": config.indirection,
                "warmup_runs": config.warmup_steps,
                "max_signatures": config.max_signatures,
                "on_failure": config.on_failure,
            }

            def first(name: str) -> FirstCalls:
                return FirstCalls(name, lambda: self._steps, self.report.fell_back)

            self.over = False
            whole.is_another()
            keeps_code = config.compile is True or bool(compile_options)
            wait = None if keeps_code or module in compiled_before else self._wait
            if wait is not None:
                wait.begin_anew()
                self._waiting = wait
            call = RegionedCall(
                module,
                options,
                first,
                self._tell,
                whole,
                keeps_code=keeps_code,
                wait=wait,
                boundary=self.boundary,
                **compile_options,
            )
            self._taken.add(module)
            self._calls.add(call)

    def take_optimizer(
        self, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None = None
    ) -> OptimizerGraph | None:
        """A graph for the optimizer's step; None where graphs are off."""
        if self._engine is None:
            return None
        engine = self._engine
        return arranged(lambda: self._take_optimizer(optimizer, engine, scaler), self._failed)

    def _take_optimizer(
        self, optimizer: torch.optim.Optimizer, engine: Engine, scaler: torch.amp.GradScaler | None
    ) -> OptimizerGraph:
        graph = self._graph_of(optimizer, engine, scaler)
        self._has_other_optimizers()
        self._optimizers.add(graph)
        self.over = False
        return graph

    def _graph_of(
        self, optimizer: torch.optim.Optimizer, engine: Engine, scaler: torch.amp.GradScaler | None
    ) -> OptimizerGraph:
        graph = OptimizerGraph(optimizer, engine, self.config, self.report, scaler)
        if not graph.lives_with_its_optimizer():
            self._kept.append(graph)
        return graph

    def _has_other_optimizers(self) -> None:
        self._rounds.begin_anew()
        self._is_another()

    def _is_another(self) -> None:
        """What was found out about the loop as a whole holds no longer."""
        if self._whole is not None:
            self._whole.is_another()

    def take_other_optimizer(
        self,
        graph: OptimizerGraph,
        optimizer: torch.optim.Optimizer,
        scaler: torch.amp.GradScaler | None = None,
    ) -> OptimizerGraph | None:
        """Another optimizer takes the place of the one that a graph is for. Where graphs are off, there is none."""
        if self._engine is None or graph not in self._optimizers:
            return None
        graph.close()
        self._kept = [kept for kept in self._kept if kept is not graph]
        other = self._graph_of(optimizer, self._engine, scaler)
        self._has_other_optimizers()
        self._optimizers.replace(graph, other)
        self.over = False
        return other

    def give_up_optimizer(self, optimizer: torch.optim.Optimizer, to: object) -> None:
        """Something else graphs this optimizer's step from now on. It exists for as long as the optimizer does."""
        self._has_other_optimizers()
        for graph in self._optimizers:
            if graph.optimizer is optimizer:
                graph.suspend(to)

    def take_back_optimizer(self, optimizer: torch.optim.Optimizer, giver: object) -> None:
        """One that graphed it does so no longer; the loop does again where no other one is left."""
        self._has_other_optimizers()
        for graph in self._optimizers:
            if graph.optimizer is optimizer:
                graph.resume(giver)

    def refuse(self, reason: str, fix: str = "") -> None:
        """Note why something runs without a graph."""
        self.report.fell_back(Fallback(reason, None, fix, self._steps))

    def release(self) -> None:
        """Give modules and optimizers back as they were, and release all graphs. The report stays."""
        wait, whole, engine, self._waiting = self._wait, self._whole, self._engine, None
        if wait is not None:
            quietly(wait.close)
        quietly(self.report.freeze)
        if whole is not None:
            quietly(whole.close)
        quietly(*[call.remove for call in self._calls], *[graph.close for graph in self._optimizers])
        if engine is not None:
            quietly(lambda: let_go(engine))
        quietly(self._taken.clear, self._calls.clear, self._optimizers.clear)
        self._kept.clear()
        self._last = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Inside, modules run as they are, and steps are counted elsewhere: something else traces or captures them."""
        before, self._counts_steps = self._counts_steps, False
        if self._whole is not None:
            self._whole.disturbed()
        calls = [(call, call.paused) for call in self._calls]
        for call, _ in calls:
            call.paused = True
        try:
            yield
        finally:
            self._counts_steps = before
            for call, was_paused in calls:
                call.paused = was_paused

    # -- while training -----------------------------------------------------------------------------

    def step(self, graph: OptimizerGraph | None, body: Callable[[], None], constants: Any = ()) -> None:
        """Make the step of one optimizer, and count it: one round of all optimizers is one training step."""
        if graph is None:
            return body()
        if self.over:
            return self._step(graph, body, constants)
        made = once(body)
        self.boundary.make(lambda: self._step(graph, made, constants), made)

    def _step(self, graph: OptimizerGraph, body: Callable[[], None], constants: Any) -> None:
        if self.over:
            body()
            if self._rounds.ends_with(graph):
                self._steps += 1
                self.report.step_began()
            return
        whole = self._whole
        if whole is not None and whole.rests:
            body()
            if self._counts_steps and self._rounds.ends_with(graph):
                self._steps += 1
                self.report.step_began()
                self.report.step_ended(NOTHING, updated=True)
                if self._waiting is not None:
                    self._waiting.step_ended()
                whole.step_ended(self._steps)
            return
        self.update(graph, body, constants)
        done(None)
        if self._counts_steps and self._rounds.ends_with(graph):
            self.step_ended()
            if whole is not None:
                whole.step_ended(self._steps)

    def update(self, graph: OptimizerGraph, body: Callable[[], None], constants: Any = ()) -> None:
        """Make the step of one optimizer, in a training step that ends with `step_ended`."""
        made = once(body)
        self.boundary.make(lambda: self._update(graph, made, constants), made)

    def _update(self, graph: OptimizerGraph, body: Callable[[], None], constants: Any) -> None:
        graph.run(body, constants)
        if self._counts_steps and not graph.suspended:
            self._replayed.append(graph.replayed)

    def step_ended(self) -> None:
        """Count a training step, in which any number of optimizers made any number of steps.

        While no optimizer was taken over nobody knows whether the step made an update.
        """
        self.boundary.make(self._end_step, lambda: None)

    def _end_step(self) -> None:
        replayed, self._replayed = self._replayed, []
        self._count(all(replayed) and bool(self._optimizers))

    def _count(self, updates: bool) -> None:
        """Count a training step. Looks at clocks and counters only.

        Args:
            updates: whether all updates of the step were replayed.
        """
        report, now = self.report, time.perf_counter()
        self._steps += 1
        report.step_began()
        aside = self._whole is not None and self._whole.without_regions
        if (wait := self._waiting) is not None:
            wait.step_ended()
            aside |= wait.under_way
        replays, plain = report.region_counts()
        broken = aside or replays > self._counts[0]
        if self._silence.goes_on(broken, self._tell, ran=plain > self._counts[1]):
            self._give_back()
        regions = (replays > self._counts[0]) and plain == self._counts[1]
        self._counts = (replays, plain)
        report.step_ended(self._runs.plan(optimizer=updates), updated=True)
        if not regions or not updates:
            self._last = None
            return
        interval = None if self._last is None else now - self._last
        report.replayed(self._steps, since_start=now - report.started, interval=interval)
        self._last = now

    def _end_the_wait(self, compiles: bool) -> None:
        """It is decided whether modules that ran as they are so far are compiled."""
        self._waiting = None
        for call in self._calls:
            call.paused = False
            if not compiles and call.waits:
                call.remove()
        if compiles:  # gradients of plain steps may have moved too often for a graph of the update
            for graph in self._optimizers:
                graph.wake("regions", only=False)
        self._is_another()
        what = "Inductor compiles the modules" if compiles else "the modules stay as they are"
        log.info("pygraph: step %d: %s", self._steps, what)

    def _give_back(self) -> None:
        """No graph can hold these modules: each call of one would be looked at in vain."""
        for call in self._calls:
            if call.changing and not call.removed:
                call.remove()
        graphs = self._optimizers
        given_back = all(call.removed for call in self._calls)
        self.over = given_back and bool(graphs) and all(g.over and not g.suspended for g in graphs)

    def _failed(self, problem: Problem) -> None:
        """The library has failed in itself."""
        self.refuse(problem.reason, problem.fix)

    def _tell(self, problem: Problem) -> None:
        if self.report.fell_back(Fallback(problem.reason, problem.where, problem.fix, self._steps)):
            log.info("pygraph: %s", problem)
        if self.config.on_failure == "raise":
            raise PyGraphError(str(problem))
