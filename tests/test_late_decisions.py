"""Values that a step computes decide which way it takes: a graph is replayed as long as they lead its way."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from training import Diary, Net, adamw, batches, both

Batch = tuple[Tensor, Tensor]


def train(
    loss_of: Callable[[Tensor, list[Any]], Any], *, steps: int = 40, rare: int = 9, **expected: Any
) -> Any:
    """Train. Each so many steps the batch is large, and the loss with it."""

    def script(diary: Diary) -> None:
        model = Net()
        optimizer = adamw(model)
        seen: list[Any] = []

        def step_fn(batch: Batch) -> Any:
            return loss_of(F.cross_entropy(model(batch[0]), batch[1]) * batch[0].abs().max(), seen)

        step = diary.step(step_fn, model=model, optimizer=optimizer)
        for number, (x, y) in enumerate(batches(steps)):
            x = x * 100 if number % rare == rare - 1 else x
            try:
                diary.write("returned", step((x, y)))
            except ValueError as error:
                diary.write("error", str(error))
            diary.write("seen", list(seen))
            diary.write_state(model, optimizer)

    return both(script, **{"replays": 20, "plan": "{F B O}", **expected})


def of_a_number(loss: Tensor, seen: list[Any]) -> Tensor:
    if loss.item() > 20:
        loss = loss / 100
    return loss


def of_a_tensor(loss: Tensor, seen: list[Any]) -> Tensor:
    if loss > 20:
        loss = loss.sqrt()
    return loss


def of_a_call(loss: Tensor, seen: list[Any]) -> Tensor:
    if not math.isfinite(float(loss) * 1e307):
        raise ValueError("the loss is not finite")
    return loss


def that_is_written(loss: Tensor, seen: list[Any]) -> dict[str, Any]:
    seen.append("begins")
    if loss > 20 or torch.isnan(loss).any():
        seen.append(loss.item())
    seen.append("ends")
    return {"loss": loss, "value": loss.item()}


def of_an_assertion(loss: Tensor, seen: list[Any]) -> Tensor:
    if not bool(loss < 20):
        raise ValueError(f"too large: {loss.item():.3f}")
    return loss


@pytest.mark.parametrize("loss_of", [of_a_number, of_a_tensor, of_a_call, that_is_written, of_an_assertion])
def test_a_replay_that_leads_another_way_is_taken_back(loss_of: Callable[..., Any]) -> None:
    report = train(loss_of)
    assert not report.fallbacks, str(report)
