"""One training run: what it consists of, how far it is, and what is said of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from pygraph_train.config import PyGraphConfig
from pygraph_train.graphs.engine import Engine
from pygraph_train.plans import NOTHING
from pygraph_train.problems import Problem
from pygraph_train.report.announcements import give_reason
from pygraph_train.report.step_report import StepReport
from pygraph_train.step.program import StepProgram


@dataclass
class TrainingRun:
    """What the runner and its adapter share.

    Attributes:
        program: the step.
        config: options.
        engine: where graphs are made.
        report: filled while running.
        left: how many further steps there will be, infinity where nobody knows.
        even: whether all batches have the same number of rows.
        step: the number of the present step; the first one is 1.
        replays: of whole steps, or of their forward and backward.
        reasons: how often something was noted against a graph.
    """

    program: StepProgram
    config: PyGraphConfig
    engine: Engine
    report: StepReport
    left: Callable[[], float]
    even: Callable[[], bool]
    step: int = 0
    replays: int = 0
    reasons: int = 0

    def __post_init__(self) -> None:
        self.report.began(self.engine.name)
        if self.engine.name == "emulated" and self.config.compile is True:
            self.report.note("the emulated engine runs eager kernels: compile=True has no effect")

    def step_made_elsewhere(self, updated: bool = True) -> None:
        """One more step, or micro-batch, without a graph, which nothing else is known of than whether it updated."""
        self.step += 1
        self.report.step_began()
        if not updated:
            self.report.step_ended(NOTHING, updated=False)

    def note(self, problem: Problem) -> None:
        """Say why something runs without a graph.

        Raises:
            PyGraphError: the user wants failures to be raised.
        """
        config = self.config
        self.reasons += 1
        told = f"pygraph: step {self.step} runs without a graph: {problem}"
        wanted = "on" in (config.forward, config.backward, config.optimizer)
        give_reason(self.report, problem, self.step, config, told, warn=wanted)
