"""Values that a step computes and the host reads, on a GPU: in results, in Python, in decisions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_late_numbers_gpu import Net
from test_same_as_plain_gpu import STEPS, Make, both
from torch import Tensor, nn
from torch.nn import functional as F

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def batches() -> list[tuple[Tensor, Tensor]]:
    """One in nine is large."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for number in range(STEPS):
        x = torch.randn(16, 32, generator=generator) * (1000 if number % 9 == 8 else 1)
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


def test_values_that_decide() -> None:
    def script(make: Make) -> list[Any]:
        model, seen = Net().cuda(), []
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)

        def loss_of(x: Tensor, y: Tensor) -> Tensor:
            loss = F.cross_entropy(model(x), y) * x.abs().max()
            if loss > 100 or torch.isnan(loss).any():
                loss = loss / 1000
                seen.append("large")
            return loss

        step = make(loss_of, model, optimizer)
        losses = [step(*batch) for batch in batches()]
        left = [*model.parameters(), *model.buffers()]
        return [*losses, *seen, *(t.detach() for t in left), torch.cuda.get_rng_state()]

    assert not both(script, replays=STEPS // 2, plan="{F B O}").fallbacks


def test_an_index_that_rests_on_an_answer_does_not_stop_the_device() -> None:
    def script(make: Make) -> list[Any]:
        model, table = Net().cuda(), nn.Embedding(10, 4).cuda()
        optimizer = torch.optim.AdamW([*model.parameters(), *table.parameters()], 1e-3, fused=True)

        def loss_of(x: Tensor, y: Tensor) -> Tensor:
            loss = F.cross_entropy(model(x), y)
            places = (x.abs().max() * 1.5 + 0 * loss.detach()).long().reshape(1)
            if places.max() >= 10:
                places = places.clamp(max=9)
            return loss + table(places).sum()

        step = make(loss_of, model, optimizer)
        losses = [step(*batch) for batch in batches()]
        return [*losses, *(t.detach() for t in (*model.parameters(), *table.parameters()))]

    both(script, replays=STEPS // 2, plan="{F B O}")


def test_a_decision_that_keeps_flipping_is_left() -> None:
    def script(make: Make) -> list[Any]:
        model = Net().cuda()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)

        def loss_of(x: Tensor, y: Tensor) -> Tensor:
            loss = F.cross_entropy(model(x), y) * x.abs().max()
            if loss > 100:
                loss = loss / 1000
            return loss

        step = make(loss_of, model, optimizer)
        losses = []
        for number, batch in enumerate(batches()):
            losses.append(step(batch[0] * (1 + number % 2 * 1000), batch[1]))
        return [
            *losses,
            *(t.detach() for t in (*model.parameters(), *model.buffers())),
            torch.cuda.get_rng_state(),
        ]

    both(script, replays=1, plan=None)
