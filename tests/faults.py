"""Faults of the library that tests plant: each one patches a part of it, and tests have to notice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from pygraph_train.core import node, region
from pygraph_train.core.memory import Memory
from pygraph_train.core.node import Delivery
from pygraph_train.core.numbers import Numbers
from pygraph_train.core.recording import RecordedRegion
from pygraph_train.core.region import PhaseRegion
from pygraph_train.graphs.cuda import CudaEngine
from pygraph_train.graphs.emulated import EmulatedEngine, EmulatedGraph
from pygraph_train.graphs.engine import CaptureError, NumbersNotFound
from pygraph_train.optimizers import preparation
from pygraph_train.optimizers.numbers import LiveNumbers, NumberPlace
from pygraph_train.optimizers.preparation import OptimizerPreparation
from pygraph_train.putting_back import ScratchState
from pygraph_train.step.phase_runner import PhaseRunner
from pygraph_train.verification import Fingerprint, PlainRuns

__all__ = [
    "FAULTS",
    "Plant",
    "nothing_compares_equal",
    "nothing_is_captured",
    "numbers_are_not_found",
    "replays_are_wrong",
    "steps_fail",
]

Plant = Callable[[pytest.MonkeyPatch], None]


def numbers_are_not_found(patch: pytest.MonkeyPatch) -> None:
    """Graphs keep the hyperparameters of their capture, as where nobody can read their nodes."""

    def numbers(graph: Any, sets: Any, kernels: Any) -> Any:
        raise NumbersNotFound("not found")

    patch.setattr(EmulatedGraph, "numbers", numbers)


def nothing_is_captured(patch: pytest.MonkeyPatch, error: Exception | None = None) -> Callable[[], int]:
    """Let every capture fail, with this error. Returns a function that says how many were tried so far."""
    tried = 0

    def capture(self: Any, *args: Any, **kwargs: Any) -> Any:
        nonlocal tried
        tried += 1
        raise error or CaptureError("a planted fault lets every capture fail")

    patch.setattr(EmulatedEngine, "capture", capture)
    patch.setattr(CudaEngine, "capture", capture)
    return lambda: tried


def nothing_compares_equal(patch: pytest.MonkeyPatch) -> None:
    """Let every comparison of a replay with the step without a graph find a difference."""
    _constant(PlainRuns, "same", False)(patch)
    _constant(Fingerprint, "same_bits", False)(patch)
    _constant(PlainRuns, "refuse", "planted")(patch)


def steps_fail(patch: pytest.MonkeyPatch) -> None:
    """A fault of the library in each step, before anything has happened."""

    def failing(*args: Any) -> None:
        raise RuntimeError("a fault of the library")

    patch.setattr(PhaseRunner, "begin", failing)


def replays_are_wrong(patch: pytest.MonkeyPatch) -> None:
    """Let replays of forwards compute with another first row than that of the batch, from the first one on."""
    replay, load, filled = EmulatedGraph.replay, RecordedRegion._load, []

    def noting(self: RecordedRegion, given: Sequence[Any]) -> None:
        load(self, given)
        filled[:] = [target for target in self._targets if target.is_floating_point()]

    def wrong(self: EmulatedGraph) -> None:
        for target in filled:
            target.detach()[0].mul_(2.0)
        replay(self)

    patch.setattr(RecordedRegion, "_load", noting)
    patch.setattr(EmulatedGraph, "replay", wrong)


def _constant(owner: Any, name: str, value: Any) -> Plant:
    """A function that always returns the same."""
    return lambda patch: patch.setattr(owner, name, lambda *args, **kwargs: value)


def _forgets_the_last_tensor(patch: pytest.MonkeyPatch) -> None:
    def load(self: RecordedRegion, given: Sequence[Any]) -> None:
        for i in self._moving[:-1] if self.generation else self._moving:
            self._static[i].data.copy_(given[i].detach())

    patch.setattr(RecordedRegion, "_load", load)


def _batches_stay(patch: pytest.MonkeyPatch) -> None:
    """Replays are compared as they are: only what the caller gave stays as it was."""
    forward = RecordedRegion.replay_forward

    def without_writing(self: RecordedRegion, given: Sequence[Any], token: Any) -> tuple[Any, ...]:
        written, self._written_back = self._written_back, []
        try:
            return forward(self, given, token)
        finally:
            self._written_back = written

    patch.setattr(RecordedRegion, "replay_forward", without_writing)


def _results_in_the_memory_of_the_graph(patch: pytest.MonkeyPatch) -> None:
    forward = RecordedRegion.replay_forward

    def without_copies(self: RecordedRegion, given: Sequence[Any], token: Any) -> tuple[Any, ...]:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(torch.Tensor, "clone", torch.Tensor.detach)
            return forward(self, given, token)

    patch.setattr(RecordedRegion, "replay_forward", without_copies)


def _absent_gradients_are_zero(patch: pytest.MonkeyPatch) -> None:
    deliver = Delivery._deliver

    def with_zeros(
        self: Delivery, parameters: Sequence[Tensor], found: Sequence[Tensor | None], *first: bool
    ) -> None:
        pairs = zip(parameters, found, strict=True)
        deliver(self, parameters, [torch.zeros_like(p) if g is None else g for p, g in pairs], *first)

    patch.setattr(Delivery, "_deliver", with_zeros)


def _memory_of_parameters_is_not_looked_at(patch: pytest.MonkeyPatch) -> None:
    """A parameter whose memory was replaced is taken for the one that was recorded."""

    def objects(self: PhaseRegion, given: Sequence[Any]) -> list[Any]:
        return [id(given[i]) for i in self._positions]

    patch.setattr(PhaseRegion, "_identity", objects)


def _inputs_are_not_looked_at(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PhaseRegion, "_identity", lambda self, given: [0 for _ in self._positions])


def _a_backward_overwrites_what_was_delivered(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Delivery, "make_way", lambda *args: None)


def _backwards_that_keep_the_graph_are_as_others(patch: pytest.MonkeyPatch) -> None:
    backward_of = RecordedRegion.backward_of
    patch.setattr(RecordedRegion, "backward_of", lambda self, seeds, **_: backward_of(self, seeds))
    patch.setattr(region, "backward_keeps_graph", lambda: False)


def _gradients_are_not_added_up(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(node, "add_all", lambda sums, more: None)


def _hyperparameters_stay(patch: pytest.MonkeyPatch) -> None:
    """Each graph writes the numbers of its first replay again and again."""
    value = LiveNumbers.value

    def first(self: LiveNumbers, place: NumberPlace) -> Any:
        return vars(self).setdefault("first", {}).setdefault(place, value(self, place))

    patch.setattr(LiveNumbers, "value", first)


def _numbers_of_the_call_before(patch: pytest.MonkeyPatch) -> None:
    inputs = Numbers.inputs

    def late(self: Numbers, given: Sequence[Any]) -> Any:
        now = inputs(self, given)
        before = vars(self).get("before", now)
        vars(self)["before"] = now
        numbers = len(self._slots)
        kept = len(now[0]) - numbers
        return [*now[0][:kept], *before[0][kept:]], now[1]

    patch.setattr(Numbers, "inputs", late)


def _pending_forwards_share_a_recording(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(RecordedRegion, "free", property(lambda self: True))
    always = property(lambda self: 1, lambda self, value: None)
    patch.setattr(RecordedRegion, "generation", always, raising=False)


FAULTS: dict[str, Plant] = {
    "the last tensor of a batch is not copied": _forgets_the_last_tensor,
    "numbers are those of the call before": _numbers_of_the_call_before,
    "parameters and buffers are never looked for elsewhere": _inputs_are_not_looked_at,
    "`.data = ...` is not noticed": _memory_of_parameters_is_not_looked_at,
    "batches that a step changes are not written back": _batches_stay,
    "a recording leaves its traces": _constant(ScratchState, "restore", None),
    "results are overwritten by the next replay": _results_in_the_memory_of_the_graph,
    "pending forwards share a recording": _pending_forwards_share_a_recording,
    "a backward overwrites gradients that were delivered": _a_backward_overwrites_what_was_delivered,
    "recordings overwrite each other's activations": lambda patch: patch.setattr(
        Memory, "free", property(lambda self: True)
    ),
    "backwards that keep the graph are not noticed": _backwards_that_keep_the_graph_are_as_others,
    "gradients of several backwards are not added up": _gradients_are_not_added_up,
    "absent gradients are zero": _absent_gradients_are_zero,
    "hooks on gradients are not noticed": lambda patch: patch.setattr(
        PhaseRegion, "_delivered_now", lambda self, given: self._delivered
    ),
    "learning rates are not copied to the device": _constant(OptimizerPreparation, "sync", None),
    "objects of the optimizer are never told apart": lambda patch: patch.setattr(
        preparation, "identities", lambda objects: b""
    ),
    "other hyperparameters are baked in": _constant(OptimizerPreparation, "hyperparameters", ()),
    "replays keep the hyperparameters of their capture": _hyperparameters_stay,
    "any difference of a replay counts as noise": _constant(PlainRuns, "refuse", None),
}
