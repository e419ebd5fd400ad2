"""The update as a graph of its own: unscale, clip, the optimizer's step, the scaler's update.

It works on gradients wherever they lie (`graphs.indirection`) without keeping them alive, or on copies where a graph
cannot do that. `.grad` stays the tensor that the backward has left.
"""

from __future__ import annotations

import logging
import operator
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from pygraph_train.boundary import UPDATE, done, executes, surely, taken_back
from pygraph_train.boundary import put_back as put_all_back
from pygraph_train.config import PyGraphConfig
from pygraph_train.core.memory import Memory, free_memory
from pygraph_train.core.passes import COMMUNICATES
from pygraph_train.graphs.engine import (
    Engine,
    Graph,
    IndirectionUnavailable,
    Inputs,
    NumbersNotFound,
    problem_of,
)
from pygraph_train.graphs.inputs import CopiedInputs
from pygraph_train.optimizers.preparation import OptimizerPreparation, outside_of_graphs
from pygraph_train.optimizers.program import SCALED, UNSCALED, UpdateProgram, optimized, why_update_is_plain
from pygraph_train.optimizers.several import preparation_of
from pygraph_train.problems import Problem
from pygraph_train.putting_back import Backup
from pygraph_train.report.step_report import CaptureRecord, StepReport
from pygraph_train.torch_private.memory import as_part_of, local_tensor, local_tensors
from pygraph_train.verification import Audits, Fingerprint, PlainRuns

log = logging.getLogger("pygraph_train")

_RUNS_BEFORE_CAPTURE, _LATER = 2, 8
"""Runs with the kernels that will be captured; the optimizer's state exists after the first. How many further ones a
first capture waits for others.
"""

_MOST_CHANGES = 3
"""So often a capture is thrown away because something it rests on has changed."""

_REPLAYS_PER_CHANGE = 50
"""A capture that served this many replays has paid for one more."""

_MOST_SETS = 4
"""Captures kept: one for each set of parameters that have no gradient (heads that take turns)."""

_SHARE_OF_COPIES = 0.05
"""Of all memory that the process has needed so far, which copies of gradients may take on top of it."""

_FEW_COPIES = 32 << 20
"""Bytes of copies that no process misses: cuBLAS has as much for each stream."""

_Key = tuple[bool, ...]
"""Which parameters have no gradient; empty where all have one."""

_NO_GRADIENT = (
    "In some steps none of the optimizer's parameters had a gradient. Make the optimizer behind what replaces "
    "parameters, as load_state_dict(assign=True) does"
)

_PENDING = (
    "In some steps a forward still waits for its backward, and what it has saved lies where the graph of the update "
    "computes. Keep losses without their autograd graph, as loss.detach() is"
)

_grad = operator.attrgetter("grad")

_dtype = operator.attrgetter("dtype")


class Layout(NamedTuple):
    """The gradients of a step: those that are there, where they are, and what they look like. Made on every step.

    Attributes:
        missing: for each parameter whether it has none; empty where all have one.
    """

    present: Sequence[Tensor]
    addresses: list[int]
    looks: tuple[Any, ...]
    missing: _Key

    @classmethod
    def of(cls, gradients: Sequence[Any]) -> Layout:
        """Of those that are there.

        Raises:
            RuntimeError: one of them has no memory of its own (sparse gradients).
        """
        present: Sequence[Tensor] = local_tensors(gradients)
        missing: _Key = ()
        if present is not gradients:  # one is None, or a part of a sharded one
            present = [g for g in present if g is not None]
            missing = () if len(present) == len(gradients) else tuple(g is None for g in gradients)
        strides = () if all(map(Tensor.is_contiguous, present)) else list(map(Tensor.stride, present))
        looks = (list(map(_dtype, present)), list(map(Tensor.numel, present)), strides)
        return cls(present, list(map(Tensor.data_ptr, present)), looks, missing)


class _Update(NamedTuple):
    """One update that is to be made.

    Attributes:
        body: it in Python.
        constants: Python values that a capture of `body` bakes in.
        step: the training step, for the report.
        parameters, gradients: of the optimizer.
        layout: of the gradients.
    """

    body: Callable[[], None]
    constants: Any
    step: int
    parameters: list[Tensor]
    gradients: list[Tensor | None]
    layout: Layout


