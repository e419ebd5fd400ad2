"""Batches on their way to the device while it still works on the previous step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.utilities.model_helpers import is_overridden

from pygraph_train.integrations.lightning.package import package_of
from pygraph_train.step.transfer import Transfer

_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


def overlapped_transfer(trainer: Trainer) -> Callable[[], None]:
    """Move training batches on a stream of their own. Returns what undoes it.

    In the stream of the kernels a copy waits for all of them. Transfer hooks of the user may compute on
    the device and expect that order, so with such hooks nothing is changed.
    """
    strategy = trainer.strategy
    if strategy.root_device.type != "cuda" or _has_transfer_hooks(trainer):
        return lambda: None
    move = strategy.batch_to_device
    transfer = Transfer(strategy.root_device)

    def batch_to_device(batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        if not trainer.training:
            return move(batch, device, dataloader_idx)
        return transfer(lambda: move(batch, device, dataloader_idx))

    strategy.batch_to_device = batch_to_device  # type: ignore[method-assign]
    return lambda: strategy.__dict__.pop("batch_to_device", None)


def _has_transfer_hooks(trainer: Trainer) -> bool:
    package = package_of(trainer)
    assert package is not None
    owners: list[tuple[Any, type]] = [(trainer.lightning_module, package.module)]
    if trainer.datamodule is not None:  # type: ignore[attr-defined]
        owners.append((trainer.datamodule, package.data_hooks))  # type: ignore[attr-defined]
    return any(is_overridden(hook, owner, parent=parent) for owner, parent in owners for hook in _HOOKS)
