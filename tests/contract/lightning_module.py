"""The LightningModule that tests train, or derive theirs from."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl

from .models import Net, adamw, cross_entropy

__all__ = ["Module"]


class Module(pl.LightningModule):
    """A classifier that logs a little of everything."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Net()

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        out = self.net(batch[0])
        loss = cross_entropy(out, batch[1])
        self.log("loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        self.log("accuracy", (out.argmax(1) == batch[1]).float().mean(), on_step=False, on_epoch=True)
        self.log("worst", loss, reduce_fx="max", on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", cross_entropy(self.net(batch[0]), batch[1]))

    def configure_optimizers(self) -> Any:
        return adamw(self)
