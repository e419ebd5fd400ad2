"""What each rank of `tests/ranks.py` trains with Lightning: the same Trainer with and without the callback."""

from __future__ import annotations

import os
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning_training import QUIET, MemoryLogger, Module, fit, loader, parity
from torch import Tensor, distributed, nn

from pygraph_train import PyGraphCallback

__all__ = ["ends_together", "same", "same_after_resuming"]


class Logging(Module):
    """Logs values that are reduced over the ranks."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("loss", loss, prog_bar=True, on_step=True, on_epoch=True, sync_dist=True)
        self.log("epoch_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        self.log("alone", loss * 2)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)


class Freezing(pl.Callback):
    """Freezes a layer in mid-training."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 4:
            next(pl_module.net.parameters()).requires_grad_(False)


def same(rank: int, *, replays: int, freezes: bool = False, logs: bool = False, **options: Any) -> int:
    """Train with the stock Trainer and with the callback; raise where they differ. Returns the steps replayed."""
    make = Logging if logs else Module
    module_options = options.pop("module", {})
    on_gpu: dict[str, Any] = {}
    if distributed.get_backend() == "nccl":
        options = {"accelerator": "gpu", **options}
        on_gpu = {"engine": "cuda"}
        options["logger"] = False  # ours adds the time of a step there
    _, graphed = parity(
        lambda: make(**module_options),
        (lambda: [Freezing()]) if freezes else (lambda: ()),
        replays=replays,
        plan=options.pop("plan", "{F B O}"),
        config={**on_gpu, **options.pop("config", {})},
        **{"devices": 2, "strategy": "ddp", "max_epochs": 8, "logger": MemoryLogger(), **options},
    )
    return graphed.report.steps_replayed if graphed.report else 0


class Terminated(pl.Callback):
    """Lets the first rank know, late in training, that it is to end."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        trainer._signal_connector.received_sigterm = trainer.global_step >= 20 and trainer.global_rank == 0


def ends_together(rank: int) -> list[tuple[int, int]]:
    """Steps made and replayed until a signal that one rank got has ended both; without the callback, and with it."""
    found = []
    for ours in ([], [PyGraphCallback(engine="emulated")]):
        ended = Terminated()
        trainer = pl.Trainer(
            accelerator="cpu", devices=2, strategy="ddp", max_epochs=9, callbacks=[*ours, ended], **QUIET
        )
        try:
            trainer.fit(Module(), loader())
        except SIGTERMException:
            replays = ours[0].report().steps_replayed if ours else 0
            found.append((trainer.global_step, replays))
    return found


def same_after_resuming(rank: int, *, folder: str) -> int:
    """Save in mid-training, and go on from there with and without the callback."""
    options: dict[str, Any] = {"devices": 2, "strategy": "ddp"}
    first = fit([PyGraphCallback(engine="emulated")], max_epochs=3, **options)
    path = os.path.join(folder, "half.ckpt")
    first.trainer.save_checkpoint(path)
    ends: list[list[Tensor]] = []
    replays = 0
    for callbacks in ([], [PyGraphCallback(engine="emulated")]):
        second = fit(callbacks, max_epochs=9, ckpt_path=path, **options)
        ends.append([t.clone() for t in second.module.state_dict().values()])
        replays = second.report.steps_replayed if second.report else 0
    assert all(map(torch.equal, *ends)), "training differs after a checkpoint"
    return replays
