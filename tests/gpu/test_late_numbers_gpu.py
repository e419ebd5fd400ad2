"""Numbers that a step reads of its tensors and keeps, on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_same_as_plain_gpu import STEPS, Make, both
from torch import Tensor, nn
from torch.nn import functional as F

from pygraph_train.tracing import late_numbers
from pygraph_train.tracing.late_numbers import on_host

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


class Net(nn.Module):
    """With a random state and buffers, which a replay that is taken back has changed."""

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


class Meter:
    """Sums, means and texts of numbers of the device."""

    def __init__(self) -> None:
        self.sum, self.count, self.best = 0.0, 0, float("inf")
        self.right, self.text = 0, ""

    def update(self, loss: float, right: int, n: int) -> float:
        self.sum += loss * n
        self.count += n
        self.right += right
        self.best = min(self.best, loss)
        self.text = f"{self.sum / self.count:.6f} {100 * right / n:.2f}%"
        return self.sum / self.count


def test_a_meter_of_numbers_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """The host waits once in a replay, for all of them."""
    waits: list[int] = []

    def counted(tensors: Any) -> Any:
        copies = on_host(tensors)
        waits.append(len(tensors))
        assert all(x.is_pinned() for x in copies if len(tensors) > 1)
        return copies

    def script(make: Make) -> list[Any]:
        model, meter, kept = Net().cuda(), Meter(), []
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)

        def loss_of(x: Tensor, y: Tensor) -> Tensor:
            found = model(x)
            loss = F.cross_entropy(found, y)
            mean = meter.update(loss.item(), int((found.argmax(1) == y).sum()), len(y))
            kept.append((mean, loss.bfloat16().item()))
            return loss

        step, losses, seen = make(loss_of, model, optimizer), [], []
        for index, batch in enumerate(batches()):
            losses.append(step(*batch))
            seen.append(dict(vars(meter)))
            if index % 20 == 19:
                meter.sum, meter.count = 0, 0
        return [*losses, *kept, *seen, *(p.detach() for p in model.parameters())]

    monkeypatch.setattr(late_numbers, "on_host", counted)
    assert not both(script, replays=STEPS - 15, plan="{F B O}").fallbacks
    assert set(waits) == {3} and len(waits) < 2 * STEPS, waits
