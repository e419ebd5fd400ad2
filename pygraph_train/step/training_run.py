"""One training run: what it consists of, how far it is, and what is said of it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

from pygraph_train.config import PyGraphConfig
from pygraph_train.gradients.addresses import GradientAddresses
from pygraph_train.graphs.engine import Engine
from pygraph_train.problems import Problem, PyGraphError
from pygraph_train.report.step_report import Fallback, StepReport
from pygraph_train.selection.arms import NOTHING
from pygraph_train.selection.controller import Switch
from pygraph_train.step.clock import Clock
from pygraph_train.step.program import StepProgram
from pygraph_train.step.times import Times

__all__ = ["TrainingRun"]

log = logging.getLogger("pygraph_train")


@dataclass
class TrainingRun:
    """What all parts of the runner share.

    Attributes:
        program: the step.
        config: options.
        engine: where graphs are made.
        report: filled while running.
        steps_left: how many steps training will still make, None when unknown.
        announce: shows the user what a long pause is for.
        on_decision: called when another plan is kept than before.
        step: the number of the present step; the first one is 1.
        replays: of whole steps, or of their forward and backward.
        has_memory: whether a whole step, or its forward and backward, was captured since the memory of such graphs
            went back to the device.
        reasons: how often something was noted against a graph.
        addresses: of gradients.
        times: what was measured so far.
        clock: measures it.
    """

    program: StepProgram
    config: PyGraphConfig
    engine: Engine
    report: StepReport
    steps_left: Callable[[], float | None]
    announce: Callable[[str], None]
    on_decision: Callable[[Switch], None]
    step: int = 0
    replays: int = 0
    has_memory: bool = False
    reasons: int = 0
    addresses: GradientAddresses = field(default_factory=GradientAddresses)
    times: Times = field(default_factory=Times)
    clock: Clock = field(init=False)

    def __post_init__(self) -> None:
        self.report.began(self.engine.name, latest=self.times.latest, phase_seconds=self.times.phases)
        self.clock = Clock(self.engine, self.report, self.times)
        if self.engine.name == "emulated" and self.config.compile is True:
            self.report.note("the emulated engine runs eager kernels: compile=True has no effect")

    def step_began(self) -> None:
        """One more step, or micro-batch."""
        self.step += 1
        self.report.step_began()

    def step_made_elsewhere(self, updated: bool = True) -> None:
        """One more step, or micro-batch, without a graph, which nothing else is known of than whether it updated."""
        self.step += 1
        self.report.step_began()
        if not updated:
            self.report.step_ended(NOTHING, updated=False)

    def steps_made(self) -> int:
        """The number of the present step, for those that must not keep the whole run."""
        return self.step

    def note(self, problem: Problem, *, asked: bool = False) -> None:
        """Say why something runs without a graph.

        Args:
            asked: an option asked for it, so that it is no failure.
        Raises:
            PyGraphError: the user wants failures to be raised.
        """
        config = self.config
        self.reasons += 1
        if self.report.fell_back(Fallback(problem.reason, problem.where, problem.fix, self.step)):
            wanted = "on" in (config.forward, config.backward, config.optimizer, config.fuse)
            level = logging.WARNING if wanted else logging.INFO
            log.log(level, "pygraph: step %d runs without a graph: %s", self.step, problem)
        if config.on_failure == "raise" and not asked:
            raise PyGraphError(str(problem))
