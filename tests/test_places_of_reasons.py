"""A reason against regions names the line that it is about, also where there is no change to advise."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from training import adamw, both, line_of


def test_a_checkpoint_that_changes_a_buffer_is_named_by_its_line() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm = nn.Linear(6, 8), nn.BatchNorm1d(8)

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.normed, self.first(x), use_reentrant=False)  # type: ignore[no-any-return]

        def normed(self, x: Tensor) -> Tensor:
            return self.norm(x).square()  # type: ignore[no-any-return]

    def train(diary: Any) -> None:
        model = Net()
        optimizer = adamw(model)

        def step_fn(x: Tensor) -> Tensor:
            print(end="")
            return model(x).mean()  # type: ignore[no-any-return]

        step = diary.step(step_fn, model=model, optimizer=optimizer)
        for _ in range(20):
            diary.write("loss", step(torch.randn(4, 6)))
            diary.write_state(model, optimizer)

    report = both(train, replays=4)  # of the update
    place = line_of(Net.normed, "self.norm(x)")
    assert place in [fallback.where for fallback in report.fallbacks], str(report)
