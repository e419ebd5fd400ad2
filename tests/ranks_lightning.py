"""What each rank of `tests/ranks.py` trains with Lightning: the same Trainer with and without the callback."""

from __future__ import annotations

import copy
import os
from contextlib import suppress
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.strategies import ModelParallelStrategy
from lightning.pytorch.utilities.exceptions import SIGTERMException
from lightning_training import QUIET, MemoryLogger, Module, compare, fit, loader, parity
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import FSDPModule, fully_shard
from training import frozen

from pygraph_train import PyGraphCallback
from tests.replays import text_of

__all__ = ["ends_together", "manual", "same", "same_after_resuming"]


class Logging(Module):
    """Logs values that are reduced over the ranks."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        bar = distributed.get_backend() != "nccl"  # there the bar shows the step before
        self.log("loss", loss, prog_bar=bar, on_step=True, on_epoch=True, sync_dist=True)
        self.log("epoch_loss", loss, on_step=False, on_epoch=True, sync_dist=True)
        self.log("alone", loss * 2)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val_loss", self.loss(batch), sync_dist=True)


class Sharded(Module):
    """Its parameters are spread over the ranks: those of one layer, and the others."""

    def configure_model(self) -> None:
        mesh = self.device_mesh["data_parallel"]
        if not isinstance(self.net, FSDPModule):
            fully_shard(self.net.second, mesh=mesh)
            fully_shard(self.net, mesh=mesh)


class ShardedLogging(Sharded, Logging):
    """Both."""


class Manual(Module):
    """Optimizes by hand, and accumulates over two batches."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(batch)
        self.manual_backward(loss / 2)
        self.log("loss", loss)
        if batch_idx % 2:
            optimizer = self.optimizers()
            self.clip_gradients(optimizer, 0.5, "norm")
            optimizer.step()
            optimizer.zero_grad()
        return loss


class ShardedManual(Sharded, Manual):
    """Both."""


def manual(rank: int, *, shards: bool, **options: Any) -> tuple[int, str]:
    """Train by hand with the stock Trainer and with the callback. Returns updates replayed, and the report."""
    strategy: Any = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1) if shards else "ddp"
    fits = []
    for callbacks in ([], [PyGraphCallback(engine="emulated")]):
        torch.manual_seed(0)
        module = ShardedManual() if shards else Manual()
        options |= {"devices": 2, "strategy": copy.deepcopy(strategy), "max_epochs": 10}
        fits.append(fit(callbacks, module=module, **options))
    compare(*fits)
    report: Any = fits[1].report
    return report.optimizer_steps_replayed, text_of(report)


class Freezing(pl.Callback):
    """Freezes a layer in mid-training."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        if trainer.current_epoch == 4:
            next(pl_module.net.parameters()).requires_grad_(False)


def same(
    rank: int,
    *,
    replays: int,
    freezes: bool = False,
    logs: bool = False,
    shards: bool = False,
    **options: Any,
) -> int:
    """Train with the stock Trainer and with the callback; raise where they differ. Returns the steps replayed."""
    make = {
        (False, False): Module,
        (True, False): Logging,
        (False, True): Sharded,
        (True, True): ShardedLogging,
    }[logs, shards]
    strategy: Any = "ddp"
    if shards:
        strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
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
        plan=options.pop("plan", "{F} {B} {O}"),
        config={**on_gpu, **options.pop("config", {})},
        **{"devices": 2, "strategy": strategy, "max_epochs": 8, "logger": MemoryLogger(), **options},
    )
    return graphed.report.steps_replayed if graphed.report else 0


class Terminated(pl.Callback):
    """Lets the first rank know between two batches, late in training, that it is to end."""

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        loop = trainer.fit_loop.epoch_loop
        stock = loop.on_advance_end

        def on_advance_end(*args: Any) -> None:
            stock(*args)
            trainer._signal_connector.received_sigterm = trainer.global_step >= 20 and trainer.is_global_zero

        loop.on_advance_end = on_advance_end


def ends_together(rank: int, *, ours: bool) -> tuple[int, int]:
    """Steps made, and steps replayed, until a signal that one rank got ended the training of both."""
    callback = PyGraphCallback(engine="emulated")
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        max_epochs=9,
        callbacks=[*([callback] if ours else []), Terminated()],
        **QUIET,
    )
    with suppress(SIGTERMException):
        trainer.fit(Module(), loader())
        raise AssertionError("the training did not end")
    return trainer.global_step, callback.report().steps_replayed


def same_after_resuming(rank: int, *, folder: str, shards: str = "") -> int:
    """Save in mid-training, and go on from there with and without the callback.

    Args:
        shards: under `fully_shard`, whether the checkpoint is "whole" or "sharded".
    """

    def module() -> Module:
        torch.manual_seed(0)
        return Sharded() if shards else Module()

    def strategy() -> Any:
        if not shards:
            return "ddp"
        return ModelParallelStrategy(2, 1, save_distributed_checkpoint=shards == "sharded")

    options: dict[str, Any] = {"devices": 2}
    first = fit(
        [PyGraphCallback(engine="emulated")], module=module(), strategy=strategy(), max_epochs=3, **options
    )
    path = os.path.join(folder, "half.ckpt")
    first.trainer.save_checkpoint(path)
    ends: list[list[Tensor]] = []
    replays = 0
    for callbacks in ([], [PyGraphCallback(engine="emulated")]):
        second = fit(callbacks, module=module(), strategy=strategy(), max_epochs=9, ckpt_path=path, **options)
        ends.append([t.clone() for t in frozen(list(second.module.state_dict().values()))])
        replays = second.report.steps_replayed if second.report else 0
    assert all(map(torch.equal, *ends)), "training differs after a checkpoint"
    return replays
