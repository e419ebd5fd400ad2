"""Numbers that a step reads of its tensors and keeps, on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_same_as_plain_gpu import STEPS, Make, both
from torch import Tensor, nn
from torch.nn import functional as F

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(32, 64), nn.BatchNorm1d(64), nn.Linear(64, 8)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(F.dropout(self.norm(self.first(x)).relu(), 0.2))
        return found


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    made = []
    for _ in range(STEPS):
        x = torch.randn(16, 32, generator=generator)
        made.append((x.cuda(), torch.randint(0, 8, (16,), generator=generator).cuda()))
    return made


def test_numbers_that_a_step_keeps() -> None:
    def script(make: Make) -> list[Any]:
        model, kept = Net().cuda(), []
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)

        def loss_of(x: Tensor, y: Tensor) -> Tensor:
            found = model(x)
            loss = F.cross_entropy(found, y)
            kept.append((loss.item(), int((found.argmax(1) == y).sum()), 2 * loss.item()))
            return loss

        step = make(loss_of, model, optimizer)
        losses = [step(*batch) for batch in batches()]
        return [*losses, *kept, *(p.detach() for p in model.parameters())]

    assert not both(script, replays=STEPS - 15, plan="{F B O}").fallbacks
