"""A loop that the user wrote is compared as a whole with the loop that it was.

Each region is compared with its own run without a graph, with nothing else on the device. All of them together may
still make a step longer: guards, Python around compiled code, copies from one graph to the next. So when all of them
are decided, whole steps are timed, from the end of one update to the end of the next one, in windows that alternate:
with regions and with graphs of updates, with one of the two, and with neither. What is fastest is kept.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import weakref
from collections.abc import Iterable, Sequence
from typing import Protocol

from pygraph_train.config import PyGraphConfig
from pygraph_train.graphs.engine import Engine
from pygraph_train.optimizers.graph import OptimizerGraph
from pygraph_train.parallel.processes import why_no_comparison
from pygraph_train.regions.pair import Bounds
from pygraph_train.report.backend_report import RegionRecord, RegionRuns
from pygraph_train.report.step_report import StepReport
from pygraph_train.selection import timing
from pygraph_train.selection.arms import Arm, Phase, Plan, graphs_apart
from pygraph_train.selection.controller import Controller, Estimate, Rules, Switch
from pygraph_train.step.choice import Choice
from pygraph_train.step.plans_in_turn import PlansInTurn
from pygraph_train.step.region_memory import RegionMemory

__all__ = ["TakenModule", "WholeLoop"]

log = logging.getLogger("pygraph_train")

_STEADY = 4
"""Steps in a row that ran alike, with everything decided, before whole steps are compared."""

_MOST_UNREADY = 32
"""Steps in a row in which something was captured or compiled: the loop is not as steady as it looked."""

_PATIENCE = 64
"""The same where an update has no graph, and nothing says that it gets none."""

_TURNS = 16
"""Steps in a row in which regions that have graphs ran from them: so many shapes may take turns and have theirs."""

_MOST_WAITED = 128
"""Steps after the last capture in which nothing is compared for want of that: some shapes never get a graph."""

_MOST_OPENINGS = 8
"""So often it is asked whether there is anything to compare. Each time after twice as many steady steps."""

_LOOK_EVERY = 256
"""Steps from one look at the loop to the next: a comparison costs it more than a step of its own costs."""

_EXPLORATION = 128
"""Steps that one comparison may spend on other arms: enough for three of them, one in a row, however noisy they are."""


class TakenModule(Protocol):
    """A module whose calls run as regions."""

    keeps_code: bool
    """Whether its calls have compiled code, which the user asked for, when they have no graphs."""
    removed: bool
    """Whether it was given back for good."""
    leaving: bool
    """Whether its next call is the one that `stand_aside` waits for."""

    def stand_aside(self) -> None:
        """Let the module be as it was from its next call on, until `come_back`; that call makes way first.

        Only then have gradients gone from the memory of graphs. With `keeps_code` it does nothing but make way.
        """

    def come_back(self) -> None:
        """Run its calls as regions again."""


class WholeLoop:
    """Compares the loop with what it was, and keeps what is faster.

    Args:
        config: options.
        engine: of the loop.
        report: gets each decision.
        modules, updates: what was taken over from the loop, at any time: more may come, and some may go.

    Attributes:
        records: of the regions that the modules run as; whoever makes them adds them.
        bounds: of their captures.
        memory: keeps graphs, and steps without them, within the memory of steps without them.
        without_regions: whether modules run without graphs just now.
        rests: whether the next step is one of the plain loop, and nobody looks at it.
    """

    def __init__(
        self,
        config: PyGraphConfig,
        engine: Engine,
        report: StepReport,
        modules: Iterable[TakenModule],
        updates: Iterable[OptimizerGraph],
    ) -> None:
        self.records: list[RegionRecord] = []
        self.bounds = Bounds()
        self.memory = RegionMemory(engine, self.records)
        self.without_regions = self.rests = False
        self._config = config
        self._cuda = engine.name == "cuda"
        self._report = report
        self._modules = modules
        self._updates = updates
        self._stopwatch: timing.Stopwatch = (
            timing.CudaStopwatch(engine.device)
            if self._cuda
            else timing.DeclaredStopwatch(lambda arm: timing.declared_seconds(arm))
        )
        self._may_open = self._open = config.verify != "always"  # whose steps all take twice as long
        self._runs = RegionRuns(functools.partial(list, self.records))
        self._before: dict[int, tuple[int, int, int]] = {}
        self._step = self._openings = 0
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._choice: Choice | None = None
        self._with_regions: dict[Arm, bool] = {}
        self._asks_regions = self._asks_updates = False
        self._plans = PlansInTurn()
        self._parts = False
        # steps since a capture, and since shapes had no graph that others of the same region have
        self._since, self._complete = 0, _TURNS
        self._unready = 0
        self._under_way = self._disturbed = self._to_make_way = False
        self._state: tuple[bool, bool, bool] | None = None
        self.without_regions = self.rests = False

    # -- what the loop says -------------------------------------------------------------------------

    def step_ended(self, step: int) -> None:
        """A step has ended with its update, and the next one begins.

        Args:
            step: its number.
        """
        self._step = step
        if self._choice is None:
            if self._open:
                self._wait_until_steady()
            return
        if self._under_way:
            self._end(self._choice)
        if self._choice is not None:
            self._next(self._choice)

    def disturbed(self) -> None:
        """Something else than a step of the loop runs: the present step is no sample."""
        self._disturbed = True

    def is_another(self) -> None:
        """More was taken over from the loop, or something was given back."""
        self.start_over()
        self._openings, self._open = 0, self._may_open

    def start_over(self) -> None:
        """Everything runs as the library has it, until the loop is compared again."""
        if self._choice is not None:
            self._report.start_over(self._choice.controller)
            self._report.runs_with(next(iter(self._with_regions)).plan)
            self._run_with(regions=True, updates=True, for_long=False)
        self._begin_anew()

    def close(self) -> None:
        """The loop has ended, and modules and optimizers are given back. What was found stays in the report."""
        self._begin_anew()
        self.bounds.asleep = self._may_open = self._open = False

    # -- before a comparison ------------------------------------------------------------------------

    def _wait_until_steady(self) -> None:
        """Begin when all regions are decided, and steps run alike."""
        replayed = [graph.replayed for graph in self._graphs() if not graph.over]
        plan = self._runs.plan(optimizer=bool(replayed) and all(replayed))
        ran, decided, complete = self._look()
        alike = self._plans.add(plan, undisturbed=decided and not self._disturbed)
        self._disturbed = False
        self._parts = self._runs.parts or ((alike or self._plans.several) and self._parts)
        self._since = self._since + 1 if decided else 0
        self._complete = self._complete + 1 if complete else 0
        if self._complete < _TURNS and self._since < _MOST_WAITED:
            return
        least = _STEADY if all(replayed) else _PATIENCE
        if self._plans.steady >= max(least, _STEADY << self._openings):
            plan = self._plans.plan()
            self._plans.count_anew()
            self._openings += 1
            self._open = self._openings < _MOST_OPENINGS
            self._begin(plan, regions=ran or plan.regions)

    def _look(self) -> tuple[bool, bool, bool]:
        """Whether regions ran since the last look; whether those that did are decided and had their graphs before.

        And whether all that have graphs ran from them: other shapes may get some when they have come more often.
        """
        before, new = self._before, (-1, 0, 0)
        self._before = {id(r): (r.captures, r.replays, r.plain_runs) for r in self.records}
        ran = [r for r in self.records if self._before[id(r)] != before.get(id(r))]
        decided = all(r.settled and r.captures == before.get(id(r), new)[0] for r in ran)
        graphed = [r for r in ran if r.decision.startswith("graph")]
        return bool(ran), decided, all(r.plain_runs == before.get(id(r), new)[2] for r in graphed)

    def _begin(self, plan: Plan, *, regions: bool) -> None:
        """Compare, if there is anything to compare.

        Args:
            plan: what steps run from now.
            regions: whether any run.
        """
        config = self._config
        keeps_code = any(module.keeps_code for module in self._modules)
        self._asks_regions = regions and "on" not in (config.forward, config.backward)
        self._asks_regions &= plan.regions or self._parts or not keeps_code
        self._asks_updates = plan.optimizer_alone and config.optimizer != "on"
        self._with_regions.clear()
        arms = []
        for with_regions in (True, False) if self._asks_regions else (regions,):
            parts = with_regions and self._parts
            # code may be all that regions are
            code = with_regions and (self._cuda or not (parts or plan.regions))
            for with_update in (True, False) if self._asks_updates else (plan.optimizer_alone,):
                phases = [
                    with_regions and (phase,) in plan.graphs for phase in (Phase.FORWARD, Phase.BACKWARD)
                ]
                compiled = code or (keeps_code and self._cuda)
                arm = Arm(graphs_apart(*phases, with_update), compiled, parts)
                self._with_regions[arm] = with_regions
                arms.append(arm)
        if len(arms) == 1:
            return
        if (together := why_no_comparison()) is not None:
            self._open = False
            return self._report.note(together)
        self._choice = Choice(self._controller(arms), self._stopwatch, {})
        self._report.compares(self._choice.controller)

    def _controller(self, arms: Sequence[Arm]) -> Controller:
        # the report keeps the controller, and may be kept when the training is over
        me = weakref.ref(self)

        def decided(switch: Switch) -> None:
            if (alive := me()) is None:
                return
            switch = dataclasses.replace(switch, step=alive._step)  # of the training
            alive._report.decided(switch)
            if switch.before != switch.arm:
                log.info("pygraph: step %d: the loop runs as %s: %s", switch.step, switch.arm, switch.why)

        def estimate(arm: Arm, best: Arm, seconds: float) -> Estimate:
            return Estimate() if (alive := me()) is None else alive._estimate(arm)

        def comes_back(best: Arm, arm: Arm) -> float | None:
            return None if (alive := me()) is None else alive._comes_back(best, arm)

        return Controller(
            arms,
            rules=Rules(look_every=_LOOK_EVERY, exploration=_EXPLORATION),
            estimate=estimate,
            decided=decided,
            comes_back=comes_back,
        )

    def _estimate(self, arm: Arm) -> Estimate:
        """What is known of an arm: graphs of regions that are closed would have to be captured again."""
        open_graphs = not self._has_regions(arm) or self.memory.paid() > 0
        price = 0.0 if open_graphs else self._price()
        if self._cuda:
            return Estimate(one_time=price, why="captures" if price else "")
        return Estimate(
            least=timing.declared_seconds(arm),
            one_time=price,
            why="declared: the emulation shows graphs",
        )

    def _comes_back(self, best: Arm, arm: Arm) -> float | None:
        """See `Comparison`: graphs of regions make way for steps without them where memory does not hold both."""
        if not self.memory.is_or_was_short() or self._has_regions(best) == self._has_regions(arm):
            return None
        return self._price() if self._has_regions(best) else 0.0

    def _price(self) -> float:
        """Seconds that captures took of the graphs that are open, or of those that were closed last."""
        if not self._cuda:
            return timing.declared_capture_seconds(compared=False)
        return self.memory.paid() or self.memory.price

    # -- while whole steps are compared -------------------------------------------------------------

    def _end(self, choice: Choice) -> None:
        """A step has ended that the comparison looks at."""
        choice.stop()
        if (why := self._why_not(choice.arm)) is not None:
            return choice.fail(why)
        choice.as_planned = self._ran_as(choice.arm) and not self._disturbed
        self._disturbed = False
        self._unready = 0 if choice.as_planned else self._unready + 1
        choice.end()
        most = _MOST_UNREADY + self.memory.closed  # the shapes of closed graphs may come in a row
        if self._unready > most and self._has_regions(choice.arm):
            self.start_over()

    def _why_not(self, arm: Arm) -> str | None:
        """Why an arm cannot be run any more."""
        if arm.plan.optimizer_alone and all(graph.over for graph in self._graphs()):
            return "the optimizer has no graph any more"
        given_up = [graph.given_up for graph in self._graphs() if graph.given_up]
        if arm.plan.optimizer_alone and given_up:
            return str(given_up[0])
        if self._has_regions(arm) and all(module.removed for module in self._modules):
            return "no module runs as regions any more"
        return None

    def _ran_as(self, arm: Arm) -> bool:
        """Whether the step ran from graphs that were there."""
        _, decided, _ = self._look()
        if not arm.plan.optimizer_alone or self._plans.several:
            return decided
        return decided and all(graph.replayed or graph.over for graph in self._graphs())

    def _next(self, choice: Choice) -> None:
        """The next step begins."""
        if choice.quiet:  # hot path
            choice.quiet -= 1
            if self._under_way:
                self._under_way = False
                self.rests = not choice.arm.plan.graphs and not self._has_regions(choice.arm)
            return
        self.rests, self._under_way = False, True
        choice.begin()
        arm, settled = choice.arm, choice.controller.settled
        regions = self._has_regions(arm) or not self._asks_regions
        self._run_with(regions=regions, updates=arm.plan.optimizer_alone, for_long=settled)
        self._look()
        choice.start()

    def _run_with(self, *, regions: bool, updates: bool, for_long: bool) -> None:
        """Make the next steps so.

        Args:
            regions: modules run as they were taken over.
            updates: with the graphs that they have, if that is a question.
            for_long: nothing else is tried for a while: what other steps need goes.
        """
        switched = self.without_regions is regions
        if (state := (regions, updates, for_long)) != self._state:
            self._state = state
            if switched:
                self._switch(regions=regions)
            for graph in self._updates if self._asks_updates else ():
                if updates:
                    graph.wake("regions" if regions else "autograd", only=for_long)
                else:
                    graph.rest(give_back=for_long)
        self._to_make_way &= switched  # or there was no such call in a whole step
        if not regions and not self._to_make_way:
            self.memory.make_way(for_long=for_long)

    def _switch(self, *, regions: bool) -> None:
        """Have modules run as regions, or as they are without."""
        self.without_regions = self.bounds.asleep = not regions
        for module in self._modules:
            if regions:
                module.come_back()
            else:
                module.stand_aside()
        self._to_make_way = not regions and any(module.leaving for module in self._modules)

    def make_way(self) -> None:
        """A module is called that stands aside, for the first time since it should: gradients are mostly gone."""
        if self._to_make_way and self._state is not None:
            self._to_make_way = False
            self.memory.make_way(for_long=self._state[-1])

    def make_way_again(self, *_: object) -> None:
        """The backward of that call begins."""
        if self.without_regions and self._state is not None:
            self.memory.make_way(for_long=self._state[-1])

    def _has_regions(self, arm: Arm) -> bool:
        return self._with_regions.get(arm, False)

    def _graphs(self) -> list[OptimizerGraph]:
        """Of updates that the loop makes."""
        return [graph for graph in self._updates if not graph.suspended]
