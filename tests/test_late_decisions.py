"""Values that a step computes decide which way it takes: a graph is replayed as long as they lead its way."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning_training import parity
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


def of_both_kinds(loss: Tensor, seen: list[Any]) -> Tensor:
    """The ways of one value are nested, and a result of the batch decides as well."""
    large = loss.detach() * 2
    if large > 1:
        loss = loss * 1.5
        if large.item() > 40 and not math.isnan(loss.item()):
            loss = loss / 50
    return loss


@pytest.mark.parametrize(
    "loss_of", [of_both_kinds, of_a_number, of_a_tensor, of_a_call, that_is_written, of_an_assertion]
)
def test_a_replay_that_leads_another_way_is_taken_back(loss_of: Callable[..., Any]) -> None:
    report = train(loss_of)
    assert not report.fallbacks, str(report)


def test_without_comparisons_values_decide_nothing() -> None:
    report = train(of_a_number, verify="off", replays=1, plan=None)
    assert "read on the host" in report.fallbacks[0].reason


@pytest.mark.parametrize("rare", [3, 4, 5, 6, 7])
def test_the_step_that_is_captured_or_compared_goes_another_way(rare: int) -> None:
    train(of_a_number, rare=rare, replays=1, plan=None)


def test_in_accumulation_each_micro_batch_may_go_another_way() -> None:
    def script(diary: Diary) -> None:
        model = Net()
        optimizer = adamw(model)

        def step_fn(batch: Batch) -> Tensor:
            loss = F.cross_entropy(model(batch[0]), batch[1]) * batch[0].abs().max()
            return loss / 100 if loss > 20 else loss

        step = diary.step(step_fn, model=model, optimizer=optimizer)
        for number, (x, y) in enumerate(batches(60)):
            batch = (x * 100 if number % 13 == 12 else x, y)
            diary.write("loss", step(batch) if number % 3 == 2 else step.accumulate(batch))
            diary.write_state(model, optimizer)

    both(script, replays=15, plan="{F B O}")


class Skips(pl.LightningModule):
    """Leaves out batches whose loss is not finite."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.skipped = 0

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        if batch_idx == 7:
            loss = loss / 0
        if not torch.isfinite(loss):
            self.skipped += 1
            return None
        self.log("loss", loss.item())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return adamw(self)


def test_lightning_skips_a_batch() -> None:
    plain, graphed = parity(Skips, replays=10, max_epochs=3)
    assert plain.module.skipped == graphed.module.skipped == 3
