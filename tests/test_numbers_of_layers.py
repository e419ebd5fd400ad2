"""Layers that share their code have numbers of their own: inputs for Dynamo, before tracing makes constants of them."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("accelerate")

import torch
from accelerate_training import Script, both
from accelerate_training import fresh as fresh
from torch import Tensor, nn

from pygraph_train.regions import direct, inductor


class Layer(nn.Module):
    """A part of it runs after a break, and reads the width of the layer."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.linear, self.bias = nn.Linear(before, after, bias=False), nn.Parameter(torch.zeros(after))
        self.width = after

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        torch._dynamo.graph_break()
        return torch.tanh(x.view(-1, 1, self.width).mean(1) + self.bias)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How often a function was called past AOTAutograd's runtime, and how often with a number put in its place."""
    made, apply, call = [0, 0], direct._apply, inductor.Counting.__call__

    def applied(*args: Any) -> Any:
        made[0] += 1
        return apply(*args)

    def counted(*args: Any) -> Any:
        made[1] += 1
        return call(*args)

    monkeypatch.setattr(direct, "_apply", applied)
    monkeypatch.setattr(inductor.Counting, "__call__", counted)
    return made


def test_a_number_that_tracing_has_made_a_constant_is_no_counter(calls: list[int]) -> None:
    def script(script: Script) -> None:
        model = nn.Sequential(Layer(6, 5), Layer(5, 4), Layer(4, 3))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        model, optimizer = script.accelerator.prepare(model, optimizer)
        generator = torch.Generator().manual_seed(1)
        for _ in range(40):
            x = torch.randn(8, 6, generator=generator)
            loss = nn.functional.cross_entropy(model(x), torch.arange(8) % 3)
            script.accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            script.write("loss", loss)
        script.write_state(model, optimizer)

    report = both(script, replays=100)
    assert calls[0] > 6 * 30 and not calls[1], (calls, str(report))
