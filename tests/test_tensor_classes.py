"""Batches of other classes of tensors, such as images with metadata, in loops that stay as they are."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("accelerate")
pytest.importorskip("lightning.fabric")

import accelerate_training
import fabric_training
import torch
from accelerate_training import fresh  # noqa: F401
from replays import text_of
from torch import Tensor
from training import Net, adamw, batches

WHY = "they take a {}, which is no plain tensor"


class Tagged(Tensor):
    """Its operations are its own in Python only."""


class Silent(Tensor):
    """No operation of it gives another one of its class."""

    __torch_function__ = torch._C._disabled_torch_function_impl


def train(s: Any, model: Any, optimizer: Any, backward: Any, kind: type[Tensor]) -> None:
    for x, y in batches(26):
        loss = torch.nn.functional.cross_entropy(model(x.as_subclass(kind)), y).as_subclass(Tensor)
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        s.write("loss", loss)
    s.write("parameters", [p.detach() for p in model.parameters()])


@pytest.mark.quick
@pytest.mark.parametrize("kind", [Tagged, Silent])
def test_an_accelerate_loop(kind: type[Tensor]) -> None:
    def script(s: Any) -> None:
        model = Net()
        model, optimizer = s.accelerator.prepare(model, adamw(model))
        train(s, model, optimizer, s.accelerator.backward, kind)

    report = accelerate_training.both(script, replays=4)
    assert WHY.format(kind.__name__) in text_of(report)


def test_a_fabric_loop() -> None:
    def script(s: Any) -> None:
        model = Net()
        model, optimizer = s.fabric.setup(model, adamw(model))
        train(s, model, optimizer, s.fabric.backward, Tagged)

    report = fabric_training.both(script, replays=4)
    assert WHY.format("Tagged") in text_of(report)
