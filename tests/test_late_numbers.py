"""Numbers that a step reads of its tensors and only returns, keeps or logs: read when its graph has run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning_training import parity
from torch import Tensor, nn
from training import Diary, Net, adamw, batches, both

from pygraph_train.problems import NotLegal
from pygraph_train.tracing.late_numbers import LateFloat, LateInt

Batch = tuple[Tensor, Tensor]


def train(make: Callable[[nn.Module], Callable[[Batch], Any]], *, steps: int = 30, **expected: Any) -> Any:
    """Train, and compare all that is returned, and what the function keeps in `kept`."""

    def script(diary: Diary) -> None:
        model = Net()
        optimizer = adamw(model)
        fn = make(model)
        step = diary.step(fn, model=model, optimizer=optimizer)
        for batch in batches(steps):
            diary.write("returned", step(batch))
            diary.write("kept", list(getattr(fn, "kept", ())))
            diary.write_state(model, optimizer)

    return both(script, **{"replays": 20, "plan": "{F B O}", **expected})


def returned(model: nn.Module) -> Callable[[Batch], Any]:
    def step_fn(batch: Batch) -> dict[str, Any]:
        found = model(batch[0])
        loss = F.cross_entropy(found, batch[1])
        right = (found.argmax(1) == batch[1]).sum()
        return {
            "loss": loss,
            "value": loss.item(),
            "deep": [(float(loss.detach().double()), int(right)), right.item() / 8, -loss.item() * 2 + 1],
            "again": right.item(),
        }

    return step_fn


def of_changed_tensors(model: nn.Module) -> Callable[[Batch], Any]:
    """What is read is what the tensor was at that line."""

    def step_fn(batch: Batch) -> dict[str, Any]:
        loss = F.cross_entropy(model(batch[0]), batch[1])
        total = loss.detach().clone()
        first = total.item()
        total += 1
        weight = model.second.bias[0].item()  # type: ignore[index, union-attr]
        return {"loss": loss, "numbers": (first, total.item(), weight)}

    return step_fn


class Keeps:
    """Writes numbers to Python."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.kept: list[float] = []
        self.last: float | None = None
        self.steps = 0

    def __call__(self, batch: Batch) -> Tensor:
        loss = F.cross_entropy(self.model(batch[0]), batch[1])
        self.steps += 1
        self.kept.append(loss.item())
        self.last = float(loss) / 2
        return loss


def of_one_element(model: nn.Module) -> Callable[[Batch], Any]:
    def step_fn(batch: Batch) -> dict[str, Any]:
        loss = F.cross_entropy(model(batch[0]), batch[1])
        with torch.no_grad():
            norm = model.first.weight.norm(keepdim=True)  # type: ignore[operator, union-attr]
        return {"loss": loss, "norm": norm.item(), "half": norm.bfloat16().item()}

    return step_fn


@pytest.mark.parametrize("make", [returned, of_changed_tensors, Keeps, of_one_element])
def test_numbers_that_nothing_depends_on_are_read_after_the_replay(make: Callable[[nn.Module], Any]) -> None:
    report = train(make)
    assert not report.fallbacks, str(report)


def test_what_depends_on_a_number_is_refused_with_the_line() -> None:
    def make(model: nn.Module) -> Callable[[Batch], Any]:
        def step_fn(batch: Batch) -> dict[str, Any]:
            loss = F.cross_entropy(model(batch[0]), batch[1])
            return {"loss": loss * (1 + 1e-3 * loss.item()), "value": loss.item()}

        return step_fn

    report = train(make, replays=1, plan=None)  # of regions and the optimizer
    assert report.steps_replayed == 0 and "read on the host" in report.fallbacks[0].reason, str(report)


def test_a_number_that_is_not_finite() -> None:
    def make(model: nn.Module) -> Callable[[Batch], Any]:
        def step_fn(batch: Batch) -> dict[str, Any]:
            loss = F.cross_entropy(model(batch[0]), batch[1])
            seen = torch.where(loss > 1.1, loss / 0, -loss / 0 * 0)
            return {"loss": loss, "value": seen.item(), "large": torch.full((), 2**62 + 1).item()}

        return step_fn

    train(make)


class Logs(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.seen: list[float] = []

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        found = self.net(batch[0])
        loss = F.cross_entropy(found, batch[1])
        right = (found.argmax(1) == batch[1]).float().mean()
        self.log("accuracy", right.item(), on_step=True, on_epoch=True)
        self.log("loss", float(loss), prog_bar=True)
        self.seen.append(loss.item())
        return {"loss": loss, "right": right.item()}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return adamw(self)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_numbers_that_lightning_logs_and_a_module_keeps(precision: str) -> None:
    plain, graphed = parity(Logs, replays=15, plan="{F B O}", precision=precision, max_epochs=3)
    assert plain.module.seen == graphed.module.seen and len(plain.module.seen) == 33
    assert not graphed.report.fallbacks


class LogsMore(Logs):
    """What is logged is computed by Python."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("perplexity", 2 * loss.item(), on_epoch=True)
        return loss


def test_numbers_of_python_that_lightning_logs() -> None:
    _, graphed = parity(LogsMore, replays=10, plan="{F} {B} {O}", max_epochs=3)
    assert "self.log(...)" in graphed.report.fallbacks[0].reason


@pytest.mark.passes_without_graphs("marks are tested themselves")
def test_who_computes_with_a_mark_is_refused() -> None:
    uses = (
        float,
        int,
        bool,
        str,
        repr,
        abs,
        hash,
        "{}".format,
        lambda m: m + 1,
        lambda m: 1 * m,
        lambda m: m == 0,
    )
    for mark in (LateFloat(), LateInt()):
        for use in uses:
            with pytest.raises(NotLegal, match="before its graph has run"):
                use(mark)
