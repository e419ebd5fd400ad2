"""A training loop that the user wrote: forwards and backwards of its modules, and steps of its optimizers, from graphs.

What loops of Accelerate, Fabric, the transformers Trainer and manual optimization share. Nothing here knows them.
"""

from __future__ import annotations

import math
import time
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pygraph_train.boundary import SETTING_UP, Boundary, arranged, once, quietly, surely
from pygraph_train.config import PyGraphConfig
from pygraph_train.core.node import leaves_of, made_directly
from pygraph_train.core.region import RARE, PhaseRegions
from pygraph_train.graphs import make_engine
from pygraph_train.graphs.engine import Engine
from pygraph_train.optimizers.graph import OptimizerGraph, SteppedByLoop
from pygraph_train.optimizers.program import UpdateProgram
from pygraph_train.parallel.replication import DTENSORS, Replication, is_sharded, replication_of
from pygraph_train.parallel.votes import Votes, ranks_of, released_first
from pygraph_train.patches import held_weakly, nothing, standing_in
from pygraph_train.plans import NOTHING, graphs_apart
from pygraph_train.problems import Problem
from pygraph_train.report.announcements import FORWARD_IS_OFF, give_reason, switched_off, tell_why_off
from pygraph_train.report.loop_report import LoopReport
from pygraph_train.report.step_report import StepReport
from pygraph_train.step.chooser import Chooser, chooser_for
from pygraph_train.step.living import Living
from pygraph_train.step.module_call import ModuleCall
from pygraph_train.step.rounds import Rounds
from pygraph_train.step.traced_call import TracedCall, compiled_part, tensors_of
from pygraph_train.torch_private.stock_dynamo import traces

_NO_OPTIMIZER = 20
"""Steps without an optimizer after which the report says that there is none."""

_HELD = 100
"""Calls of a module after which nothing is waited for that would time the loop's first steps."""

_HOPE = 60
"""Steps in which modules were called and no graph came, after which no further call is looked at."""

_WITH_BACKWARD = 3
"""How many times the host's time in a forward the forward and its backward take: 3 to 6 on an H200."""

_PATIENCE = 20
"""Steps in a row without a graph of forward and backward, and without a reason, after which one is given."""

_HOPELESS = 3
"""Steps in a row in which no part may have a graph, after which forward and backward run as they are written: the
graphs that Dynamo makes are slower.
"""

NO_GRAPH = Problem(
    "Dynamo finds no graph of this step that serves the next one: it breaks the graph, or traces it anew in each step",
    fix="See where with explain and TORCH_LOGS=recompiles,graph_breaks. Often a number changes in each step",
)

_SMALL = Problem("the model has too few operations for graphs of forward and backward")

_UNSTEPPED = Problem(
    "the optimizer runs without a graph: the loop called step() of no optimizer that pygraph-train knows",
    fix="Pass the optimizer to accelerator.prepare (in Fabric: fabric.setup; to a GraphedStep: as optimizer=; in "
    "Lightning: step one of self.optimizers()). Of an optimizer that wraps another, pass the inner one",
)