@dataclass
class _CapturedUpdate:
    """A graph of the phase and what it rests on.

    Attributes:
        memory: in which it computes.
        addresses: of the parameters.
        counted: see `OptimizerPreparation.counted`.
        looks: of the gradients.
        inputs: the gradients.
        follow: gives the graph the hyperparameters of now.
    """

    graph: Graph
    follow: Callable[[], None]
    memory: Memory
    addresses: list[int]
    counted: list[Tensor]
    looks: tuple[Any, ...]
    inputs: Inputs
    hyperparameters: Any
    constants: Any
    generation: int
    verified: bool
    audits: Audits
    replays: int = 0

    def close(self) -> None:
        """Release the graph."""
        self.graph.close()
        self.inputs.close()


class OptimizerGraph:
    """Runs one optimizer's step, from a graph where that is proved to be the same.

    Gradients are wherever the user's backward left them, see `Layout`.

    Args:
        program: for the optimizer, and what else its step writes.
        engine: where graphs are made; may be shared with other optimizers.
        config: options.
        report: filled while running.
        tell: called with each reason against a graph.

    Attributes:
        optimizer: which is stepped.
        scaling: what the loop's GradScaler does for it.
        replayed: whether the last step ran from a graph.
        over: whether no further step can come from a graph.
    """

    _preparation: OptimizerPreparation  # once it was asked for

    def __init__(
        self,
        program: UpdateProgram,
        engine: Engine,
        config: PyGraphConfig,
        report: StepReport,
        tell: Callable[[Problem], object],
    ) -> None:
        assert program.optimizer is not None
        self.optimizer, self.scaling = program.optimizer, program.scaling
        self.replayed, self.over = False, config.optimizer == "off"
        self._program, self._engine, self._config = program, engine, config
        self._report, self._tell = report, tell
        self._asked = self._ready = False  # whether it can be in a graph
        self._held: Any = None  # by a hook of the optimizer
        self._begin_anew()

    def _begin_anew(self) -> None:
        self._problem: Problem | None = None  # why there are no more graphs
        self._waits = ""  # why the last step waited for a graph
        self._captures: dict[_Key, _CapturedUpdate] = {}  # by which gradients are there
        self._runs: dict[_Key, int] = {}
        self._copies = False  # whether graphs work on copies of the gradients
        self._changes = self._replays = 0

    def run(
        self,
        body: Callable[[], None],
        constants: Any = (),
        *,
        step: int,
        later: Callable[[], bool] = lambda: False,
        made: Any = None,
    ) -> None:
        """Make one step. Hot path.

        Args:
            body: the step in Python.
            constants: Python values that a capture of `body` bakes in.
            step: the training step, for the report.
            later: whether a first capture waits for others, a few steps. It moves the state to memory of its own, and
                steps without graphs need more memory for what has lain around it.
            made: see `Delivery.made`.
        """
        self.replayed, self._waits = False, ""
        if not (self._ready or self.serves()):
            return body()
        scaling = self.scaling
        told = scaling.unscaled if scaling.on else getattr(self.optimizer, "found_inf", None) is not None
        if told:
            self._tell(UNSCALED if scaling.on else SCALED)
            with self._preparation.prepared():  # the kernels of the graph from the first step on
                return body()
        self._make(body, (constants, scaling.numbers() if scaling.on else ()), step, later, made)
        self._report.update_ended(self.replayed, self._waits)
        if self._problem is not None:
            self._turn_off(self._problem)

    def serves(self) -> bool:
        """Whether `run` may replay the next step. Before the first one this is found out."""
        if not (self._asked or self.over):
            self._preparation = preparation_of(self.optimizer, self._engine)
            self._asked = True
            problem = why_update_is_plain(self._program, self._preparation)
            if problem is not None:
                self._turn_off(problem)
            self._ready = problem is None
        return self._ready

    def settle(self) -> None:
        """See `OptimizerPreparation.settle`."""
        if self._asked:
            self._preparation.settle(self._engine)

    def lives_with_its_optimizer(self) -> bool:
        """Let the optimizer hold this object until `close`, if it can: both go when nobody needs the optimizer."""
        try:
            self._held = self.optimizer.register_load_state_dict_post_hook(self._stay)
        except AttributeError:  # a wrapper of another library
            return False
        return True

    def _stay(self, optimizer: torch.optim.Optimizer) -> None:
        """A hook of the optimizer that does nothing. No copy of the optimizer has it."""

    def close(self) -> None:
        """Release the graph and give the optimizer back as it was. Later steps run as they are."""
        self.over = True
        self._give_back()
        if self._held is not None:
            self._held.remove()

    def _give_back(self) -> None:
        for key in list(self._captures):
            self._forget(key)
        if self._asked:
            self._preparation.close()
        self._asked = self._ready = False
        self._begin_anew()

    def _turn_off(self, problem: Problem) -> None:
        self.over = True
        self._give_back()
        self._tell(problem)

    def _make(
        self, body: Callable[[], None], constants: Any, step: int, later: Callable[[], bool], made: Any
    ) -> None:
        """Make the update with the gradients as they are. Hot path."""
        known = None if made is None or not made.fits else self._captures.get(())
        if known is not None and made.fits[0] is known.addresses:
            rests = known.constants == constants and self._rests(known)
            if rests and known.memory.free and self._served(known, made.fits[1]):
                return None
        parameters = list(optimized(self.optimizer))
        gradients = list(map(_grad, parameters))
        try:
            layout = Layout.of(gradients)
        except RuntimeError as error:
            self._problem = self._preparation.problem or outside_of_graphs(str(error))
            return body()
        key = layout.missing
        capture = self._captures.get(key)
        if capture is not None and (why := self._invalid(capture, parameters, layout, constants)) is not None:
            self._forget(key)
            capture = None
            # state of what is new comes into being outside of a capture
            self._runs[key] = _RUNS_BEFORE_CAPTURE - 1
            if not self._may_change():
                self._problem = why
                return body()
        if capture is None:
            if (problem := self._preparation.problem) is not None:
                self._problem = problem
                return body()
            if not self._preparation.state.as_left():
                self._runs = {key: min(runs, _RUNS_BEFORE_CAPTURE - 1) for key, runs in self._runs.items()}
            enough = _RUNS_BEFORE_CAPTURE + (_LATER if not self._captures and later() else 0)
            if self._runs.setdefault(key, 0) < enough or not layout.addresses:
                self._waits = "" if layout.addresses else _NO_GRADIENT
                self._runs[key] += 1
                return self._run_prepared(body)
            if not self._make_room():
                self._problem = _ABSENT
                return body()
            capture = self._capture(_Update(body, constants, step, parameters, gradients, layout))
            if capture is None:
                return body()
            self._captures[key] = capture
        if not capture.memory.free:
            self._waits = _PENDING
            return self._run_prepared(body)
        if made is not None and not key and set(map(id, gradients)) <= set(map(id, made.gradients)):
            made.fits[:] = capture.addresses, layout  # not the capture, which would keep the model
        if not self._served(capture, layout):
            self._verified_replay(capture, _Update(body, constants, step, parameters, gradients, layout))

    def _served(self, capture: _CapturedUpdate, layout: Layout) -> bool:
        """Replay, unless the replay has to be compared. Hot path."""
        audits = capture.audits
        if not capture.verified or (audits.left <= 0 and audits.due(time.perf_counter())):
            return False
        audits.left -= 1
        self.replayed = True
        self._replay(capture, layout)
        return True

    def _replay(self, capture: _CapturedUpdate, layout: Layout) -> None:
        """The hot path: where the gradients are, the learning rate, launch."""
        capture.inputs.take(layout.present, layout.addresses)
        self._preparation.sync()
        capture.follow()
        executes(UPDATE)
        capture.graph.replay()
        increment_version(capture.counted)
        if type(capture.inputs) is CopiedInputs:  # others are what a graph works on
            surely(partial(capture.inputs.give_back, layout.present), UPDATE)
        done(None)
        capture.replays += 1
        self._replays += 1

    def _invalid(
        self, capture: _CapturedUpdate, parameters: list[Tensor], layout: Layout, constants: Any
    ) -> Problem | None:
        """What to say if this goes on, None where everything is as captured."""
        found = list(map(Tensor.data_ptr, local_tensors(parameters)))
        if (moved := found != capture.addresses) and len(found) == len(capture.addresses):
            return Problem("parameters live at new addresses again and again")
        if capture.constants != constants:
            return Problem("how gradients are clipped or scaled changes again and again")
        looks = not moved and capture.looks == layout.looks and capture.inputs.fit(layout.addresses)
        return None if looks and self._rests(capture) else self._preparation.what_changed()

    def _rests(self, capture: _CapturedUpdate) -> bool:
        """Whether the optimizer's state and hyperparameters are as captured. Hot path."""
        return (
            capture.generation == self._preparation.generation
            and self._preparation.state_unchanged()
            and bool(self._preparation.hyperparameters() == capture.hyperparameters)
        )

    def _run_prepared(self, body: Callable[[], None]) -> None:
        with self._preparation.prepared():
            body()
        increment_version(self._preparation.counted())
        self._preparation.state.leave()

    def _capture(self, update: _Update) -> _CapturedUpdate | None:
        """Record the phase without executing it; None (and a `problem`) where that cannot be done."""
        started = time.perf_counter()
        preparation, layout = self._preparation, update.layout
        parameters, gradients = update.parameters, update.gradients
        if (reason := self._program.why_update_stays_outside(preparation)) is not None:
            self._problem = outside_of_graphs(reason)
            return None
        if any(
            getattr(g, "placements", None) != getattr(p, "placements", None)
            for p, g in zip(parameters, gradients, strict=True)
            if g is not None
        ):
            self._problem = outside_of_graphs(COMMUNICATES)  # the parts of a sum, which the update adds up
            return None
        preparation.settle(self._engine)
        try:
            inputs = self._inputs(layout.present)
        except IndirectionUnavailable as error:
            self._problem = outside_of_graphs(str(error))
            return None
        parts = iter(inputs.stand_ins)
        stand_ins = [None if g is None else as_part_of(g, next(parts)) for g in gradients]
        put_back = self.scaling.notes()
        numbers = preparation.live_numbers()
        try:
            for p, s in zip(parameters, stand_ins, strict=True):
                p.grad = s
            memory, unmade = free_memory(self._engine), preparation.state.none_is_made()
            with preparation.prepared(), numbers.marked(), unmade, memory.recording(self._engine):
                graph, _ = self._engine.capture(update.body)
        except Exception as error:
            inputs.close()
            self._problem = problem_of(error)
            return None
        finally:
            for p, g in zip(parameters, gradients, strict=True):
                p.grad = g
            put_back()
        try:
            inputs.follow(graph)
            follow = numbers.follow(graph)
        except (NumbersNotFound, IndirectionUnavailable) as error:
            graph.close()
            inputs.close()
            if isinstance(error, NumbersNotFound):
                log.info("pygraph: hyperparameters stay in the graph of the optimizer: %s", error)
                preparation.numbers_stay()
            else:
                log.info("pygraph: the graph of the optimizer works on copies of gradients: %s", error)
                self._copies = True
            return self._capture(update)
        preparation.remember()
        made = _CapturedUpdate(
            graph=graph,
            follow=follow,
            memory=memory,
            addresses=list(map(Tensor.data_ptr, local_tensors(parameters))),
            counted=preparation.counted(),
            looks=layout.looks,
            inputs=inputs,
            hyperparameters=numbers.baked(preparation.hyperparameters()),
            constants=update.constants,
            generation=preparation.generation,
            verified=self._config.verify == "off",
            audits=Audits(self._config.verify, time.perf_counter()),
        )
        seconds = time.perf_counter() - started
        self._report.captured(CaptureRecord("{O}", seconds, graph.nodes, False, update.step))
        log.info("pygraph: captured {O} in %.2f s (%d nodes)", seconds, graph.nodes)
        return made

    def _inputs(self, gradients: Sequence[Tensor]) -> Inputs:
        """Gradients as inputs of the next capture: wherever they lie, or copied.

        Raises:
            IndirectionUnavailable: neither is possible.
        """
        try:
            if not self._copies and {Tensor}.issuperset(map(type, gradients)):
                return self._engine.movable(gradients)
        except IndirectionUnavailable as error:
            log.info("pygraph: the graph of the optimizer works on copies of gradients: %s", error)
        needed, peak = sum(g.nbytes for g in gradients), self._engine.peak_memory()
        if peak and needed > max(_SHARE_OF_COPIES * peak, _FEW_COPIES):
            raise IndirectionUnavailable(
                f"gradients lie elsewhere in each step, and copies of them would take {needed >> 20} MiB, where the "
                f"whole training has needed {peak >> 20} MiB so far"
            )
        return CopiedInputs(gradients)

    def _verified_replay(self, capture: _CapturedUpdate, update: _Update) -> None:
        """A replay that must leave what the phase leaves without a graph; else it is undone."""
        parameters, gradients, body = update.parameters, update.gradients, update.body
        device, started, audited = self._program.device, time.perf_counter(), capture.verified
        before = [g for g in gradients if g is not None]
        state = [*parameters, *self._preparation.state_tensors(), *self.scaling.tensors()]
        backup = Backup(device, list({id(t): t for t in (*state, *before)}.values()), self._engine.room())

        def fingerprint(*, distances: bool = True) -> Fingerprint:
            return Fingerprint.of([*state, *map(_grad, parameters)], distances=distances)

        def undo() -> None:
            put_all_back(backup.restore)
            for p, g in zip(parameters, gradients, strict=True):
                p.grad = g
            taken_back()

        def without_graph(*, distances: bool = True) -> Fingerprint:
            put_back = self.scaling.notes()
            self._run_prepared(body)
            put_back()
            found = fingerprint(distances=distances)
            undo()
            return found

        def compared() -> str | None:
            plain = without_graph(distances=False)
            self._replay(capture, update.layout)
            if plain.same_bits(fingerprint(distances=False)):
                return None
            undo()
            runs = PlainRuns(without_graph(), "tensor")
            self._replay(capture, update.layout)
            found = fingerprint()
            undo()
            while not runs.enough(found):
                runs.add(without_graph())
            if (difference := runs.refuse(found)) is not None:
                return difference
            self._replay(capture, update.layout)
            return runs.refuse(fingerprint())

        try:
            difference = compared()
            seconds = time.perf_counter() - started
            capture.audits.took(seconds, first=not audited)
            self._report.compared(seconds, audit=audited)
        except Exception:  # nothing is known of this replay
            undo()
            raise
        if difference is None:
            self.replayed = audited
            capture.verified = True
            return
        undo()
        self._forget(update.layout.missing)
        if not audited and not isinstance(capture.inputs, CopiedInputs):
            log.info("pygraph: the graph of the optimizer works on copies of gradients: %s", difference)
            self._copies = True
            return self._run_prepared(body)
        self._problem = Problem(
            f"{f'replay {capture.replays}' if audited else 'the first replay'} of {{O}} leaves other parameters, "
            f"gradients or optimizer state than the step without a graph: {difference}",
            fix="Please report this; the optimizer runs without a graph",
        )
        log.warning("pygraph: %s", self._problem)
        self._run_prepared(body)

    def _make_room(self) -> bool:
        """Before a capture for another set of gradients: False where old ones go again and again."""
        if len(self._captures) < _MOST_SETS:
            return True
        self._forget(min(self._captures, key=lambda key: self._captures[key].replays))
        return self._may_change()

    def _may_change(self) -> bool:
        """Count a change: whether replays so far have paid for it."""
        self._changes += 1
        return self._changes <= _MOST_CHANGES + self._replays // _REPLAYS_PER_CHANGE

    def _forget(self, key: _Key) -> None:
        self._captures.pop(key).close()


_ABSENT = outside_of_graphs(
    "which parameters have gradients changes again and again",
    f"Let at most {_MOST_SETS} sets of parameters take turns, or give each group an optimizer of its own",
)


class SteppedByLoop(UpdateProgram):
    """Of an optimizer that a loop steps. The loop clips, and a scaler of sharded gradients is refused."""

    def why_update_stays_outside(self, preparation: OptimizerPreparation) -> str | None:
        reason = self.scaling.why_update_stays_outside(preparation)
        parameters = optimized(self.optimizer)
        if reason is None and self.scaling.on and any(local_tensor(p) is not p for p in parameters):
            return (
                "parameters are sharded, and the GradScaler asks all ranks whether gradients have overflowed"
            )
        return reason
