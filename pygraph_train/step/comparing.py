"""A replay that is compared with the same step without a graph, and what follows where they differ."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from pygraph_train.boundary import put_back as put_all_back
from pygraph_train.boundary import taken_back
from pygraph_train.problems import NotLegal, Problem, PyGraphError
from pygraph_train.step.capture_maker import CaptureMaker
from pygraph_train.step.flight import StepInFlight
from pygraph_train.step.program import Call
from pygraph_train.step.region_memory import LIMIT, SMALL
from pygraph_train.step.together import Together
from pygraph_train.step.training_run import TrainingRun
from pygraph_train.step.updates import Updates
from pygraph_train.step.variants import Capture, Variant
from pygraph_train.tracing.refusals import OUT_OF_MEMORY, problem_of
from pygraph_train.verification import Fingerprint, PlainRuns

__all__ = ["Comparing"]

log = logging.getLogger("pygraph_train")

_NO_MEMORY_TO_COMPARE = (
    "a replay was not compared with the step without a graph once more: beside the graph the step needs more memory "
    "than the device has, or than the training has needed so far"
)

_MOST_REPLAYS = 3
"""Of one step, where runs without a graph differ among themselves: what is rare does not come in each of them."""

R = TypeVar("R")


class Comparing:
    """Compares replays.

    Args:
        training, updates, maker: of the runner.
        call_of: how a step is run with the kernels that its graph holds.
        together: of ranks that compare together; None for one process.
    """

    def __init__(
        self,
        training: TrainingRun,
        updates: Updates,
        maker: CaptureMaker,
        call_of: Callable[[Variant], Call],
        together: Together | None,
    ) -> None:
        self._training = training
        self._updates = updates
        self._maker = maker
        self._call_of = call_of
        self._together = together
        # who asks for a comparison of each replay pays for it
        self._samples, self._bound = training.config.verify == "sample" and together is None, 0

    def __call__(
        self,
        step: StepInFlight,
        variant: Variant,
        capture: Capture,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        runs: PlainRuns | None,
        replay: Callable[[], R],
    ) -> R:
        """Make a replay that must give what the step gives without a graph.

        Where it gives something else, the step runs without a graph a few more times: runs of kernels that add in no
        fixed order differ among themselves, and a replay may differ as they do.

        Args:
            runs: the step without a graph, where it was run already.
            replay: makes the replay. It is called again where the first one had to be undone.
        Raises:
            NotLegal: it gives something else, and is undone.
        """
        started, training, maker = time.perf_counter(), self._training, self._maker

        def without_graph() -> Fingerprint:
            # with the batch itself: what loads the graph's inputs is compared as well
            call, updates, sync = self._call_of(variant), capture.updates, step.position.sync
            most = self._most() if capture.verified and self._samples else None
            with _nothing_made(), training.engine.bounded(most):
                return maker.reference(
                    variant, capture.gradients, call, args, kwargs, updates=updates, sync=sync
                )

        if runs is None:
            try:
                runs = PlainRuns(without_graph())
            except NotLegal as refused:
                if not capture.verified or refused.problem is not OUT_OF_MEMORY or self._together is not None:
                    raise
                return self._unaudited(step, variant, capture, started, replay)
        with _nothing_made():
            before = capture.gradients.snapshot()
            with maker.stage():
                backup = maker.backup(variant, capture, args, kwargs, self._updates.preparation)
        put_back = training.program.replication.notes()

        def undo() -> None:
            put_all_back(backup.restore, put_back, lambda: capture.gradients.restore(before))
            taken_back()
            training.replays -= 1
            training.clock.undone()

        bits, stands = self._same_arithmetic(capture), True
        try:
            result = self._timed(variant, replay)
            found = self._left_by(capture)
            difference = runs.first.compare(found, bits=bits)
            differs = self._anywhere(difference is not None)
            if differs and self._anywhere(not runs.enough(found)):
                undo()
                stands = False
                while self._anywhere(not runs.enough(found)):
                    runs.add(without_graph())
                difference = None if difference is None else runs.refuse(found)
                if not self._anywhere(difference is not None):
                    result, stands = replay(), True
                    found = self._left_by(capture)
                    difference = runs.first.compare(found, bits=bits)
            difference = None if difference is None else runs.refuse(found)
            tries = 1
            while tries < _MOST_REPLAYS and self._is_rare(runs, found, difference):
                if stands:
                    undo()
                stands, tries = False, tries + 1
                result, stands = replay(), True
                found = self._left_by(capture)
                difference = runs.first.compare(found, bits=bits)
                difference = None if difference is None else runs.refuse(found)
            if differs and stands:
                self._note(capture, runs)
            training.engine.trim()
            problem = self._found(step, variant, capture, difference, time.perf_counter() - started)
        except Exception:  # another rank has failed, or this one
            if stands:
                undo()
            raise
        if problem is None:
            capture.verified = True
            return result
        if stands:
            undo()
        raise NotLegal(problem)

    def _found(
        self, step: StepInFlight, variant: Variant, capture: Capture, difference: str | None, seconds: float
    ) -> Problem | None:
        """Note what a comparison has cost. Returns what speaks against the graph, here or on another rank."""
        training = self._training
        training.report.compared(seconds, audit=capture.verified)
        training.clock.interrupted()
        capture.audits.took(seconds, first=not capture.verified)
        variant.compare_seconds = capture.audits.last
        if variant.family is not None and training.engine.name == "cuda":
            variant.family.costs.compares(seconds)
        problem = None
        if difference is not None:
            if variant.family is not None:
                variant.family.differed = True
            which = f"replay {variant.replays}" if capture.verified else "the first replay"
            problem = Problem(
                f"{which} of {step.position} differs from the step without a graph: {difference}",
                fix="Please report this as a bug. Steps of this kind are not replayed as a whole any more",
            )
            log.warning("pygraph: %s", problem)
        return problem if self._together is None else self._together.confirm(problem)

    def _most(self) -> int:
        """Bytes that may be reserved while a step without a graph runs beside its graph, once the training has begun:
        what was reserved before, and a little more."""
        peak = self._training.engine.memory().peak
        if peak > self._bound:  # nothing is added to what an audit itself has reserved
            self._bound = max(int(LIMIT * peak), peak + SMALL)
        return self._bound

    def _unaudited(
        self,
        step: StepInFlight,
        variant: Variant,
        capture: Capture,
        started: float,
        replay: Callable[[], R],
    ) -> R:
        """Make a replay that cannot be compared once more: a step without a graph has no memory beside the graph."""
        training = self._training
        training.engine.tidy()  # what the run that failed has left
        capture.audits.took(time.perf_counter() - started, first=False)
        training.clock.interrupted()
        training.report.note(_NO_MEMORY_TO_COMPARE)
        return replay()

    def _timed(self, variant: Variant, replay: Callable[[], R]) -> R:
        """Make a replay that is compared, and so waited for. What it takes decides which shapes get graphs."""
        engine, family, compiled = self._training.engine, variant.family, variant.arm.compiled
        if family is None or engine.name != "cuda":
            return replay()
        engine.synchronize()
        started = time.perf_counter()
        result = replay()
        engine.synchronize()
        family.costs.replayed(time.perf_counter() - started, compiled=compiled)
        return result

    def _left_by(self, capture: Capture) -> Fingerprint:
        """What the last replay has left."""
        program = self._training.program
        left = [*capture.gradients.final, *program.left_behind()]
        return Fingerprint.of(capture.loss, left)

    def _same_arithmetic(self, capture: Capture) -> bool:
        """Whether the step without a graph rounds as the graph does.

        It exchanges gradients after the backward, and unscales them with another kernel than an optimizer that does so
        itself.
        """
        program = self._training.program
        if self._training.engine.name == "emulated":
            return True
        in_kernels = capture.updates and program.scaling.on and program.scaling.unscales_itself
        return program.replication.group is None and not in_kernels

    def _is_rare(self, runs: PlainRuns, found: Fingerprint, difference: str | None) -> bool:
        """Whether replays differ from what runs have shown, here or on another rank, and one more may not."""
        if not self._anywhere(difference is not None):
            return False
        return not self._anywhere(difference is not None and not runs.may_be_rare(found))

    def _anywhere(self, flag: bool) -> bool:
        return flag if self._together is None else self._together.anywhere(flag)

    def _note(self, capture: Capture, runs: PlainRuns) -> None:
        if not capture.verified and not runs.agree:
            self._training.report.note(
                f"runs of a step without a graph differ among themselves, and replays as much: {runs.noise()}"
            )


@contextmanager
def _nothing_made() -> Iterator[None]:
    """Around work before which nothing of the step stands: where it fails, the step runs without a graph.

    Raises:
        NotLegal: it has failed. There may be no memory for one more run.
    """
    try:
        yield
    except PyGraphError:
        raise
    except Exception as error:
        raise NotLegal(problem_of(error)) from error
