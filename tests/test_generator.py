"""The generator finds faults: each of these is planted, and a few cases have to show it."""

from __future__ import annotations

import random

import pytest
import torch
from faults import FAULTS
from generator.case import Batches, Case, Change, Loop, Optimizer
from generator.run import case_from, compare, run
from generator.script import script_of
from generator.shrink import shrunk
from generator.strategies import LOOPS
from generator.suite import each_case


def _changes(*names: str) -> frozenset[str]:
    return frozenset(f"change {name}" for name in names)


SHOWN_BY: dict[str, frozenset[str]] = {
    "the last tensor of a batch is not copied": frozenset(),
    "learning rates are not copied to the device": _changes("lr_changed", "lr_zero", "lr_of_one_group"),
    "parameters and buffers are never looked for elsewhere": _changes(
        "data_replaced", "data_cloned", "parameter_replaced", "load_model_assign"
    ),
    "results are overwritten by the next replay": frozenset(),
    "other hyperparameters are baked in": _changes("decay_changed", "momentum_changed", "maximize"),
    "absent gradients are zero": frozenset({"block unused", "block frozen"}),
    "hooks on gradients are not noticed": _changes("tensor_hook", "post_accumulate_hook"),
}
"""Faults, and features of which a case has to have one in order to show it; any case where there are none."""


@pytest.mark.slow
@pytest.mark.timeout(900)  # a busy machine needs more than the usual limit
@pytest.mark.parametrize("name", SHOWN_BY)
def test_a_planted_fault_is_found(name: str) -> None:
    found: list[Case] = []

    def body(case: Case) -> None:
        if found:
            return
        with pytest.MonkeyPatch.context() as patch:
            FAULTS[name](patch)
            differs = compare(case).difference is not None
        if differs and compare(case).difference is None:  # by the fault that was planted, and no other
            found.append(case)

    each_case("graphed", 300, 0, body, only=SHOWN_BY[name])  # ends with the first one
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


@pytest.mark.passes_without_graphs("tracing alone makes these differences")
@pytest.mark.parametrize("case", _OF_TORCH_COMPILE)
def test_what_every_backend_of_torch_compile_does_is_no_difference(case: Case) -> None:
    outcome = compare(case)
    assert outcome.difference is None
    # torch 2.13 traces what the first case does, and does not differ there
    assert outcome.rounded or (case is _OF_TORCH_COMPILE[0] and torch.__version__ >= "2.13")


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
