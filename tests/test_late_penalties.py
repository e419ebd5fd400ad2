"""A penalty on gradients that comes in some steps only, or for the first time when regions are compiled."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from training import adamw, batches, both

STEPS = 64


class Critic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.LayerNorm(8)
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.norm(self.first(x))))


def of_inputs(model: nn.Module, x: Tensor, y: Tensor, now: bool) -> Tensor:
    """R1: the score of the loss is differentiated itself."""
    if now:
        x = x.clone().requires_grad_(True)
    out = model(x)
    loss = cross_entropy(out, y)
    if now:
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        loss = loss + slope.square().mean()
    return loss


def of_mixed_inputs(model: nn.Module, x: Tensor, y: Tensor, now: bool) -> Tensor:
    """WGAN-GP: a call of its own."""
    loss = cross_entropy(model(x), y)
    if now:
        mixed = (0.5 * x + 0.5 * x.flip(0)).requires_grad_(True)
        (slope,) = torch.autograd.grad(model(mixed).sum(), mixed, create_graph=True)
        loss = loss + (slope.norm(dim=1) - 1).square().mean()
    return loss


PENALTIES = [of_inputs, of_mixed_inputs]


def script(penalty: Any, when: Any, model_of: Any = Critic) -> Any:
    def train(diary: Any) -> None:
        model = model_of()
        optimizer = adamw(model)
        now = [False]

        def step_fn(batch: Any) -> Tensor:
            print(end="", file=io.StringIO())
            return penalty(model, *batch, now[0])

        step = diary.step(step_fn, model=model, optimizer=optimizer)
        for index, batch in enumerate(batches(STEPS)):
            now[0] = when(index + 1)
            diary.write("loss", step(batch))
            diary.write_state(model, optimizer)

    return train


def in_regions(report: Any, *, least: int) -> None:
    """Assert that forward and backward came from graphs before and after the penalties."""
    ran = [
        max([r.replays for r in report.regions() if r.phase == phase], default=0)
        for phase in ("forward", "backward")
    ]
    assert min(ran) >= least, str(report)


@pytest.mark.parametrize(
    "when",
    [lambda n: n % 16 == 0, lambda n: n >= 48, lambda n: n == 40],
    ids=["each sixteenth", "from 48 on", "40"],
)
@pytest.mark.parametrize("penalty", PENALTIES)
def test_a_late_penalty_is_that_of_plain_training(penalty: Any, when: Any) -> None:
    report = both(script(penalty, when), replays=40)
    notes = [note for note in report.notes if "asks for the gradient of an input" in note]
    assert notes and all(__file__ in note for note in notes), str(report)
    in_regions(report, least=12)


@pytest.mark.parametrize(
    "when", [lambda n: n % 4 == 0, lambda n: n == 1, lambda n: n % 4 == 1], ids=["4", "1", "1, 5"]
)
@pytest.mark.parametrize("penalty", PENALTIES)
def test_an_early_penalty_is_that_of_plain_training(penalty: Any, when: Any) -> None:
    both(script(penalty, when), replays=30)


class Parts(Critic):
    """Several regions, with Python between them."""

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.first(x))
        print(end="", file=io.StringIO())
        h = torch.tanh(self.norm(h))
        print(end="", file=io.StringIO())
        return self.last(h)


class Normalized(Critic):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)  # type: ignore[assignment]


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Unflatten(1, (1, 6)), nn.Conv1d(1, 4, 3), nn.BatchNorm1d(4), nn.LeakyReLU(0.2), nn.Flatten()
        )
        self.last = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.net(x))


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor) -> Tensor:
        ctx.save_for_backward(a)
        return a * a

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:  # type: ignore[override]
        return 2 * g * ctx.saved_tensors[0]


class WithFunction(Critic):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(Square.apply(torch.tanh(self.norm(self.first(x)))))


@pytest.mark.parametrize("when", [lambda n: n == 40, lambda n: True], ids=["40", "always"])
@pytest.mark.parametrize("penalty", PENALTIES)
def test_a_penalty_goes_through_the_backward_of_a_custom_function(penalty: Any, when: Any) -> None:
    both(script(penalty, when, WithFunction), replays=40)


@pytest.mark.parametrize("model_of", [Parts, Normalized, Convolutions])
@pytest.mark.parametrize("penalty", PENALTIES)
def test_late_penalties_of_other_models(penalty: Any, model_of: Any) -> None:
    report = both(script(penalty, lambda n: n % 16 == 0, model_of), replays=60)
    in_regions(report, least=12)
