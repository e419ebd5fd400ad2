"""Which arms there are for a kind of steps, and what is known of them."""

from __future__ import annotations

import dataclasses
import logging
import weakref
from collections.abc import Callable, Sequence

from pygraph_train.config import PyGraphConfig
from pygraph_train.graphs.engine import Engine
from pygraph_train.parallel.processes import why_no_comparison
from pygraph_train.report.step_report import StepReport
from pygraph_train.selection import timing
from pygraph_train.selection.arms import NOTHING, OPTIMIZER, Arm, Phase, Plan
from pygraph_train.selection.compile_time import COMPILE_SECONDS, compile_seconds
from pygraph_train.selection.controller import Controller, Estimate, Switch
from pygraph_train.step.choice import Choice
from pygraph_train.step.launch_bound import LaunchBoundCheck
from pygraph_train.step.program import StepProgram
from pygraph_train.step.times import Times
from pygraph_train.step.variants import Variant
from pygraph_train.tracing.traced_code import held_weakly

__all__ = ["Decisions"]

log = logging.getLogger("pygraph_train")

_COMPILED_SHARE = 2 / 3
"""Inductor usually saves a third of the device time."""

_REGIONS_SHARE = 1 / 2
"""And its graphs half of a step without graphs that waits for the host all the time."""

_EAGER_SHARE = 0.95
"""Graphs of eager kernels save little of a step that keeps the device busy."""

_TRACING_SECONDS = 2.0
"""What AOTAutograd takes for forward and backward of a small model, with the captures, before it was measured."""


