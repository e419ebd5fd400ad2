"""Parts of a step of whose results some get no gradient: with eager kernels nothing is added in their place.

Zeros would show: a parameter behind such results would have a gradient of zeros, and -0.0 would become 0.0.
"""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from replays import text_of
from torch import Tensor, nn
from training import Diary, adamw, both

from pygraph_train import StepReport
from pygraph_train.report.backend_report import RegionRecord

WIDTH = 8


@pytest.fixture(autouse=True)
def _dynamo_knows_nothing() -> None:
    torch._dynamo.reset()


class Watched(nn.Module):
    """The host reads a number on every step, of which the loss is made in some of them only."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.aside = nn.Parameter(torch.ones(WIDTH)), nn.Linear(WIDTH, 1)

    def loss(self, x: Tensor, used: bool) -> Tensor:
        hidden = self.scale * x[0].abs()
        number = self.aside(hidden).mean() + hidden.sum()
        print(number.item(), file=io.StringIO())
        loss = (hidden.neg() * (x[0] > 0)).sum()  # the gradient of some elements is -0.0
        return loss + number if used else loss


class Halves(nn.Module):
    """A tensor is split, and the host reads one half."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(WIDTH, 1)

    def loss(self, x: Tensor, used: bool) -> Tensor:
        left, right = self.first(x).chunk(2, dim=-1)
        left, number = left.tanh(), right.exp().sum()
        print(number.item(), file=io.StringIO())
        return self.second(left).square().mean() + (number if used else 0.0)


class Factors(nn.Module):
    """An operation with two results, whose backward computes one gradient of both of theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def loss(self, x: Tensor, used: bool) -> Tensor:
        product = self.first(x).T @ x + torch.eye(WIDTH)
        q, r = torch.linalg.qr(product)
        q, r = q.contiguous().sin(), r.sum()
        print(r.item(), file=io.StringIO())
        return self.second(q).square().mean() + (r if used else 0.0)


def training(kind: type[nn.Module], use: Any = lambda index: False, steps: int = 60) -> Any:
    def script(diary: Diary) -> None:
        model: Any = kind()
        optimizer = adamw(model)
        step = diary.step(model.loss, model=model, optimizer=optimizer)
        generator = torch.Generator().manual_seed(1)
        for index in range(steps):
            diary.write("loss", step(torch.randn(4, WIDTH, generator=generator), use(index)))
            diary.write_state(model, optimizer)
            found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
            diary.write("signs", {name: grad.signbit() for name, grad in found.items()})

    return script


def ran(report: StepReport, phase: str) -> list[RegionRecord]:
    return [r for r in report.regions() if r.phase == phase and r.replays >= 20]


@pytest.mark.parametrize("kind", [Watched, Halves])
def test_what_nothing_is_made_of_adds_nothing(kind: type[nn.Module]) -> None:
    report = both(training(kind), compile=False, replays=20)
    assert report.plan == "{F} {B} {O}", text_of(report)
    assert len(ran(report, "forward")) == len(ran(report, "backward")) == 2, text_of(report)


def test_the_parameters_behind_it_have_no_gradient() -> None:
    without: list[bool] = []

    def script(diary: Diary) -> None:
        model = Watched()
        optimizer = adamw(model)
        step = diary.step(model.loss, model=model, optimizer=optimizer)
        for index in range(40):
            step(torch.full((4, WIDTH), index - 20.0), False)
            diary.write_state(model, optimizer)
            without.append(model.aside.weight.grad is None and model.scale.grad is not None)

    report = both(script, compile=False, replays=20)
    assert all(without) and len(ran(report, "backward")) == 2, text_of(report)


@pytest.mark.parametrize("kind", [Watched, Halves])
@pytest.mark.parametrize("every", [2, 5, 40])
def test_gradients_that_come_and_go_are_there_when_they_are(kind: type[nn.Module], every: int) -> None:
    report = both(training(kind, lambda index: index % every == every - 1), compile=False, replays=10)
    forwards = [r for r in report.regions() if r.phase == "forward"]
    assert sum(r.replays >= 10 for r in forwards) >= 2, text_of(report)


def test_what_is_computed_of_several_gradients_is_left_to_eager_kernels() -> None:
    report = both(training(Factors), compile=False, replays=20)
    assert "some of them may not be there" in text_of(report)
    assert ran(report, "backward"), text_of(report)  # of the part behind it
