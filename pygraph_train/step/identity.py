"""What a decision between plans depends on, as plain data that is the same in the next run."""

from __future__ import annotations

import dataclasses
import hashlib
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pygraph_train import __version__
from pygraph_train.config import PyGraphConfig

__all__ = ["identity"]

_OPTIONS = ("forward", "backward", "optimizer", "fuse", "compile", "indirection")


def identity(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    device: torch.device,
    engine: str,
    config: PyGraphConfig,
    signature: Any,
) -> dict[str, Any]:
    """The key of the decision cache.

    Args:
        model, optimizer: their structure counts, not their values.
        signature: of the step's arguments; anything whose `repr` is the same in the next run.
    """
    cuda = device.type == "cuda"
    options = dataclasses.asdict(config)
    return {
        "model": _digest(
            [(name, type(module).__qualname__) for name, module in model.named_modules()],
            [(name, tuple(p.shape), p.dtype, p.requires_grad) for name, p in model.named_parameters()],
        ),
        "optimizer": None if optimizer is None else type(optimizer).__qualname__,
        "signature": _digest(signature),
        "engine": engine,
        "gpu": torch.cuda.get_device_name(device) if cuda else None,
        "driver": _driver() if cuda else None,
        "torch": torch.__version__,
        "pygraph_train": __version__,
        "options": {name: options[name] for name in _OPTIONS},
    }


def _driver() -> str | None:
    """The version of the NVIDIA driver, None where the kernel does not tell."""
    try:
        return Path("/proc/driver/nvidia/version").read_text(encoding="utf-8").partition("\n")[0]
    except OSError:
        return None


def _digest(*facts: Any) -> str:
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:32]
