"""The optimizer phase as a graph of its own: unscale, clip, step, the scaler's update.

It takes gradients wherever they lie. Those that other graphs leave at fixed addresses are read there; those
that autograd allocated anew are copied to the addresses of the capture, where `.grad` finds them afterwards.
"""

from __future__ import annotations

import logging
import operator
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pygraph_train.config import PyGraphConfig
from pygraph_train.diagnose.report import CaptureRecord, StepReport
from pygraph_train.graphs.engine import Engine, Graph
from pygraph_train.step.legality import Problem
from pygraph_train.step.optimizer import OptimizerPreparation
from pygraph_train.step.optimizer_trial import OptimizerTrial
from pygraph_train.step.program import StepProgram
from pygraph_train.step.refusals import problem_of
from pygraph_train.step.verify import Fingerprint, HostCopy

__all__ = ["OptimizerPhase"]

log = logging.getLogger("pygraph_train")

_RUNS_BEFORE_CAPTURE = 2
"""Runs with the kernels that will be captured; the optimizer's state exists after the first."""

_MOST_CHANGES = 3
"""So often a capture is thrown away because something it rests on has changed."""

_REPLAYS_PER_CHANGE = 50
"""A capture that served this many replays has paid for one more."""

_grad = operator.attrgetter("grad")


@dataclass
class _Capture:
    graph: Graph
    parameters: list[Tensor]
    addresses: list[int]
    gradients: list[Tensor | None]
    hyperparameters: Any
    constants: Any
    generation: int
    verified: bool
    replays: int = 0


