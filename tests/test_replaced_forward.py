"""A module whose `forward` is an attribute of the object: another one may take its place at any time."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("accelerate")

import accelerate_training
import torch
from accelerate_training import fresh  # noqa: F401
from torch import Tensor, nn
from training import Diary, Net, adamw, batches, both, loss_of

REPLACE: dict[str, Callable[[nn.Module], Any]] = {
    "a function": lambda model: lambda x: type(model).forward(model, x) * 2,
    "a method": lambda model: types.MethodType(lambda self, x: type(self).forward(self, x) * 2, model),
    "the method of another module": lambda model: Net(dropout=0.0).forward,
}


def replace(step: int, model: nn.Module, made: Callable[[nn.Module], Any]) -> None:
    """Again and again, with the method of the class in between, which is an attribute of the object then."""
    if step in (30, 90):
        model.forward = types.MethodType(type(model).forward, model)
    elif step == 60:
        torch.manual_seed(1)
        model.forward = made(model)


@pytest.mark.parametrize("kind", REPLACE)
def test_in_a_loop(kind: str) -> None:
    def script(made: accelerate_training.Script) -> None:
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        model, optimizer = made.accelerator.prepare(model, optimizer)
        for step, (x, y) in enumerate(batches(120)):
            replace(step, model, REPLACE[kind])
            loss = nn.functional.cross_entropy(model(x), y)
            made.accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            made.write("loss", loss)
        made.write_state(model, optimizer)

    accelerate_training.both(script, replays=200)


@pytest.mark.parametrize("kind", REPLACE)
def test_in_a_graphed_step(kind: str) -> None:
    def script(diary: Diary) -> None:
        model = Net()
        optimizer = adamw(model)
        step = diary.step(loss_of(model), model=model, optimizer=optimizer)
        for index, batch in enumerate(batches(120)):
            replace(index, model, REPLACE[kind])
            diary.write("loss", step(batch))
        diary.write_state(model, optimizer)

    both(script, replays=60)


def test_accelerate_takes_mixed_precision_away_in_mid_run() -> None:
    def script(made: accelerate_training.Script) -> None:
        accelerator, model = made.accelerator, Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        model, optimizer = accelerator.prepare(model, optimizer)
        found = list[Tensor]()
        for step, (x, y) in enumerate(batches(80)):
            if step == 40:
                accelerator.unwrap_model(model, keep_fp32_wrapper=False)
            found.append(model(x))
            loss = nn.functional.cross_entropy(found[-1], y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            made.write("loss", loss)
        made.write_state(model, optimizer)

    accelerate_training.both(script, replays=100, mixed_precision="bf16")
