"""Hooks of Lightning that act in the middle of a training step, and who overrides them."""

from __future__ import annotations

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer

from pygraph_train.integrations.lightning.package import base_of

INSIDE_FORWARD_BACKWARD = ("on_before_zero_grad", "on_before_backward", "optimizer_zero_grad", "backward")
"""Hooks between forward and backward: overridden, they split the step there."""

INSIDE_UPDATE = (
    "on_after_backward",
    "on_before_optimizer_step",
    "configure_gradient_clipping",
    "clip_gradients",
    "optimizer_step",
)
"""Hooks between backward and the optimizer: overridden, they split the step there."""

CLIPPING = ("configure_gradient_clipping", "clip_gradients")
"""Those of them that clip."""

TRANSFER = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
"""Hooks of modules and data modules that move a batch to the device."""

ON_EACH_BATCH = (
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
)
"""Hooks of callbacks that Lightning calls for each batch."""


def overridden(trainer: Trainer, module: LightningModule, hook: str) -> str | None:
    """`Class.hook` of whoever overrides it."""
    for owner in (module, *trainer.callbacks):  # type: ignore[attr-defined]
        if overrides(owner, hook):
            return f"{type(owner).__name__}.{hook}"
    return None


def overrides(owner: Any, hook: str) -> bool:
    """Whether a module, a data module or a callback has a hook of its own."""
    parent = base_of(type(owner)) or Callback
    if not hasattr(parent, hook):
        return False
    method = getattr(owner, hook)
    return getattr(method, "__func__", method) is not getattr(parent, hook)
