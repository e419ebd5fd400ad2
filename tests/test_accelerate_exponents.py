"""A loop of Accelerate whose model raises a tensor to a number that changes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("accelerate")

from accelerate_training import Script, both, fresh  # noqa: F401


class Power(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.n = nn.Linear(6, 6), 2

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = (torch.sigmoid(self.linear(x)) ** self.n).mean()
        return result


def test_an_exponent_of_the_model_changes_between_steps() -> None:
    def script(s: Script) -> None:
        model = Power()
        own = model
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        model, optimizer = s.accelerator.prepare(model, optimizer)
        for step in range(40):
            own.n = 2 + step % 2
            loss = model(torch.rand(4, 6))
            s.accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            s.write("loss", loss)
        s.write_state(own, optimizer)

    both(script, replays=25)
