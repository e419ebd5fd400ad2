"""Tables of hooks, and whether there are any."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

__all__ = [
    "global_module_hook_tables",
    "saved_tensors_hooks_active",
]


def global_module_hook_tables() -> tuple[Mapping[int, Any], ...]:
    """The live tables of hooks that every module runs (torch 2.11, 2.13)."""
    from torch.nn.modules import module

    return (
        module._global_forward_hooks,
        module._global_forward_pre_hooks,
        module._global_backward_hooks,
        module._global_backward_pre_hooks,
    )


def saved_tensors_hooks_active(*, checkpoints: bool = True) -> bool:
    """Whether hooks get what is saved for a backward just now. (2.11 to 2.15) Hot path.

    Args:
        checkpoints: whether those of `torch.utils.checkpoint` count.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and (checkpoints or hooks[0].__module__ != "torch.utils.checkpoint")
