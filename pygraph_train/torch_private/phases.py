"""What phases of a step that are replayed on their own need of torch."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = [
    "HigherOrderOperator",
    "accumulation_hooks_of",
    "add_all",
    "at_end_of_backward",
    "hooks_of",
    "inductor",
    "present_backward",
]

HigherOrderOperator: Any = torch._ops.HigherOrderOperator

hooks_of: Callable[[Tensor], Any] = operator.attrgetter("_backward_hooks")
"""Hooks on the gradient of a tensor; None or empty without any. (2.11 to 2.15)"""

accumulation_hooks_of: Callable[[Tensor], Any] = operator.attrgetter("_post_accumulate_grad_hooks")
"""Hooks that run when a leaf has got its gradient; None or empty without any. (2.11 to 2.15)"""


def add_all(sums: Sequence[Tensor], more: Sequence[Tensor]) -> None:
    """Add to each of these in place. (2.11 to 2.15)"""
    torch._foreach_add_(list(sums), list(more))


def present_backward() -> int:
    """What tells the backward that runs in this thread from others; -1 where none does. (2.11 to 2.15)"""
    return int(torch._C._current_graph_task_id())


def at_end_of_backward(call: Callable[[], None]) -> None:
    """Have `call` called when the present backward has ended without an exception. (2.11 to 2.15)"""
    torch.autograd.Variable._execution_engine.queue_callback(call)  # type: ignore[attr-defined]


def inductor(gm: torch.fx.GraphModule, examples: Sequence[Any]) -> Callable[..., Any]:
    """A graph of Dynamo's with Inductor's kernels. (2.11 to 2.15)"""
    compiler: Any = torch._dynamo.lookup_backend("inductor")  # type: ignore[attr-defined]
    compiled: Callable[..., Any] = compiler(gm, list(examples))
    return compiled
