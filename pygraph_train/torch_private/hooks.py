"""Whether there are hooks that no call of a module or an operation shows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pygraph_train.torch_private.names import private

__all__ = [
    "has_hooks_on_all_modules",
    "saved_tensors_hooks_active",
]


has_hooks_on_all_modules: Callable[[], Any] = private("torch.nn.modules.module._has_any_global_hook")
"""Whether there are hooks that every module runs. (2.11 to 2.15)"""


def saved_tensors_hooks_active(*, checkpoints: bool = True) -> bool:
    """Whether hooks get what is saved for a backward just now. (2.11 to 2.15) Hot path.

    Args:
        checkpoints: whether those of `torch.utils.checkpoint` count.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and (checkpoints or hooks[0].__module__ != "torch.utils.checkpoint")
