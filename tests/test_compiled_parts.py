"""A part of the model that the user has compiled keeps its kernels and its random numbers: it is not traced into."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from accelerate_training import Script
from accelerate_training import both as both_scripts
from accelerate_training import fresh as fresh
from torch import Tensor, nn
from training import adamw, both

COMPILED = "a part is compiled already (torch.compile)"


class Net(nn.Module):
    """A part with dropout, compiled in one of the ways that users have."""

    def __init__(self, how: str, backend: str = "aot_eager") -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16), nn.Linear(16, 1)
        part: Any = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Dropout(0.3))
        if how == "torch.compile(part)":
            part = torch.compile(part, backend=backend)
        elif how == "part.compile()":
            part.compile(backend=backend)
        elif how == "part.forward":
            part.forward = torch.compile(part.forward, backend=backend)
        self.part = part
        self.activation = torch.compile(torch.tanh, backend=backend) if how == "a function" else torch.tanh

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.activation(self.part(self.first(x)))).square().mean()  # type: ignore[no-any-return]


WAYS = ["torch.compile(part)", "part.compile()", "part.forward", "a function"]


def whole(how: str, backend: str = "aot_eager", *, in_regions: bool = False) -> Any:
    def train(diary: Any) -> None:
        model = Net(how, backend)
        optimizer = adamw(model)

        def step_fn(x: Tensor) -> Tensor:
            if in_regions:
                print(end="")
            return model(x)  # type: ignore[no-any-return]

        step = diary.step(step_fn, model=model, optimizer=optimizer)
        for _ in range(20):
            diary.write("loss", step(torch.randn(4, 8)))
            diary.write_state(model, optimizer)

    return train


def stock(how: str) -> Any:
    def script(script: Script) -> None:
        model = Net(how)
        prepared, optimizer = script.accelerator.prepare(model, adamw(model))
        for _ in range(30):
            loss = prepared(torch.randn(4, 8))
            script.accelerator.backward(loss)
            script.write("loss", loss)
            optimizer.step()
            optimizer.zero_grad()
        script.write("parameters", dict(model.named_parameters()))

    return script


@pytest.mark.slow_after(4)
@pytest.mark.parametrize("how", WAYS)
def test_a_whole_step(how: str) -> None:
    report = both(whole(how), replays=4)  # of the update
    assert report.steps_replayed == 0 and any(COMPILED in f.reason for f in report.fallbacks), str(report)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("how", WAYS)
def test_a_step_in_regions(how: str) -> None:
    report = both(whole(how, in_regions=True), replays=4)  # of the update
    assert not report.regions(), str(report)


@pytest.mark.slow_after(4)
@pytest.mark.parametrize("how", WAYS)
def test_a_stock_loop(how: str) -> None:
    report = both_scripts(stock(how), replays=1)  # of the update
    assert not report.regions() and any(COMPILED in f.reason for f in report.fallbacks), str(report)


@pytest.mark.slow
def test_kernels_of_inductor() -> None:
    report = both(whole("torch.compile(part)", "inductor"), replays=4)  # of the update
    assert all("differ among themselves" not in note for note in report.notes), str(report)


def test_what_is_not_compiled_replays() -> None:
    both(whole("nothing"), replays=12, plan="{F B O}")
    report = both_scripts(stock("nothing"), replays=60)
    assert report.regions() and not report.fallbacks, str(report)
