"""Faults of the library that tests plant: each one patches a part of it, and tests have to notice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from pygraph_train.gradients import of_steps
from pygraph_train.gradients.of_steps import Gradients
from pygraph_train.graphs.cuda import CudaEngine
from pygraph_train.graphs.emulated import EmulatedEngine, EmulatedGraph, is_capturing
from pygraph_train.graphs.engine import CaptureError
from pygraph_train.optimizers import preparation
from pygraph_train.optimizers.numbers import LiveNumbers, NumberPlace
from pygraph_train.optimizers.preparation import OptimizerPreparation
from pygraph_train.regions.region_capture import RegionCapture
from pygraph_train.step import capturing, lookup, variants
from pygraph_train.step.inputs import StaticInputs
from pygraph_train.step.outputs import Outputs
from pygraph_train.step.rebinding import Moves
from pygraph_train.tracing import watch
from pygraph_train.tracing.host_draws import Ahead
from pygraph_train.tracing.looking_ahead import LookingAhead
from pygraph_train.tracing.stillness import _Way
from pygraph_train.tracing.trace import Trace
from pygraph_train.tracing.watch import ModuleWatch
from pygraph_train.verification import Fingerprint, PlainRuns

__all__ = ["FAULTS", "Plant", "nothing_compares_equal", "nothing_is_captured", "replays_are_wrong"]

Plant = Callable[[pytest.MonkeyPatch], None]


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
    _constant(Fingerprint, "compare", "planted")(patch)
    _constant(PlainRuns, "refuse", "planted")(patch)


def replays_are_wrong(patch: pytest.MonkeyPatch) -> None:
    """Let replays of whole steps compute with another first row than that of the batch, from the first one on."""
    replay = EmulatedGraph.replay
    load, filled = StaticInputs.load, []

    def noting(self: StaticInputs, leaves: Sequence[Any]) -> None:
        load(self, leaves)
        filled[:] = [tensor for tensor in self.tensors if tensor.is_floating_point()]

    def wrong(self: EmulatedGraph) -> None:
        for tensor in filled:
            tensor[0].mul_(2.0)
        replay(self)

    patch.setattr(StaticInputs, "load", noting)
    patch.setattr(EmulatedGraph, "replay", wrong)


def _constant(owner: Any, name: str, value: Any) -> Plant:
    """A function that always returns the same."""
    return lambda patch: patch.setattr(owner, name, lambda *args, **kwargs: value)


def _everywhere(name: str, value: Any, *modules: Any) -> Plant:
    """The same, for a function that several modules have imported."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        for module in modules:
            _constant(module, name, value)(patch)

    return plant


def _forgets_the_last_tensor(patch: pytest.MonkeyPatch) -> None:
    def load(self: StaticInputs, leaves: Sequence[Any]) -> None:
        for tensor, index in list(zip(self.tensors, self._index, strict=True))[:-1]:
            tensor.copy_(leaves[index])

    patch.setattr(StaticInputs, "load", load)


def _results_in_the_memory_of_the_graph(patch: pytest.MonkeyPatch) -> None:
    call = Outputs.__call__

    def without_copies(self: Outputs, leaves: Sequence[Any]) -> Any:
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(torch.Tensor, "clone", torch.Tensor.detach)
            return call(self, leaves)

    patch.setattr(Outputs, "__call__", without_copies)


def _absent_gradients_are_zero(patch: pytest.MonkeyPatch) -> None:
    after = Gradients.after_replay

    def with_zeros(self: Gradients) -> None:
        after(self)
        for p in self.parameters:
            p.grad = torch.zeros_like(p) if p.grad is None else p.grad

    patch.setattr(Gradients, "after_replay", with_zeros)


def _memory_of_parameters_is_not_looked_at(patch: pytest.MonkeyPatch) -> None:
    patch.setattr("pygraph_train.tracing.trace.writes_to_inputs", lambda graph: [])
    patch.setattr(Moves, "found", lambda self: [])


def _gradients_pile_up_in_graphs(patch: pytest.MonkeyPatch) -> None:
    """A replay adds to the gradients that the replay before it left."""

    def empty(self: Gradients) -> None:
        for p in self.emptied:
            if not is_capturing():
                p.grad = torch.zeros_like(p)

    patch.setattr(Gradients, "empty", empty)


def _hyperparameters_stay(patch: pytest.MonkeyPatch) -> None:
    """Each graph writes the numbers of its first replay again and again."""
    value = LiveNumbers.value

    def first(self: LiveNumbers, place: NumberPlace) -> Any:
        return vars(self).setdefault("first", {}).setdefault(place, value(self, place))

    patch.setattr(LiveNumbers, "value", first)


def _modules_are_never_looked_at(patch: pytest.MonkeyPatch) -> None:
    _constant(ModuleWatch, "unchanged", True)(patch)
    _constant(ModuleWatch, "unchanged_in_still_modules", True)(patch)


def _reads_of_the_step_before(patch: pytest.MonkeyPatch) -> None:
    look = LookingAhead.look

    def late(self: LookingAhead, *args: Any) -> Ahead:
        ahead = look(self, *args)
        before = vars(self).get("before", ahead)
        vars(self)["before"] = ahead
        return before if self.reads else ahead

    patch.setattr(LookingAhead, "look", late)


FAULTS: dict[str, Plant] = {
    "guards always hold": _constant(Trace, "holds", True),
    "the last tensor of a batch is not copied": _forgets_the_last_tensor,
    "inputs of regions are not copied": _constant(RegionCapture, "_fill_buffers", None),
    "learning rates are not copied to the device": _constant(OptimizerPreparation, "sync", None),
    "gradients pile up in graphs": _gradients_pile_up_in_graphs,
    "parameters are never looked for elsewhere": _everywhere("same_memory", True, lookup, capturing),
    "objects are never told apart": _everywhere("identities", b"", of_steps, preparation, variants),
    "inputs of regions are never looked for elsewhere": _constant(RegionCapture, "fits", True),
    "modules are never looked at": _modules_are_never_looked_at,
    "modules are always still": _constant(_Way, "is_as_it_was", True),
    "results are overwritten by the next replay": _results_in_the_memory_of_the_graph,
    "other hyperparameters are baked in": _constant(OptimizerPreparation, "hyperparameters", ()),
    "replays keep the hyperparameters of their capture": _hyperparameters_stay,
    "any difference of a replay counts as noise": _constant(PlainRuns, "refuse", None),
    "absent gradients are zero": _absent_gradients_are_zero,
    "`.data = ...` in a step is not noticed": _memory_of_parameters_is_not_looked_at,
    "shapes and strides of parameters are not looked at": _constant(
        watch, "tensor_looks", lambda *tensors: True
    ),
    "a capture that fails loses gradients": _constant(Gradients, "restore", None),
    "reads ahead are those of the step before": _reads_of_the_step_before,
    "hooks on gradients are not noticed": _everywhere("hooked", False, lookup, capturing),
}
