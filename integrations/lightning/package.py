"""Lightning has two names: `lightning.pytorch`, and `pytorch_lightning`, a copy of it with classes of its own."""

from __future__ import annotations

import functools
import math
from importlib import import_module
from types import SimpleNamespace
from typing import Any

_ROOTS = ("lightning.pytorch", "pytorch_lightning")


def package_of(trainer: Any) -> SimpleNamespace | None:
    """The classes of the package that a Trainer comes from, None where that is neither."""
    root = root_of(trainer)
    return _package(root) if root in _ROOTS else None


def root_of(trainer: Any) -> str:
    """The name under which the Trainer was imported, or that its base class was."""
    modules = [cls.__module__ for cls in type(trainer).__mro__ if cls.__name__ == "Trainer"]
    known = (root for module in modules for root in _ROOTS if _inside(module, root))
    return next(known, (modules or [type(trainer).__module__])[-1].partition(".")[0])


def batches_left(trainer: Any) -> float:
    """Batches that a Trainer has yet to train on, infinity where it does not know."""
    epochs, steps = trainer.max_epochs or -1, trainer.max_steps
    batches = (
        epochs * trainer.num_training_batches - trainer.fit_loop.total_batch_idx if epochs > 0 else math.inf
    )
    updates = steps - trainer.global_step if steps > 0 else math.inf
    each = len(trainer.optimizers) or 1  # updates of manual optimization count for each optimizer
    return min(float(batches), float(updates) * trainer.accumulate_grad_batches / each)


@functools.cache
def base_of(kind: type) -> type | None:
    """Lightning's class under that of a module, data module or callback, of whichever package; else None."""
    for name in ("LightningModule", "LightningDataModule", "Callback"):
        for cls in kind.__mro__:
            if cls.__name__ == name and any(_inside(cls.__module__, root) for root in _ROOTS):
                return cls
    return None


def _inside(module: str, root: str) -> bool:
    return module.startswith(root + ".")


@functools.cache
def _package(root: str) -> SimpleNamespace:
    """What the adapter uses of one of them where it has to be that of the Trainer."""

    def of(module: str, name: str) -> Any:
        return getattr(import_module(f"{root}.{module}"), name)

    names = ("Precision", "MixedPrecision", "HalfPrecision", "DoublePrecision")
    return SimpleNamespace(
        single_device=of("strategies", "SingleDeviceStrategy"),
        ddp=of("strategies", "DDPStrategy"),
        model_parallel=of("strategies", "ModelParallelStrategy"),
        automatic_optimization=of("loops.optimization.automatic", "_AutomaticOptimization"),
        manual_optimization=of("loops.optimization.manual", "_ManualOptimization"),
        mock_optimizer=of("core.optimizer", "_MockOptimizer"),
        misconfiguration=of("utilities.exceptions", "MisconfigurationException"),
        precisions=tuple(of("plugins.precision", name) for name in names),
    )