class OptimizerPhase:
    """Runs the optimizer phase, from a graph where that is proved to be the same.

    Args:
        program: for the optimizer, and what else its phase writes.
        preparation: of the optimizer, without a `reason` against capturing.
        engine: where graphs are made.
        config: options.
        report: filled while running.

    Attributes:
        problem: why there are no more graphs, None while there may be.
        replayed: whether the last `run` was a replay of a verified graph.
    """

    def __init__(
        self,
        program: StepProgram,
        preparation: OptimizerPreparation,
        engine: Engine,
        config: PyGraphConfig,
        report: StepReport,
    ) -> None:
        assert program.optimizer is not None
        self.problem: Problem | None = None
        self.replayed = False
        self._program = program
        self._optimizer = program.optimizer
        self._preparation = preparation
        self._engine = engine
        self._config = config
        self._report = report
        # by whether graphs own the gradients: their addresses are others then
        self._captures: dict[bool, _Capture] = {}
        self._runs = 0
        self._changes = 0
        self._replays = 0

    def run(
        self, body: Callable[[], None], constants: Any, *, owned: bool, step: int, borrowed: bool = False
    ) -> None:
        """Make the phase with the gradients as they are.

        Args:
            body: the phase in Python.
            constants: Python values that a capture of `body` bakes in.
            owned: whether a graph has left the gradients where it always does.
            borrowed: whether they may lie in memory of a graph that wants it back.
            step: the training step, for the report.
        """
        self.replayed = False
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        gradients = list(map(_grad, parameters))
        capture = self._captures.get(owned)
        if capture is not None and not self._valid(capture, parameters, gradients, constants):
            self._forget(owned)
            capture = None
            self._runs = (
                _RUNS_BEFORE_CAPTURE - 1
            )  # state of what is new comes into being outside of a capture
            self._changes += 1
            if self._changes > _MOST_CHANGES + self._replays // _REPLAYS_PER_CHANGE:
                self.problem = Problem(
                    "the optimizer runs outside of the graph: a hyperparameter other than the learning rate, "
                    "or which parameters have gradients, changes again and again",
                    fix="OneCycleLR(cycle_momentum=False) keeps it in the graph",
                )
        if capture is None:
            if self.problem is None and (reason := self._preparation.reason) is not None:
                self.problem = Problem(f"the optimizer runs outside of the graph: {reason}")
            if self.problem is not None:
                return body()
            if self._runs < _RUNS_BEFORE_CAPTURE or not any(g is not None for g in gradients):
                self._runs += 1
                return self._run_prepared(body)
            if borrowed:
                for p in parameters:
                    p.grad = None if p.grad is None else p.grad.clone()
                gradients = list(map(_grad, parameters))
            capture = self._capture(body, parameters, constants, owned=owned, step=step)
            if capture is None:
                return body()
        if capture.verified and self._config.verify != "always":
            self.replayed = True
            return self._replay(capture, gradients)
        self._verified_replay(capture, body, gradients, owned)

    def _replay(self, capture: _Capture, gradients: Sequence[Tensor | None]) -> None:
        """The hot path: moved gradients in, learning rate in, launch."""
        moved = [
            (p, mine, g)
            for p, mine, g in zip(capture.parameters, capture.gradients, gradients, strict=True)
            if g is not mine and g is not None and mine is not None
        ]
        if moved:
            with torch.no_grad():
                torch._foreach_copy_([mine for _, mine, _ in moved], [g for _, _, g in moved])
        self._preparation.sync()
        capture.graph.replay()
        for p, mine, _ in moved:
            p.grad = mine
        capture.replays += 1
        self._replays += 1

    def _valid(
        self,
        capture: _Capture,
        parameters: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
        constants: Any,
    ) -> bool:
        preparation = self._preparation
        if not (
            capture.constants == constants
            and capture.generation == preparation.generation
            and preparation.state_unchanged()
            and preparation.hyperparameters() == capture.hyperparameters
            and [p.data_ptr() for p in parameters] == capture.addresses
        ):
            return False
        for mine, g in zip(capture.gradients, gradients, strict=True):
            if g is not mine and not _fits(mine, g):
                return False
        return True

    def _run_prepared(self, body: Callable[[], None]) -> None:
        with self._preparation.prepared(), self._engine.warm_up():
            body()

    def _capture(
        self, body: Callable[[], None], parameters: list[Tensor], constants: Any, *, owned: bool, step: int
    ) -> _Capture | None:
        """Record the phase without executing it; None (and a `problem`) where that cannot be done."""
        started = time.perf_counter()
        preparation = self._preparation
        preparation.settle()
        gradients = list(map(_grad, parameters))
        try:
            with preparation.prepared():
                graph, _ = self._engine.capture(body)
        except Exception as error:
            self.problem = problem_of(error)
            return None
        finally:
            for p, g in zip(parameters, gradients, strict=True):
                p.grad = g
            self._program.abandon()
        preparation.remember()
        made = _Capture(
            graph=graph,
            parameters=parameters,
            addresses=[p.data_ptr() for p in parameters],
            gradients=gradients,
            hyperparameters=preparation.hyperparameters(),
            constants=constants,
            generation=preparation.generation,
            verified=self._config.verify == "off",
        )
        self._captures[owned] = made
        seconds = time.perf_counter() - started
        self._report.captured(CaptureRecord("{O}", seconds, graph.nodes, False, step))
        log.info("pygraph: captured {O} in %.2f s (%d nodes)", seconds, graph.nodes)
        return made

    def _verified_replay(
        self, capture: _Capture, body: Callable[[], None], gradients: Sequence[Tensor | None], owned: bool
    ) -> None:
        """A replay that must leave what the phase leaves without a graph; else it is undone."""
        device = self._program.device
        before = [g for g in gradients if g is not None]
        kept = [g for g in capture.gradients if g is not None]
        state = [*capture.parameters, *self._preparation.state_tensors(), *self._program.extra_state()]
        backup = HostCopy(device, list({id(t): t for t in (*state, *before, *kept)}.values()))

        def fingerprint() -> Fingerprint:
            found = [*state, *[p.grad for p in capture.parameters]]
            return Fingerprint.of(torch.zeros((), device=device), found)

        self._run_prepared(body)
        self._program.abandon()
        expected = fingerprint()
        backup.restore()
        for p, g in zip(capture.parameters, gradients, strict=True):
            p.grad = g
        self._replay(capture, gradients)
        if expected.compare(fingerprint()) is None:
            # a number that is baked in and changes with each step is right once
            capture.verified = not isinstance(self._preparation, OptimizerTrial) or capture.replays > 1
            return
        backup.restore()
        for p, g in zip(capture.parameters, gradients, strict=True):
            p.grad = g
        self.problem = Problem(
            "the first replay of {O} leaves other parameters, gradients or optimizer state than the step without "
            "a graph",
            fix="It bakes in what changes"
            if isinstance(self._preparation, OptimizerTrial)
            else "Please report this; the optimizer runs without a graph",
        )
        log.warning("pygraph: %s", self.problem)
        self._forget(owned)
        self._run_prepared(body)

    def _forget(self, owned: bool) -> None:
        self._captures.pop(owned).graph.close()

    def close(self) -> None:
        """Release the graphs."""
        for owned in list(self._captures):
            self._forget(owned)


def _fits(mine: Tensor | None, other: Tensor | None) -> bool:
    """Whether a gradient can be copied to where the capture reads it."""
    if mine is None or other is None:
        return mine is other
    return (mine.shape, mine.dtype, mine.device, other.layout) == (
        other.shape,
        other.dtype,
        other.device,
        torch.strided,
    )
