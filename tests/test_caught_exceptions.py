"""A step that catches what an operation raises for some values sees the exception where plain training sees it."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from accelerate_training import Script
from accelerate_training import both as both_scripts
from accelerate_training import fresh as fresh
from torch import Tensor, nn
from training import adamw, both

CAUGHT = "the step catches what torch."
RARE = (15, 20, 33)  # batches whose matrices are singular


class Caught(nn.Module):
    """The loss of one of these operations, and another loss where it raises."""

    def __init__(self, operation: str) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.operation = operation

    def forward(self, x: Tensor) -> Tensor:
        z = x * self.scale
        k = torch.exp(-0.5 * (z[:, None] - z[None]).square().sum(-1))
        if self.operation == "cholesky":
            try:
                return torch.linalg.cholesky(k).diagonal().log().sum()
            except RuntimeError:
                return torch.linalg.cholesky(k + 0.1 * torch.eye(len(x))).diagonal().log().sum()
        if self.operation == "solve in a function":
            try:
                return self.solved(k)
            except (RuntimeError, ValueError):
                return k.square().mean()
        if self.operation == "multinomial":
            try:
                drawn = torch.multinomial(x[0].detach().abs() + 0.1 / (x[0] - x[1]).detach().abs().sum(), 2)
            except RuntimeError:
                drawn = torch.tensor([0, 1])
            return k[drawn].sum() * self.scale.sum()
        if self.operation == "suppressed":
            with contextlib.suppress(RuntimeError):
                return torch.inverse(k).square().mean()
            return k.square().mean()
        return torch.linalg.cholesky(k + torch.eye(len(x))).diagonal().log().sum()

    def solved(self, k: Tensor) -> Tensor:
        return torch.linalg.solve(k, k.sum(1)).square().mean()


OPERATIONS = ["cholesky", "solve in a function", "multinomial", "suppressed"]


def samples(index: int) -> Tensor:
    x = torch.randn(6, 3)
    if index in RARE:
        x[1] = x[0]
    return x


def whole(operation: str, *, in_regions: bool = False) -> Any:
    def train(diary: Any) -> None:
        model = Caught(operation)
        optimizer = adamw(model)

        def step_fn(x: Tensor) -> Tensor:
            if in_regions:
                print(end="")
            return model(x)  # type: ignore[no-any-return]

        step = diary.step(step_fn, model=model, optimizer=optimizer)
        for index in range(40):
            diary.write("loss", step(samples(index)))
            diary.write_state(model, optimizer)

    return train


@pytest.mark.slow_after(4)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_whole_step_that_catches(operation: str) -> None:
    report = both(whole(operation), replays=4)  # of the update
    assert report.steps_replayed == 0 and any(CAUGHT in f.reason for f in report.fallbacks), str(report)


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_step_in_regions_that_catches(operation: str) -> None:
    both(whole(operation, in_regions=True), replays=4)  # of the update


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_stock_loop_that_catches(operation: str) -> None:
    report = both_scripts(stock(operation), replays=4)  # of the update
    assert any(CAUGHT in f.reason for f in report.fallbacks), str(report)


def stock(operation: str) -> Any:
    def script(script: Script) -> None:
        model = Caught(operation)
        prepared, optimizer = script.accelerator.prepare(model, adamw(model))
        for index in range(40):
            loss = prepared(samples(index))
            script.accelerator.backward(loss)
            script.write("loss", loss)
            optimizer.step()
            optimizer.zero_grad()
        script.write("parameters", dict(model.named_parameters()))

    return script


def test_without_a_try_the_same_operation_replays() -> None:
    assert both(whole("bare"), replays=30, plan="{F B O}").steps_replayed >= 30
