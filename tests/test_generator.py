"""The generator finds faults: each of these is planted, and a few cases have to show it."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from generator.case import Batches, Case, Change, Loop, Optimizer
from generator.run import case_from, compare, run
from generator.script import script_of
from generator.shrink import shrunk
from generator.strategies import LOOPS
from generator.suite import each_case

from pygraph_train.gradients.of_steps import Gradients
from pygraph_train.graphs.emulated import EmulatedGraph
from pygraph_train.optimizers.preparation import OptimizerPreparation
from pygraph_train.step import runner
from pygraph_train.step.inputs import StaticInputs
from pygraph_train.step.outputs import Outputs
from pygraph_train.step.rebinding import Moves
from pygraph_train.tracing import watch
from pygraph_train.tracing.trace import Trace
from pygraph_train.tracing.watch import ModuleWatch

Plant = Callable[[pytest.MonkeyPatch], None]


def _constant(owner: Any, name: str, value: Any) -> Plant:
    """A function that always returns the same."""
    return lambda patch: patch.setattr(owner, name, lambda *args, **kwargs: value)


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


def _changes(*names: str) -> frozenset[str]:
    return frozenset(f"change {name}" for name in names)


FAULTS: dict[str, tuple[Plant, frozenset[str]]] = {
    "parameters are never looked for elsewhere": (
        _constant(runner, "same_memory", True),
        _changes("data_replaced", "data_cloned", "parameter_replaced", "load_model_assign"),
    ),
    "modules are never looked at": (
        _constant(ModuleWatch, "unchanged", True),
        _changes("forward_hook_scales", "forward_replaced", "frozen_first", "pre_hook"),
    ),
    "guards always hold": (
        _constant(Trace, "holds", True),
        _changes("attribute_changed", "eval_mode", "forward_replaced", "autocast"),
    ),
    "the last tensor of a batch is not copied": (_forgets_the_last_tensor, frozenset()),
    "results are overwritten by the next replay": (_results_in_the_memory_of_the_graph, frozenset()),
    "learning rates are not copied to the device": (
        _constant(OptimizerPreparation, "sync", None),
        _changes("lr_changed", "lr_zero", "lr_of_one_group"),
    ),
    "other hyperparameters are baked in": (
        _constant(OptimizerPreparation, "hyperparameters", ()),
        _changes("decay_changed", "momentum_changed", "maximize"),
    ),
    "absent gradients are zero": (_absent_gradients_are_zero, frozenset({"block unused", "block frozen"})),
    "`.data = ...` in a step is not noticed": (
        _memory_of_parameters_is_not_looked_at,
        frozenset({"step moco", "step moco_in_model", "step clip_weights"}),
    ),
    "shapes and strides of parameters are not looked at": (
        _constant(watch, "tensor_looks", lambda *tensors: True),
        _changes("data_cut", "data_transposed", "frozen_first"),
    ),
    "a capture that fails loses gradients": (
        _constant(Gradients, "restore", None),
        frozenset({"step gradient_read", "step hook_on_activation", "step raises_late"}),
    ),
    "hooks on gradients are not noticed": (
        _constant(runner, "hooked", False),
        _changes("tensor_hook", "post_accumulate_hook"),
    ),
}


@pytest.mark.slow_after(3)
@pytest.mark.timeout(900)  # a busy machine needs more than the usual limit
@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name: str) -> None:
    plant, features = FAULTS[name]
    found: list[Case] = []

    def body(case: Case) -> None:
        if found:
            return
        with pytest.MonkeyPatch.context() as patch:
            plant(patch)
            differs = compare(case).difference is not None
        if differs and compare(case).difference is None:  # by the fault that was planted, and no other
            found.append(case)

    each_case("graphed", 25, 0, body, only=features)
    assert found


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, pytest.fail.Exception])
def test_the_first_error_of_a_case_is_raised(error: type[BaseException]) -> None:
    called: list[Case] = []

    def body(case: Case) -> None:
        called.append(case)
        raise error("of the first case")

    with pytest.raises(error, match="of the first case"):
        each_case("graphed", 5, 0, body)
    assert len(called) == 1


def test_a_printed_case_is_the_same_case() -> None:
    found: list[Case] = []
    each_case(None, 60, 0, found.append)
    assert [case_from(str(case)) for case in found] == found
    assert [case_from(repr(case)) for case in found] == found


def test_a_script_of_every_case_is_python() -> None:
    found: list[Case] = []
    for loop in LOOPS:
        each_case(loop, 80, 1, found.append)
    for case in found:
        compile(script_of(case), "case", "exec")


def test_every_observation_of_a_plain_run_is_the_same_in_the_next_one() -> None:
    case = Case(blocks=("dropout", "batchnorm"), step=("random_noise", "random_numpy"))
    assert run(case, library=False).entries[0][0] == "step 0: result"
    random.seed(7)
    torch.manual_seed(7)
    first, second = (run(case, library=False).entries for _ in range(2))
    assert str(first) == str(second)


def test_a_case_replays_and_is_equal() -> None:
    outcome = compare(Case(blocks=("dropout", "batchnorm"), optimizer=Optimizer("adamw", schedule="cosine")))
    assert outcome.difference is None
    assert outcome.replays >= 10


_OF_TORCH_COMPILE = [
    Case(Loop("backend", options=("step",)), step=("log_list",)),
    Case(Loop("backend", options=("step",)), blocks=("batchnorm",), step=("checkpoint_model",)),
    Case(Loop("backend"), blocks=("counter_of_training",), step=("checkpoint_model",)),
]


@pytest.mark.parametrize("case", _OF_TORCH_COMPILE)
def test_what_every_backend_of_torch_compile_does_is_no_difference(case: Case) -> None:
    outcome = compare(case)
    assert outcome.difference is None
    assert outcome.rounded


def test_a_fault_of_the_backend_is_a_difference_beside_what_every_backend_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(EmulatedGraph, "replay", lambda self: None)
    outcome = compare(_OF_TORCH_COMPILE[1])
    assert outcome.difference is not None


def test_a_case_is_shrunk_to_what_matters() -> None:
    case = Case(
        Loop(accumulate=2),
        ("dropout", "tied", "noise"),
        Batches("dict", (8, 5)),
        step=("extra_tensor", "helper"),
        changes=(Change("lr_changed", 7, 9), Change("sdpa", 5, 6)),
        steps=23,
    )

    def differs(candidate: Case) -> bool:
        return "tied" in candidate.blocks and any(c.what == "sdpa" for c in candidate.changes)

    small = shrunk(case, differs)
    assert (small.blocks, small.step, len(small.changes)) == (("tied",), (), 1)
    assert (small.loop, small.batches, small.optimizer) == (Loop(), Batches(), Optimizer())
