"""Private APIs of autograd's engine."""

from __future__ import annotations

import torch
from torch.autograd import forward_ad

__all__ = [
    "backward_keeps_graph",
    "is_transformed",
]


def backward_keeps_graph() -> bool:
    """Whether the backward that runs in this thread was called with retain_graph=True. (2.11, 2.13)"""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def is_transformed() -> bool:
    """Whether operations are for something else than training now. (2.11, 2.13)

    Transforms of `torch.func`, derivatives in forward mode, and `torch.jit.trace` take the operations of eager kernels.
    """
    return (
        torch._C._functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
        or torch.jit.is_tracing()  # type: ignore[attr-defined]
    )


def compiled_autograd_wanted() -> bool:
    """Whether backwards of what is compiled now will be traced. (2.11 to 2.15)"""
    import torch._dynamo.config as config

    return bool(config.compiled_autograd or torch._dynamo.compiled_autograd.compiled_autograd_enabled)
