"""Meters in the loops of Lightning and Accelerate."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning_training import parity
from test_late_arithmetic import AverageMeter
from torch import Tensor
from training import Net, adamw

pytest.importorskip("accelerate")

from accelerate_training import Script, both, fresh, loss_of, setup  # noqa: F401

Batch = tuple[Tensor, Tensor]


class Meters(pl.LightningModule):
    """A module with a meter, which begins anew in each epoch, and attributes of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.losses = AverageMeter()
        self.total: Any = 0.0
        self.best = float("inf")
        self.texts: list[str] = []
        self.means: list[Any] = []

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        found = self.net(batch[0])
        loss = F.cross_entropy(found, batch[1])
        right = int((found.argmax(1) == batch[1]).sum())
        self.losses.update(loss.item(), len(batch[1]))
        self.total += 100.0 * right / len(batch[1])
        self.best = min(self.best, loss.item())
        self.texts.append(f"{self.losses.avg:.5f} {right:>3d}")
        self.log("loss", loss.item(), prog_bar=True, on_epoch=True)
        return {"loss": loss, "mean": self.losses.avg}

    def on_train_epoch_end(self) -> None:
        self.means += [(self.losses.avg, self.total, self.best)]
        self.losses.reset()
        self.total = 0

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return adamw(self)


@pytest.mark.parametrize(
    "options", [{}, {"precision": "bf16-mixed"}, {"accumulate_grad_batches": 3}], ids=str
)
def test_meters_of_a_lightning_module(options: dict[str, Any]) -> None:
    plain, graphed = parity(Meters, replays=25, plan="{F B O}", max_epochs=5, **options)
    modules: list[Any] = [plain.module, graphed.module]
    kept = [(m.texts, m.means, m.best, m.total, vars(m.losses)) for m in modules]
    assert repr(kept[0]) == repr(kept[1]) and len(modules[0].texts) == 55 and len(modules[0].means) == 5
    assert not graphed.report.fallbacks, str(graphed.report)


class LogsMean(Meters):
    """What is logged follows from numbers of earlier steps."""

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        result = super().training_step(batch, batch_idx)
        self.log("mean", self.losses.avg)
        return result


def test_a_mean_that_lightning_logs_is_refused_with_a_reason() -> None:
    plain, graphed = parity(LogsMean, replays=20, plan="{F} {B} {O}", max_epochs=4)
    modules: list[Any] = [plain.module, graphed.module]
    assert repr(modules[0].means) == repr(modules[1].means)
    assert "self.log(...)" in graphed.report.fallbacks[0].reason, str(graphed.report)


@pytest.mark.parametrize("whole", [False, True])
def test_meters_of_an_accelerate_loop(whole: bool) -> None:
    def script(script: Script) -> None:
        accelerator, meter = script.accelerator, AverageMeter()
        model, optimizer, loader, schedule = setup(script)

        def step(batch: dict[str, Tensor]) -> Tensor:
            loss = loss_of(model, batch)
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            meter.update(loss.item(), len(batch["y"]))
            return loss

        run = script.graphed(step) if whole else step
        for batch in loader:
            script.write("loss", run(batch))
            script.write("meter", vars(meter))
        script.write_state(model, optimizer)

    report = both(script, replays=20)
    steps = list(report.whole_steps.values())
    assert [s.plan for s in steps] == ["{F B O}"] * whole and not any(s.fallbacks for s in steps), str(report)
