"""What all training steps have in common, whoever makes them: they are counted, timed, and given graphs or reasons."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from pygraph_train.boundary import Boundary, quietly
from pygraph_train.config import PyGraphConfig
from pygraph_train.core.region import RARE, PhaseRegions
from pygraph_train.graphs.engine import Engine
from pygraph_train.optimizers.graph import OptimizerGraph
from pygraph_train.optimizers.program import UpdateProgram
from pygraph_train.patches import held_weakly
from pygraph_train.plans import NOTHING, graphs_apart
from pygraph_train.problems import Problem
from pygraph_train.report.announcements import give_reason
from pygraph_train.report.step_report import StepReport
from pygraph_train.step.chooser import Chooser, chooser_for
from pygraph_train.step.traced_call import TracedCall, tensors_of
from pygraph_train.torch_private.stock_dynamo import traces

_PATIENCE = 20
"""Steps in a row without a graph of forward and backward, and without a reason, after which one is given."""

_HOPELESS = 3
"""Steps in a row in which no part may have a graph, after which forward and backward run as they are written: the
graphs that Dynamo makes are slower.
"""

NO_GRAPH = Problem(
    "Dynamo finds no graph of this step that serves the next one: it breaks the graph, or traces it anew in each step",
    fix="explain and TORCH_LOGS=recompiles,graph_breaks say where. A number that the step changes is a usual cause",
)


_SMALL = Problem("the model has too few operations for graphs of forward and backward")


class Driver:
    """Drives the steps of one training. A class under it knows when they begin and end, and what its calls are.

    Args:
        config: options.
        report: filled while running.
        rest: a method of this object, called when the library has failed too often: it lets go of graphs.
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
    """

    def __init__(
        self,
        config: PyGraphConfig,
        report: StepReport,
        rest: Callable[[], object],
        left: Callable[[], float],
        even: Callable[[], bool],
    ) -> None:
        self.config, self.report, self.left, self.even = config, report, left, even
        self.boundary = Boundary(held_weakly(self.tell), held_weakly(rest))
        self.engine: Engine | None = None
        self.chooser: Chooser | None = None
        self.steps = self.replays = self.reasons = 0
        self._calls: Iterable[TracedCall] = []
        self._optimizers: Iterable[OptimizerGraph] = []
        self._silent = 0
        self.within = False
        self._lost = False  # whether a part of the steps has no graph and is not looked at any more

    def begin_with(self, engine: Engine) -> None:
        """Make graphs there."""
        self.engine = engine
        self.report.began(engine.name)
        if engine.name == "emulated" and self.config.compile is True:
            self.report.note("the emulated engine runs eager kernels: compile=True has no effect")
        self.chooser = chooser_for(self.config, engine, self.report.timed, self.left)

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

    def count(
        self, calls: Iterable[TracedCall], *, updates: bool, updated: bool, called: bool = True
    ) -> bool:
        """Count a training step, which has ended. Hot path.

        Args:
            calls: what may have graphs.
            updates: whether it had updates, and all of them were replayed.
            updated: whether it had updates, as far as one knows.
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
                if not counts and [*calls] == [call]:
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
        if chooser.plain:
            chooser.ragged = any(call.ragged for call in self._calls)
        why = chooser.step_ended(graphed, parts, traces())
        for call in self._calls:
            call.patience = chooser.patience
        if why is not None:
            if not chooser.waits:
                self.give_up()
            self.tell(why)

    def _break_silence(self, called: bool) -> None:
        """No graph of forward and backward came for a long time, and nothing has said why."""
        self.tell(NO_GRAPH)

    def give_up(self) -> None:
        """Run further steps without graphs."""
        raise NotImplementedError

    def release(self) -> None:
        """Give everything back as it was, and release all graphs. The report stays."""
        if self.engine is not None:
            quietly(self.engine.close)
