"""Tables of hooks, and whether there are any."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

__all__ = [
    "accumulation_hooks",
    "backward_hook_tables",
    "global_module_hook_tables",
    "gradient_hooks",
    "hook_registrations",
    "hooks_on_accumulation",
    "module_hook_tables",
    "saved_tensors_hooks_active",
    "user_hooks_on_saved_tensors",
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


def module_hook_tables(module: torch.nn.Module) -> tuple[dict[int, Any], ...]:
    """The live tables of hooks that calling a module, or its backward, runs (torch 2.11, 2.13)."""
    return (
        module._forward_pre_hooks,
        module._forward_hooks,
        module._backward_pre_hooks,
        module._backward_hooks,
    )


gradient_hooks: Callable[[torch.Tensor], Mapping[int, Any] | None] = operator.attrgetter("_backward_hooks")
"""The live table of a tensor's hooks, None where there never were any. (2.11, 2.13)"""

accumulation_hooks: Callable[[torch.Tensor], Mapping[int, Any] | None] = operator.attrgetter(
    "_post_accumulate_grad_hooks"
)
"""The live table of a leaf's hooks that run when its gradient is there, None where it never had one. (2.11, 2.13)"""


def backward_hook_tables(module: torch.nn.Module) -> tuple[dict[int, Any], ...]:
    """The live tables of hooks that a module's backward runs (torch 2.11, 2.13)."""
    return (module._backward_hooks, module._backward_pre_hooks)


def hook_registrations() -> int:
    """A number that grows with every hook registered on any tensor, module or optimizer (torch 2.11, 2.13)."""
    return RemovableHandle.next_id


def hooks_on_accumulation(leaf: torch.Tensor) -> list[Any]:
    """Hooks that somebody registered on the node that adds to a leaf's gradient. (2.11, 2.13)

    Nothing tells them, but the handle of one more hook knows the table that it is in. That hook does not count
    among the `hook_registrations`.
    """
    if not leaf.requires_grad or not leaf.is_leaf:
        return []
    node = torch.autograd.graph.get_gradient_edge(leaf).node
    found: list[Any] = []
    for register in (node.register_hook, node.register_prehook):
        before = RemovableHandle.next_id
        handle = register(_no_hook)
        table = handle.hooks_dict_ref() or {}  # type: ignore[attr-defined]
        found += [hook for hook in table.values() if hook is not _no_hook]
        handle.remove()
        if RemovableHandle.next_id == before + 1:
            RemovableHandle.next_id = before
    return found


def _no_hook(*_: Any) -> None:
    """A hook that changes nothing."""


def saved_tensors_hooks_active() -> bool:
    """Whether hooks get what is saved for a backward just now. (2.11, 2.13)"""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


def user_hooks_on_saved_tensors() -> bool:
    """Whether hooks that torch did not write itself, as for checkpoints, get what is saved just now. (2.11, 2.13)"""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and not str(getattr(hooks[0], "__module__", "")).startswith("torch.")
