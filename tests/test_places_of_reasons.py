"""A note about regions names the line that it is about, also where there is no change to advise."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from training import adamw, both, line_of


def penalized(model: nn.Module, x: Tensor) -> Tensor:
    print(end="")
    x = x.clone().requires_grad_()
    out = model(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return out.mean() + slope.square().mean()  # type: ignore[no-any-return]


def test_a_backward_that_is_differentiated_is_named_by_its_line() -> None:
    def train(diary: Any) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizer = adamw(model)
        step = diary.step(lambda x: penalized(model, x), model=model, optimizer=optimizer)
        for _ in range(20):
            diary.write("loss", step(torch.randn(4, 6)))
            diary.write_state(model, optimizer)

    report = both(train, replays=4)  # of the update
    place = line_of(penalized, "create_graph=True")
    assert any("create_graph=True" in note and place in note for note in report.notes), str(report)
