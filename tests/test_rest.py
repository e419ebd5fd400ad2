"""Runs that have settled on no graphs: steps are those of the plain loop, and are looked at now and then."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from test_given_up import Counting, loss_of
from torch import nn
from training import CONFIG, Diary, adamw, batches, both

from pygraph_train import GraphedStep
from pygraph_train.optimizers.preparation import OptimizerPreparation
from pygraph_train.selection import timing
from pygraph_train.selection.arms import NOTHING, Plan

KERNELS = importlib.import_module("torch.optim.adam")


class Declared:
    """Which plan is declared to be the fastest one."""

    def __init__(self, best: str) -> None:
        self.best = best

    def __call__(self, arm: Any) -> float:
        plan: Plan = arm.plan
        return 1e-3 if str(plan) == self.best else 2e-3 if plan == NOTHING else 3e-3


@pytest.fixture
def declared(monkeypatch: pytest.MonkeyPatch) -> Declared:
    """Steps without a graph are, until a test sets `best`."""
    made = Declared("F B O")
    monkeypatch.setattr(timing, "declared_seconds", made)
    return made


def trained(diary: Diary, model: nn.Module, optimizer: Any) -> Callable[[int], Any]:
    """Makes so many steps; everything is written to the diary, and the schedule goes on. Returns the step."""
    step = diary.step(lambda b: loss_of(model, b), model=model, optimizer=optimizer)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.999)

    def run(count: int) -> Any:
        for batch in batches(count):
            diary.write("loss", step(batch))
            diary.write_state(model, optimizer)
            diary.write("learning rate", optimizer.param_groups[0]["lr"])
            scheduler.step()
        return step

    return run


def test_the_loops_own_optimizer_makes_the_update(declared):
    def script(diary: Diary) -> None:
        model = Counting()
        run = trained(diary, model, adamw(model))
        run(60)
        with (
            mock.patch.object(OptimizerPreparation, "prepared") as prepared,
            mock.patch.object(KERNELS, "adam", wraps=KERNELS.adam) as kernels,
        ):
            run(30)
        assert not prepared.called
        assert {type(call.kwargs["lr"]) for call in kernels.call_args_list} == {float}

    report = both(script, replays=3)
    assert report.plan == report.running_plan == "F B O", str(report)


@pytest.mark.parametrize("graphable", [False, True])
def test_a_later_look_finds_that_graphs_are_faster(graphable, declared):
    """The optimizer is prepared again, and a run that goes back to no graphs gives it back again."""
    best = "{F B O}" if graphable else "F B {O}"

    def script(diary: Diary) -> None:
        declared.best = "F B O"
        torch.manual_seed(1)
        model = nn.Linear(6, 3) if graphable else Counting()
        run = trained(diary, model, adamw(model))
        for best_now, steps in (("F B O", 150), (best, 700), ("F B O", 500)):
            declared.best = best_now
            step = run(steps)
            if diary.graphed:
                assert step.report().running_plan == best_now, str(step.report())
                assert step._runner._updates.at_rest is (best_now == "F B O"), str(step.report())

    both(script, replays=200)


def test_an_optimizer_that_is_refused_meanwhile_stays_as_it_is(declared):
    """A step hook came while no graph needed the optimizer: when one is to be tried again there is none."""

    def script(diary: Diary) -> None:
        declared.best = "F B O"
        model, calls = Counting(), []
        optimizer = adamw(model)
        run = trained(diary, model, optimizer)
        run(150)
        optimizer.register_step_post_hook(lambda *given: calls.append(1))
        declared.best = "F B {O}"
        step = run(500)
        diary.write("calls", len(calls))
        if diary.graphed:
            assert any("hook" in row.reason for row in step.report().fallbacks), str(step.report())
            assert step.report().running_plan == "F B O"

    both(script, replays=3)


def test_other_batches_may_still_have_graphs(declared):
    """A shape that comes later begins with a graph of the whole step, for which the optimizer is prepared."""

    def script(diary: Diary) -> None:
        declared.best = "F B O"
        model = nn.Linear(6, 3)
        optimizer = adamw(model)
        step = diary.step(lambda b: loss_of(model, b), model=model, optimizer=optimizer)
        for count, size in ((90, 8), (90, 5), (20, 8)):
            for batch in batches(count, size):
                diary.write("loss", step(batch))
                diary.write_state(model, optimizer)

    both(script, replays=6)


def test_closing_the_step_leaves_a_plain_optimizer(declared):
    model = Counting()
    optimizer = adamw(model)
    step = GraphedStep(lambda b: loss_of(model, b), model=model, optimizer=optimizer, config=CONFIG)
    for batch in batches(60):
        step(batch)
    assert step._runner._updates.at_rest
    step.close()
    assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_state_dict_post_hooks
    step(batch)
