"""Optimizers of other libraries get a graph of their own where that changes nothing, and a reason where not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from training import Diary, Net, batches, both, line_of, loss_of

from pygraph_train import StepReport


class Lion(torch.optim.Optimizer):
    """Pure tensor math."""

    def __init__(self, params: Any, lr: float = 1e-3, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["mean"] = torch.zeros_like(p)
                update = state["mean"].lerp(p.grad, 0.3).sign()
                p.add_(update, alpha=-group["lr"])
                state["mean"].lerp_(p.grad, 1 - group["beta"])


class Reads(Lion):
    """Looks at the gradient on the host."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        norm = self.param_groups[0]["params"][0].grad.norm().item()
        if norm < 1e9:
            super().step()


class Counts(Lion):
    """A bias correction that is a Python number."""

    where = "state"

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                place: Any = {"state": self.state[p], "group": group, "attribute": vars(self)}[self.where]
                place["count"] = place.get("count", 0) + 1
                p.add_(p.grad, alpha=-group["lr"] / (1 - 0.9 ** place["count"]))


class CountsInGroup(Counts):
    where = "group"


class CountsOnItself(Counts):
    where = "attribute"


STEPS_MADE = [0]


class Hidden(Lion):
    """Its correction depends on something that only the training loop changes."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.add_(p.grad, alpha=-0.01 / (1 - 0.9 ** (1 + STEPS_MADE[0])))


def train(make: Any, *, scheduler: bool = False, steps: int = 60, **config: Any) -> StepReport:
    def script(diary: Diary) -> None:
        model = Net()
        optimizer = make(model.parameters())
        STEPS_MADE[0] = 0
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 20, 0.5) if scheduler else None
        step = diary.step(loss_of(model), model=model, optimizer=optimizer, max_grad_norm=0.1)
        for batch in batches(steps):
            diary.write("loss", step(batch))
            STEPS_MADE[0] += 1
            diary.write("parameters", dict(model.named_parameters()))
            diary.write("state", optimizer.state_dict())
            if schedule is not None:
                schedule.step()

    return both(script, **config)


@pytest.mark.parametrize("config", [{}, {"forward": "off"}, {"fuse": "off"}], ids=str)
def test_tensor_math_of_another_library_is_graphed(config):
    report = train(Lion, **config)
    assert report.optimizer_steps_replayed >= 30 and "{O}" in report.plan, str(report)


def test_a_new_learning_rate_is_captured_anew():
    report = train(Lion, scheduler=True)
    assert [c.plan for c in report.captures].count("{O}") == 3, str(report)


def test_a_host_read_is_named_with_its_line():
    report = train(Reads)
    assert report.optimizer_steps_replayed == 0
    assert any(f.where == line_of(Reads, ".item()") for f in report.fallbacks), str(report)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (Counts, "'count' of parameter 0"),
        (CountsInGroup, "'count' of parameter group 0"),
        (CountsOnItself, "count"),
    ],
)
def test_a_counter_in_python_keeps_it_out(make, name):
    report = train(make)
    assert report.optimizer_steps_replayed == 0
    assert any(name in f.reason and "in Python" in f.reason for f in report.fallbacks), str(report)


def test_a_number_that_is_baked_in_is_found_by_comparing():
    report = train(Hidden, steps=30)
    assert report.optimizer_steps_replayed <= 1
    assert any("first replay of {O}" in f.reason for f in report.fallbacks), str(report)


def test_parameters_of_several_groups():
    report = train(lambda params: Lion([{"params": [p]} for p in params], lr=1e-2))
    assert report.optimizer_steps_replayed >= 30, str(report)
