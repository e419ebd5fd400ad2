"""Looks up what is known of a call, decides what its next step is for, and has it done."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from pygraph_train.boundary import REPLAY, Boundary, done, executes, quietly
from pygraph_train.graphs.devices import let_go
from pygraph_train.parallel.agreement import Word
from pygraph_train.problems import Problem
from pygraph_train.selection.arms import Arm
from pygraph_train.step.advancing import REPLAYS_BEFORE_COMPILING, Advancing
from pygraph_train.step.capture_maker import CaptureMaker
from pygraph_train.step.capturing import Capturing
from pygraph_train.step.decisions import Decisions
from pygraph_train.step.families import Families
from pygraph_train.step.flight import Ran, Replayed, StepInFlight, made_once
from pygraph_train.step.lifecycle import StageLengths
from pygraph_train.step.lookup import Lookup
from pygraph_train.step.outside import Outside
from pygraph_train.step.plan import PositionInAccumulation
from pygraph_train.step.program import Call, plain_call
from pygraph_train.step.python_writes import PythonWrites
from pygraph_train.step.refusing import Refusing
from pygraph_train.step.regions import Regions
from pygraph_train.step.replays import Replays
from pygraph_train.step.resting import Resting
from pygraph_train.step.signatures import Signatures
from pygraph_train.step.together import Together
from pygraph_train.step.training_run import TrainingRun
from pygraph_train.step.turns import in_turn
from pygraph_train.step.ungraphed import UngraphedSteps
from pygraph_train.step.updates import Updates
from pygraph_train.step.variants import Capture, Variant
from pygraph_train.step.watching import Watching
from pygraph_train.tracing.refusals import BATCH_IN_STATE
from pygraph_train.tracing.signature import flattened, key_of

__all__ = ["StepRunner"]

R = TypeVar("R")

_PATIENCE = 40
"""Steps without a replay, and with a reason, after which there is no hope."""


_TOO_OFTEN = Problem("pygraph-train has failed too often in this training")


def _survived(make: Callable[..., Any]) -> Callable[..., Any]:
    """`make`, in whose place the step runs as it is written where the library fails. Hot path."""

    @functools.wraps(make)
    def made(
        self: StepRunner,
        step: StepInFlight,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        run: Callable[[Call], Any],
        flat: tuple[Any, list[Any]] | None = None,
    ) -> Any:
        if (together := self._together) is not None:
            run = together.voted_first(run, lambda: self._refusing.off)
        boundary = self._boundary
        failures = boundary.failures
        once = made_once(run, boundary)
        result = boundary.make(
            lambda: make(self, step, args, kwargs, once, flat), lambda: Ran(run(plain_call))
        )
        if failures != boundary.failures and not boundary.resting:  # believe nothing of such calls
            quietly(lambda: self._signatures.begin_anew(key_of(*flattened((args, kwargs)))))
        return result

    return made


class StepRunner:
    """Runs training steps, from a graph where that is proved to be the same.

    ```python
    step = runner.begin(position)
    outcome = runner.make(step, args, kwargs, run)   # calls `run` where nothing is replayed
    step.update(body)                                # where the update was not part of the replay
    step.finish()
    ```

    Args:
        training: whose steps they are.
    """

    def __init__(self, training: TrainingRun) -> None:
        program, config, engine, report = training.program, training.config, training.engine, training.report
        steps_left, announce, on_decision = training.steps_left, training.announce, training.on_decision
        regions = Regions(program, config, engine, report, announce, training.clock.compiled)
        updates = Updates(training, regions)
        told = steps_left, on_decision, self._settled
        decisions = Decisions(program, config, engine, report, training.times, *told)
        signatures = _signatures(training)
        together = None if program.replication.group is None else Together(training, program.replication)
        maker = CaptureMaker(training, updates.context, together)
        self._together, self._lookup = together, Lookup(program, updates, maker.anchors)
        self._training, self._regions, self._updates = training, regions, updates
        self.count = training.step_made_elsewhere  # without this runner
        self._signatures, self._ungraphed = signatures, UngraphedSteps(training, updates, regions, decisions)
        self._refusing = Refusing(training, updates, decisions, signatures, self._ungraphed)
        self._outside, self._writes = Outside(program), PythonWrites(program)
        self._replays = Replays(training, updates, maker, self._writes, self._replay)
        capture = Capturing(training, updates, decisions, maker, signatures, self._refusing.update, together)
        parts = (training, updates, decisions, signatures, self._ungraphed, self._refusing)
        self._advance = Advancing(*parts, Watching(*parts[:2], maker), capture, self._replays, together)
        self._boundary = Boundary(training.note, lambda: self.stop(_TOO_OFTEN))
        self._flies_with = (training, updates, regions, self._refusing.update, self._boundary)
        self._present = StepInFlight(PositionInAccumulation(), None, *self._flies_with)
        self._launch_bound, self._tried_from = decisions.launch_bound(training.steps_made), 0
        rests = (training, self._launch_bound, updates, signatures, self._ungraphed, self._refusing, together)
        self._resting = Resting(*rests)
        self.take_rest = self._resting.take

    def begin(self, position: PositionInAccumulation) -> StepInFlight:
        """A training step begins, or one micro-batch of it: `position` says where that stands in accumulation."""
        self._training.step_began()
        if self._together is not None:
            self._together.begin()
        self._present = StepInFlight(position, self._present.choice, *self._flies_with)
        return self._present

    @_survived
    @in_turn
    def make(
        self,
        step: StepInFlight,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        run: Callable[[Call], R],
        flat: tuple[Any, list[Any]] | None = None,
    ) -> Replayed | Ran[R]:
        """Make forward and backward of a step, and its update where the graph holds that.

        Args:
            step: made by `begin`.
            args, kwargs: what the step's function is called with.
            run: makes the whole step without a graph, calling the step's function through the `Call`
                that it is given, exactly once.
            flat: structure and leaves of `(args, kwargs)`, where the caller has them from `flatten`.
        """
        together = self._together
        if together is not None and together.ended is not None and self._refusing.off is None:
            self._refusing.run(together.ended)
        if (problem := self._outside.why_plain()) is not None:
            self._refusing.plain_step(problem, for_good=self._outside.for_good)
        if problem is not None or self._refusing.stopped:
            return Ran(self._ungraphed.plainly(run))
        if self._launch_bound is not None:
            if together is not None:
                together.waits_for_host(self._launch_bound.open)
            if not (self._launch_bound.open if together is None else together.open):
                if not self._launch_bound.rest:
                    self._signatures.sees(key_of(*(flat or flattened((args, kwargs)))))
                return Ran(self._launch_bound.run(lambda: self._ungraphed.plainly(run)))
            self._launch_bound, self._tried_from = None, self._training.step
        if self._refusing.off is not None or self._refusing.refuses(self._outside.why_no_whole_step()):
            return Ran(self._ungraphed.with_the_best_plan(step, run))
        structure, leaves = flat or flattened((args, kwargs))
        key = key_of(structure, leaves)
        signature = self._signatures.get(key)
        if signature is None:
            return self._advance(step, self._signatures.meet(key), None, args, kwargs, leaves, run)
        if (no_graphs := signature.no_graphs) is not None and no_graphs.quiet:
            no_graphs.quiet -= step.position.fresh  # no graph of both is settled: nothing has to be checked
            step.arm, step.given_up = no_graphs.arm, True
            return Ran(self._ungraphed.as_its_arm_says(step, run))
        if signature.is_unseen():
            return Ran(self._ungraphed.with_the_best_plan(step, run))
        variant = self._lookup.variant_of(signature, args, kwargs, leaves)
        if variant is None:
            return self._advance(step, self._signatures.meet(key), None, args, kwargs, leaves, run)
        if (choice := variant.choice) is not None:
            if choice.quiet and step.position.fresh:
                choice.quiet -= 1
            else:
                step.count_for(choice)
                variant.arm = choice.arm
                self._updates.serve(variant.arm.plan)
                self._advance.make_way(variant)
                settled_without = choice.controller.settled and not variant.arm.plan.forward_backward
                signature.no_graphs = choice if settled_without else None
        elif variant.lead is not None:
            variant.follow()
        step.arm = variant.arm
        if not variant.arm.plan.forward_backward and (choice or variant.lead) is not None:
            return Ran(self._ungraphed.as_its_arm_says(step, run))
        capture = variant.captures.get(variant.capture_key(step.position))
        if capture is not None and not capture.fits():
            return Ran(self._ungraphed.plainly(run))
        loaded = self._writes.load(variant, capture, args, kwargs, leaves) if variant.trace.loads else leaves
        if capture is not None and self._lookup.reads_written_memory(variant, capture, loaded):
            self._refusing.plain_step(BATCH_IN_STATE, for_good=False)
            return Ran(self._ungraphed.plainly(run))
        if capture is not None and self._lookup.is_valid(variant, capture):
            if together is not None and (word := together.replays(capture)) is not Word.REPLAY:
                if word is Word.PLAIN:
                    if together.is_lost(capture):
                        variant.forget_captures()
                    return Ran(self._ungraphed.plainly(run))
                return self._advance.audited(step, signature, variant, capture, args, kwargs, leaves, run)
            signature.refused = 0
            if variant.choice is None and variant.lead is None:
                variant.choice = self._advance.compare_plans(variant)
            made = self._replays(step, variant, capture, args, kwargs, loaded)
            return made if isinstance(made, Replayed) else self._refusing.taken_back(step, run)
        return self._advance(step, signature, variant, args, kwargs, leaves, run)

    def _replay(self, variant: Variant, capture: Capture, leaves: Sequence[Any]) -> Replayed:
        """Numbers drawn, inputs in, learning rate in, launch, results out."""
        variant.load(capture, leaves)
        capture.gradients.before_replay()
        if capture.updates and self._updates.preparation is not None:
            self._updates.preparation.sync()
        executes(REPLAY)
        try:
            capture.graph.replay()
        except BaseException:
            if self._training.program.empties_first:  # as the step that fails would have left them
                capture.gradients.empty()
            raise
        capture.gradients.after_replay()
        if capture.number:
            self._training.program.replication.replayed(sync=capture.sync)
        capture.audits.left -= 1
        without_inductor = variant.replayed(self._training.step)
        self._training.replays += 1
        self._training.clock.replayed(self._training.step)
        self._present.came_from_graph(updated=capture.updates)
        if without_inductor == REPLAYS_BEFORE_COMPILING:
            self._advance.consider_compiling(variant)
        return done(Replayed(capture.outputs(leaves), capture.updates))

    def _settled(self, arm: Arm) -> None:
        self._resting.settled(arm)

    @property
    def stopped(self) -> bool:
        """Whether every further step runs without a graph of forward and backward."""
        return self._refusing.off is not None

    @property
    def hopeless(self) -> bool:
        """Whether many steps have brought reasons, and neither a replay nor a region."""
        run, tried = self._training, self._training.step - self._tried_from
        return tried >= _PATIENCE and run.reasons > 0 and not (run.replays or self._regions.records)

    def share(self, flag: bool) -> list[bool] | None:
        """Between steps: a flag of each rank, without a look at the device. None where ranks exchange nothing."""
        return None if self._together is None else self._together.share(flag)

    def stop(self, problem: Problem) -> None:
        """Run every further step without a graph, and say why."""
        self._refusing.run(problem, everything=True)

    def close(self) -> None:
        """Release every graph and give the optimizer back as it was."""
        if self._together is not None:
            quietly(self._together.leave)
        engine = self._training.engine
        quietly(self._signatures.close, self._regions.close, self._refusing.close, lambda: let_go(engine))


def _signatures(training: TrainingRun) -> Signatures:
    """What is known of calls. One trace serves many shapes where one process traces the step itself."""
    program, warmup = training.program, training.config.warmup_steps
    apart = program.by_hand or program.replication.group is not None or program.replication.sharded
    lengths = StageLengths(met=warmup, watched=warmup)
    return Signatures(lengths, None if apart else Families(), training.report.shapes.meets)