class Decisions:
    """Makes the `Choice` for each kind of steps.

    Args:
        program: the step.
        config: options.
        engine: where graphs are made.
        report: gets each decision.
        times: what was measured so far.
        steps_left: how many steps training will still make, None when unknown.
        on_decision: called when another plan is kept than before.
        on_settled: called with the arm with which nothing is compared any more.

    Attributes:
        compiles: whether Inductor's kernels can be had.
    """

    def __init__(
        self,
        program: StepProgram,
        config: PyGraphConfig,
        engine: Engine,
        report: StepReport,
        times: Times,
        steps_left: Callable[[], float | None],
        on_decision: Callable[[Switch], None],
        on_settled: Callable[[Arm], None] = lambda arm: None,
    ) -> None:
        alone = not program.replication.sharded  # otherwise nothing is compared by time
        self.compiles = engine.name == "cuda" and (alone or config.compile is True)
        self._program = program
        self._config = config
        self._engine = engine
        self._report = report
        self._times = times
        self._steps_left = steps_left
        self._on_decision = on_decision
        self._on_settled = on_settled
        self._stopwatch: timing.Stopwatch = (
            timing.CudaStopwatch(engine.device)
            if engine.name == "cuda"
            else timing.DeclaredStopwatch(lambda arm: timing.declared_seconds(arm))
        )

    def arms(self, variant: Variant | None, plans: Sequence[Plan]) -> list[Arm]:
        """Every legal way to run these steps, the one to begin with first.

        Args:
            variant: None for steps whose forward and backward run without a graph.
            plans: the legal ones.
        """
        compile, cuda = self._config.compile, self._engine.name == "cuda"
        regions = [Arm(plan, compiled=cuda and compile is not False) for plan in plans if plan.regions]
        plans = [plan for plan in plans if not plan.regions]
        arms = [Arm(plan) for plan in plans]
        if (
            variant is not None
            and self.compiles
            and compile is not False
            and not variant.trace.gaps.only_eager
        ):
            wanted = variant.compile_next and not variant.one_of_many
            if compile is True and (wanted or variant.compiled is not None):
                arms = [Arm(plan, compiled=plan.forward_backward) for plan in plans]
            elif compile == "auto" and plans and plans[0].forward_backward and not variant.one_of_many:
                arms.append(Arm(plans[0], compiled=True))
        fused = bool(plans) and plans[0].forward_backward
        first = not fused and not (cuda and compile is not True)  # what they cost has to pay
        arms = [*regions, *arms] if first else [*arms, *regions]
        return arms

    def choice(
        self,
        variant: Variant | None,
        plans: Sequence[Plan],
        step: Callable[[], int],
        makes_way: Callable[[Variant], bool] | None = None,
    ) -> Choice:
        """A comparison of these arms, from the next step on.

        Args:
            variant, plans: see `arms`.
            step: the training step that is being made.
            makes_way: whether graphs of forward and backward make way for steps without them; None where there are
                none.
        """

        # the report keeps the controller, and may be kept when the training is over
        me, steps = weakref.ref(self), held_weakly(step)
        way = None if makes_way is None else held_weakly(makes_way)
        of_variant = weakref.ref(variant) if variant is not None else lambda: None

        def decided(switch: Switch) -> None:
            if (alive := me()) is None:
                return
            switch = dataclasses.replace(switch, step=steps())  # of the training, not of its controller
            alive._report.decided(switch)
            alive._on_decision(switch)
            if switch.before != switch.arm:
                log.info("pygraph: step %d: %s: %s", switch.step, switch.arm, switch.why)

        arms = self.arms(variant, plans)
        if (alone := why_no_comparison()) is not None:
            arms = arms[:1]
            self._report.note(alone)
        controller = Controller(
            arms,
            estimate=lambda arm, best, seconds: (
                Estimate()
                if (alive := me()) is None
                else alive._estimate(of_variant(), controller, arm, seconds)
            ),
            steps_left=lambda: None if (alive := me()) is None else alive._steps_left(),
            decided=decided,
            comes_back=lambda best, arm: (
                None if (alive := me()) is None else alive._comes_back(of_variant(), best, arm, way)
            ),
        )
        self._report.compares(controller)

        def settled(arm: Arm) -> None:
            if variant is not None:
                variant.keep_captures_of(arm)
            self._on_settled(arm)

        return Choice(controller, self._stopwatch, self._times.latest, settled)

    def launch_bound(self, step: Callable[[], int]) -> LaunchBoundCheck | None:
        """What finds out whether the GPU waits for the host at all, None where that is no question.

        Args:
            step: the training step that is being made.
        """
        if not LaunchBoundCheck.wanted(self._config, self._engine.name):
            return None
        return LaunchBoundCheck(
            self._engine.synchronize,
            None if self._config.compile is False else COMPILE_SECONDS,
            self._steps_left,
            lambda why: self.leave_alone(why, step()),
        )

    def leave_alone(self, why: str, step: int) -> None:
        """Note that steps run without graphs, which nothing was compared for."""
        self._report.left_alone(why)
        switch = Switch(step, Arm(NOTHING), Arm(NOTHING), why)
        self._report.decided(switch)
        self._on_decision(switch)
        log.info("pygraph: step %d: no graphs: %s", step, why)

    def _estimate(
        self, variant: Variant | None, controller: Controller, arm: Arm, best_seconds: float
    ) -> Estimate:
        """What is known of an arm before it is tried."""
        if self._engine.name == "emulated":
            return Estimate(least=timing.declared_seconds(arm), why="declared: the emulation shows graphs")
        return self._measured(variant, controller, arm, best_seconds)

    def _measured(
        self, variant: Variant | None, controller: Controller, arm: Arm, best_seconds: float
    ) -> Estimate:
        """What was measured, or can be told from that."""
        price = 0.0 if variant is None else self._price(variant, arm)
        if price and arm in controller.times:
            return Estimate(likely=controller.times[arm], one_time=price, why="one more capture")
        graphed = {phase for graph in arm.plan.graphs for phase in graph}
        for known, seconds in controller.times.items():
            inside = {phase for graph in known.plan.graphs for phase in graph}
            if graphed and graphed <= inside and known.compiled == arm.compiled:
                why = f"the kernels of {known}, and more launches"
                return Estimate(least=seconds, one_time=price, why=why)
        if arm.compiled:
            cost = self._times.compiling or compile_seconds(_operations(variant, arm))
            share = _COMPILED_SHARE
            last = self._times.latest.get(controller.best)
            if arm.plan.regions and not controller.best.plan.forward_backward and _waits_for_host(last):
                share = _REGIONS_SHARE
            return Estimate(likely=best_seconds * share, one_time=cost, why="Inductor")
        if arm.plan.regions and not arm.plan.forward_backward:
            waits = _waits_for_host(self._times.latest.get(controller.best))
            share = _REGIONS_SHARE if waits else _EAGER_SHARE
            cost = self._times.compiling or _TRACING_SECONDS
            return Estimate(likely=best_seconds * share, one_time=cost, why="AOTAutograd")
        if arm.plan == NOTHING and variant is not None:
            return Estimate(seen=variant.warmup_seconds, why="launch-bound")
        if arm.plan == OPTIMIZER and variant is not None:
            outside = [self._times.phases.get(phase.value) for phase in (Phase.FORWARD, Phase.BACKWARD)]
            if None not in outside:
                return Estimate(seen=sum(filter(None, outside)), why="forward and backward, launch-bound")
        return Estimate()

    def _price(self, variant: Variant, arm: Arm) -> float:
        """Seconds that one more capture of forward and backward takes; 0 where the graph is there, or was never."""
        if not arm.plan.forward_backward or not (variant.makes_way or variant.proved):
            return 0.0
        if any(fused == arm.plan.fused and kind == arm.compiled for _, fused, kind in variant.captures):
            return 0.0
        return self._seconds_to_capture(variant, arm)

    def _seconds_to_capture(self, variant: Variant, arm: Arm) -> float:
        places = [place for place in variant.proved if place[1:] == (arm.plan.fused, arm.compiled)]
        verify = self._config.verify
        compared = verify != "off" and (not places or any(variant.is_compared(p, verify) for p in places))
        if self._engine.name == "emulated":
            return timing.declared_capture_seconds(compared=compared)
        return variant.capture_seconds + compared * variant.compare_seconds

    def _comes_back(
        self, variant: Variant | None, best: Arm, arm: Arm, makes_way: Callable[[Variant], bool] | None
    ) -> float | None:
        """See `Comparison`."""
        alike = best.plan.forward_backward == arm.plan.forward_backward
        if variant is None or makes_way is None or alike or not makes_way(variant):
            return None
        return self._seconds_to_capture(variant, best) if best.plan.forward_backward else 0.0


def _operations(variant: Variant | None, arm: Arm) -> int | None:
    """How many operations the device makes in a step of this kind with eager kernels, if a graph has shown it."""
    if variant is None or not arm.plan.forward_backward:
        return None
    counts = [c.graph.nodes for (_, _, compiled), c in variant.captures.items() if not compiled]
    return max(counts, default=None)


def _waits_for_host(last: timing.StepTime | None) -> bool:
    """Whether a step takes the host as long as the device: then it is launches that take the time."""
    return last is not None and last.host > 0.9 * last.device
