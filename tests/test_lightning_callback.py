"""Training with `PyGraphCallback` leaves the traces of training without it, bit for bit, while it replays."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

pl = pytest.importorskip("lightning.pytorch")

from lightning_training import Module, parity, replayed  # noqa: E402

OPTIMIZERS = pytest.mark.parametrize("optimizer", ["adamw", "sgd"])


def named(options: Any) -> str:
    return ",".join(f"{k}={v}" for k, v in options.items()) if isinstance(options, dict) else str(options)


@OPTIMIZERS
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"precision": "bf16-mixed"},
        {"precision": "bf16-true"},
        {"precision": "64-true"},
        {"gradient_clip_val": 0.1},
        {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"},
        {"accumulate_grad_batches": 3, "gradient_clip_val": 0.1},
        {"accumulate_grad_batches": 3, "val_check_interval": 0.5, "validate": True},
        {"validate": True, "limit_val_batches": 2},
    ],
    ids=named,
)
def test_parity_under_trainer_options(optimizer, options):
    replayed(parity(lambda: Module(optimizer), **options), least=24)


@OPTIMIZERS
@pytest.mark.parametrize("scheduler", ["step", "epoch", "plateau"])
def test_schedulers_change_the_learning_rate_of_replays(optimizer, scheduler):
    replayed(parity(lambda: Module(optimizer, scheduler), validate=True, limit_val_batches=3), least=30)