class Loop:
    """Everything that was taken over from one loop, and given back by `release`.

    Modules and optimizers go when the loop's owner lets go of them, as those of each fold do in a cross-validation:
    they hold what was made for them.

    Args:
        config: options.
        device: of the models.
        refused: why nothing of this loop can be graphed, None when nothing speaks against it.
        report: filled while running; a new `LoopReport` where none is given.
        left: how many further steps there will be, infinity where nobody knows.
        even: whether all batches have the same number of rows.

    Attributes:
        config, report, even: as given.
        boundary: around each piece of a step.
        engine: where graphs are made, once there is one.
        chooser: whether they pay; None where they are made in any case.
        steps: how many there were so far.
        replays: of how many forward and backward came from graphs.
        reasons: how often something was told against a graph.
        within: whether a step that is made here has begun, and no other one has been made elsewhere since.
        active: whether anything of it may have graphs.
        within_step: whether a call is running that is one training step, or one micro-batch of it.
        over: whether nothing of this loop can have a graph any more.
        patience: after so many steps without an optimizer the report says that there is none.

    Raises:
        ValueError: the engine asked for cannot work on that device.
    """

    report: Any
    engine: Engine | None = None
    chooser: Chooser | None = None
    steps = replays = reasons = _silent = 0
    active = within = over = False
    _stepped = False  # whether any optimizer that was taken over has made a step
    _lost = False  # whether a part of the steps has no graph and is not looked at any more
    _votes: Votes | None = None

    def __init__(
        self,
        config: PyGraphConfig,
        device: torch.device,
        refused: Problem | None = None,
        *,
        report: StepReport | None = None,
        left: Callable[[], float] = lambda: math.inf,
        even: Callable[[], bool] = lambda: False,
    ) -> None:
        self.config, self.left, self.even = config, left, even
        self.report = report or surely(LoopReport, SETTING_UP)
        self.boundary = Boundary(held_weakly(self.tell), held_weakly(self.release))
        self._calls: Living[Any] = Living()
        self._optimizers: Living[OptimizerGraph] = Living()
        self._taken: Living[nn.Module] = Living()
        self._rounds = Rounds(self._optimizers)
        self._kept: list[OptimizerGraph] = []  # those that their optimizers cannot hold
        self._replayed: list[bool] = []  # for each update of the present step
        self._counts_steps, self.within_step = True, False
        self.patience = _NO_OPTIMIZER
        if arranged(lambda: self._start(device, refused), self.report.failed) is None:
            self.active, self.engine = False, None

    def _start(self, device: torch.device, refused: Problem | None) -> bool:
        engine = None if switched_off() else make_engine(self.config.engine, device)
        if engine is None:
            self.report.note(tell_why_off(self.config))
        elif refused is not None:
            self.tell(refused)
        else:
            self.active, self.engine = True, engine
            self.report.began(engine.name)
            if engine.name == "emulated" and self.config.compile is True:
                self.report.note("the emulated engine runs eager kernels: compile=True has no effect")
            self.chooser = chooser_for(self.config, engine, self.report.timed, self.left)
        return True

    def refuse(self, reason: str, fix: str = "") -> None:
        """Note why something runs without a graph. Nothing is raised."""
        self.reasons += 1
        self.report.failed(Problem(reason, fix=fix), self.steps)

    def tell(self, problem: Problem) -> None:
        """Say why something runs without a graph.

        Raises:
            PyGraphError: the user wants failures to be raised.
        """
        self.reasons += 1
        give_reason(self.report, problem, max(self.steps, 1), self.config)

    def regions_of(
        self,
        model: nn.Module,
        tell: Callable[[Problem], object],
        **options: Any,
    ) -> PhaseRegions:
        """What makes graphs of a model. Dynamo keeps it, so it keeps neither the model nor anything of this object.

        Args:
            model: whose tensors are trained.
            tell: called with each reason against a graph.
            **options: see `PhaseRegions`.
        """
        assert self.engine is not None
        known = weakref.ref(model)
        given = self.engine, self.config, lambda: tensors_of(known()), tell, self.boundary
        regions = PhaseRegions(*given, **options)
        regions.settle = held_weakly(self.settle)
        if self.chooser is not None:
            regions.pays = held_weakly(self.chooser.pays, True)
        return regions

    def graph_of(self, program: UpdateProgram) -> OptimizerGraph:
        """What makes an update from a graph. Its optimizer may keep it, and so it does not keep this object."""
        assert self.engine is not None
        return OptimizerGraph(program, self.engine, self.config, self.report, held_weakly(self.tell))

    # -- taking over --------------------------------------------------------------------------------

    def take_module(
        self,
        module: nn.Module,
        *,
        replication: Replication | None = None,
    ) -> None:
        """Run forward and backward of a module from graphs, where nothing speaks against it.

        Args:
            module: whose calls are taken over.
            replication: how processes share it, where a wrapper that holds it decides that.
        """
        arranged(lambda: self._take_module(module, replication), self.report.failed)

    def _take_module(self, module: nn.Module, replication: Replication | None) -> None:
        replication = replication or replication_of(module)
        if isinstance(module, DistributedDataParallel):  # its forward calls the module inside
            module = module.module
        gathers = replication.gathers and any(map(is_sharded, module.modules()))
        divided = gathers or replication.problem is DTENSORS
        if divided and self._votes is None:
            ranks = ranks_of(list(module.parameters()))
            if len(ranks) > 1:
                self._votes = Votes(list(ranks), joins=self.active)
                released_first(self)
            self.chooser = None  # by the clock of each process
        if not self.active or self.engine is None or any(taken is module for taken in self._taken):
            return
        refused = None if divided else replication.problem
        problem = refused or compiled_part(module)
        if self.config.forward == "off":
            self.report.note(FORWARD_IS_OFF)
        elif problem is not None:
            self.tell(problem)
        else:
            self.over = self._lost = False
            delivers, inference = gathers or not replication.shared, not gathers
            regions = self.regions_of(
                module, held_weakly(self.tell), leads=True, delivers=delivers, inference=inference
            )
            regions.votes = self._votes
            self._taken.add(module)
            call = ModuleCall(module, regions, self.even, gathers=gathers)
            if self.chooser is not None:
                call.held, call.paused = _HELD * self.chooser.plain, self.chooser.waits
            self._calls.add(call)

    def take_optimizer(
        self, optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None = None
    ) -> OptimizerGraph | None:
        """A graph for the optimizer's step; None where graphs are off.

        Args:
            optimizer: stepped by the loop.
            scaler: of the loop, if there is one.
        """
        return arranged(lambda: self._take_optimizer(optimizer, scaler), self.report.failed)

    def _take_optimizer(self, optimizer: torch.optim.Optimizer, scaler: Any) -> OptimizerGraph | None:
        if self.engine is None:
            return None
        graph = self.graph_of(SteppedByLoop(optimizer, self.engine.device, scaler))
        if not graph.lives_with_its_optimizer():
            self._kept.append(graph)
        self._rounds.begin_anew()
        self._optimizers.add(graph)
        self.over = False
        return graph

    def release(self) -> None:
        """Give modules and optimizers back as they were, and release all graphs. The report stays."""
        quietly(*[call.remove for call in self._calls], *[graph.close for graph in self._optimizers])
        if self.engine is not None:
            quietly(self.engine.close)
        quietly(self._taken.clear, self._calls.clear, self._optimizers.clear)
        self._kept.clear()

    def paused(self) -> AbstractContextManager[None]:
        """Inside, modules run as they are, and steps are counted elsewhere: something else traces or captures them."""
        calls = [(call, "paused", True) for call in self._calls]
        return standing_in([(self, "_counts_steps", False), *calls])

    def settle(self) -> None:
        """See `PhaseRegions.settle`."""
        quietly(*[graph.settle for graph in self._optimizers])

    def awaits_graphs(self) -> bool:
        """Whether the first ones of forward and backward may still come."""
        calls = list(self._calls)
        return bool(calls) and all(call.regions.awaited for call in calls)

    def made_elsewhere(self, updated: bool = True) -> None:
        """One more step, or micro-batch, without a graph, of which nothing else is known than whether it updated."""
        self.steps, self.within = self.steps + 1, False
        self.report.step_began()
        if not updated:
            self.report.step_ended(NOTHING, updated=False)

    # -- while training -----------------------------------------------------------------------------

    def made_backward(self, loss: Any, by: float) -> bool:
        """See `made_directly`."""
        return self.active and not self.over and made_directly(loss, by)

    def ends_of(self, loss: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Keyword arguments for `loss.backward`, which was called with these: without any, those of `leaves_of`."""
        if self.active and not (self.over or args or kwargs):
            quietly(lambda: kwargs.update(leaves_of(loss)))
        return kwargs

    def step(self, graph: OptimizerGraph | None, body: Callable[[], None]) -> None:
        """Make the step of one optimizer, and count it: one round of all optimizers is one training step."""
        if graph is None:
            return body()
        if self.over:
            body()
        else:
            self.update(graph, body)
        if self._counts_steps and not self.within_step:
            self.boundary.make(partial(self._end_round, graph), nothing)

    def _end_round(self, graph: OptimizerGraph) -> None:
        if self._rounds.ends_with(graph):
            self.made_elsewhere() if self.over else self._end_step()

    def with_closure(
        self, graph: OptimizerGraph | None, body: Callable[..., Any], closure: Any
    ) -> tuple[Callable[[], Any], list[Any]]:
        """The step of an optimizer to which the loop may give a closure. A graph serves it without one: it runs here.

        Args:
            graph: of the step, if it has one.
            body: makes the step, called with the closure or without arguments.
            closure: computes the loss and its gradients; None where the loop gives none.
        Returns:
            What makes the step, and a list whose last item is what the step returns, once it is made.
        """
        made: list[Any] = [None]
        if closure is None:
            return body, made
        if graph is None or not arranged(graph.serves, self.report.failed):
            return lambda: made.append(body(closure)), made
        with torch.enable_grad():  # optimizers that graphs serve call it once, and first
            made.append(closure())
        return body, made

    def update(self, graph: OptimizerGraph, body: Callable[[], None]) -> None:
        """Make the step of one optimizer, in a training step that ends with `step_ended`."""
        made = once(body)
        self.boundary.make(partial(self._update, graph, made), made)

    def _update(self, graph: OptimizerGraph, body: Callable[[], None]) -> None:
        began, chooser = time.perf_counter(), self.chooser
        timing = chooser is not None and chooser.timing and bool(self._calls)
        if timing and self.config.optimizer != "on":
            body()
            graph.replayed = False
        else:
            graph.run(body, step=self.steps + 1, later=self.awaits_graphs)
        if chooser is not None and timing:
            chooser.worked(time.perf_counter() - began)
        if self._counts_steps:
            self._replayed.append(graph.replayed)

    def step_ended(self) -> None:
        """Count a training step, in which any number of optimizers made any number of steps.

        While no optimizer was taken over nobody knows whether the step made an update.
        """
        self.boundary.make(self._end_step, nothing)

    def _end_step(self) -> None:
        replayed, self._replayed = self._replayed, []
        updated = True if replayed else False if self._optimizers else None
        self.steps += 1
        self.report.step_began()
        calls = list(self._calls)
        called = any(call.calls or call.regions.plain for call in calls)
        self.count(calls, updates=bool(replayed) and all(replayed), updated=updated, called=called)
        graded = max((call.graded for call in calls), default=0)
        for call in calls:
            call.step_ended(graded)
        if replayed and not self._stepped:
            self._stepped = True
            self.report.withdrawn(_UNSTEPPED)
        if not self._stepped and self.steps == (_NO_OPTIMIZER if self._optimizers else self.patience):
            self.report.failed(_UNSTEPPED, self.steps)
        if self._silent >= _HOPE and called:
            self._remove_modules()

    def count(
        self, calls: Iterable[TracedCall], *, updates: bool, updated: bool | None, called: bool = True
    ) -> bool:
        """Count a training step, which has ended. Hot path.

        Args:
            calls: what may have graphs.
            updates: whether it had updates, and all of them were replayed.
            updated: whether it had updates; None where nobody knows.
            called: whether any of these was called, with gradients.
        Returns:
            Whether its forward and backward came from graphs.
        """
        report, chooser = self.report, self.chooser
        replays = plain = parts = eager = 0
        for call in calls:
            r = call.regions
            replays, plain, parts = replays + r.replays, plain + r.plain, parts + r.parts
            eager += r.eager
            r.replays = r.plain = r.parts = r.eager = 0
        missed = chooser is not None and chooser.misses(parts)
        graphed = replays > 0 and not (plain or missed or self._lost)
        for call in calls:
            call.regions.report_to(report, self.steps)
            call.hopeless = call.hopeless + 1 if not graphed and call.regions.hopeless else 0
            if call.hopeless == _HOPELESS:
                call.remove()
                counts = any(region.counts for region in call.regions.regions)
                self._lost |= counts
                if not (counts or self.replays) and all(each.regions.closed for each in calls):
                    self.tell(_SMALL)
        backward = graphed and self.config.backward != "off" and not eager
        report.step_ended(graphs_apart(graphed, backward, updates), updated=updated)
        if missed and self.replays:  # else another reason stands against all steps
            self.tell(RARE)
        self.replays += graphed
        if calls and chooser is not None:
            self._choose(chooser, graphed, parts)
        waits = chooser is not None and chooser.waits
        self._silent = 0 if replays or waits or not calls else self._silent + 1
        if self._silent == _PATIENCE + self.config.warmup_steps and not self.reasons:
            self._break_silence(called)
        return graphed

    def _choose(self, chooser: Chooser, graphed: bool, parts: int) -> None:
        """Whether graphs of forward and backward are worth their while."""
        plain, waited = chooser.plain, chooser.waits
        if plain:
            chooser.ragged = any(call.sizes.changed for call in self._calls)
            for call in (call for call in self._calls if call.spent):
                chooser.worked(_WITH_BACKWARD * sum(call.spent), len(call.spent))
                call.spent.clear()
        why = chooser.step_ended(graphed, parts, traces())
        for call in self._calls:
            call.patience = chooser.patience
        if why is not None:
            if not chooser.waits:
                self.give_up()
            self.tell(why)
        for call in self._calls if chooser.waits and not waited else ():
            call.paused = True
        if plain and not chooser.plain:
            quietly(*[call.begin for call in self._calls])

    def give_up(self) -> None:
        """Run further steps without graphs."""
        quietly(*[graph.close for graph in self._optimizers if self.config.optimizer != "on"])
        self._remove_modules()

    def _remove_modules(self) -> None:
        """Modules run as they are from now on."""
        for call in self._calls:
            call.remove()
        self._calls.clear()
        graphs = self._optimizers
        self.over = bool(graphs) and all(g.over for g in graphs)

    def _break_silence(self, called: bool) -> None:
        """No graph of forward and backward came for a long time, and nothing has said why."""
        if called:
            return self.tell(NO_GRAPH)
        names = ", ".join(call.name for call in self._calls)
        self.tell(
            Problem(
                f"forward and backward get no graphs: in {self._silent} steps the loop did not call {names} with "
                "gradients",
                fix="Call the module itself, as in module(x), instead of a method of the module",
            )
        )
