"""Private APIs of `fully_shard` (FSDP2): its states, its hooks, and parameters in their two forms."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

__all__ = [
    "flags",
    "local_tensor",
    "local_tensors",
    "opened",
    "sharded_groups",
    "sharded_states",
    "wrapped_by_fsdp1",
]


def local_tensor(tensor: Tensor) -> Tensor:
    """The part of a DTensor that this process holds; any other tensor itself (torch 2.11, 2.13)."""
    part: Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


_PLAIN = {Tensor, nn.Parameter}


def local_tensors(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """As `local_tensor`, of each. Hot path."""
    return tensors if _PLAIN.issuperset(map(type, tensors)) else [local_tensor(t) for t in tensors]


def wrapped_by_fsdp1(model: nn.Module) -> bool:
    """Whether a part of a model is in FullyShardedDataParallel, the older one (torch 2.11, 2.13)."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and any(isinstance(m, fsdp.FullyShardedDataParallel) for m in model.modules())


def sharded_states(model: nn.Module) -> list[Any]:
    """The states of all modules that `fully_shard` was called with, each once (torch 2.11, 2.13)."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return []
    modules = (m for m in model.modules() if isinstance(m, fsdp.FSDPModule))
    return list(dict.fromkeys(m._get_fsdp_state() for m in modules))


def sharded_groups(states: Sequence[Any]) -> list[Any]:
    """The groups of parameters that are gathered together (torch 2.13 has several of one state; 2.11)."""
    groups: list[Any] = []
    for state in states:
        several = getattr(state, "_fsdp_param_groups", None)
        one = state._fsdp_param_group if several is None else None
        groups += several if several is not None else ([] if one is None else [one])
    return groups


flags: Callable[[Any], tuple[bool, ...]] = operator.attrgetter(
    "reduce_grads", "all_reduce_grads", "reshard_after_backward"
)
"""What a loop may switch between micro-batches, of one group (torch 2.11, 2.13)."""


def _cast(tree: Any, dtype: Any) -> Any:
    """Floating-point tensors in plain containers, as another type."""
    if isinstance(tree, Tensor):
        return tree.to(dtype) if tree.is_floating_point() else tree
    if isinstance(tree, (list, tuple)) and not hasattr(tree, "_fields"):
        return type(tree)(_cast(item, dtype) for item in tree)
    if type(tree) is dict:
        return {key: _cast(item, dtype) for key, item in tree.items()}
    return tree


def _stand_ins(state: Any) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """What the two hooks of a state compute, besides talking to other processes."""
    policy = state._mp_policy
    enters = policy.param_dtype if policy.cast_forward_inputs else None
    leaves = policy.output_dtype

    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return (args, kwargs) if enters is None else (_cast(args, enters), _cast(kwargs, enters))

    def after(module: nn.Module, args: Any, output: Any) -> Any:
        return output if leaves is None else _cast(output, leaves)

    return before, after


def _hook_numbers(state: Any) -> set[int]:
    handles = (state._pre_forward_hook_handle, state._post_forward_hook_handle)
    return {int(one.id) for handle in handles for one in getattr(handle, "handles", (handle,))}


@contextmanager
def opened(states: Sequence[Any]) -> Iterator[frozenset[Any]]:
    """Modules as Dynamo can see them: with whole parameters, without memory, and hooks that only cast.

    Nothing may be executed inside, and nothing is sent. Every rank may do this alone (torch 2.11, 2.13).

    Yields:
        The functions that stand in for hooks.
    """
    replaced: list[tuple[Any, int, Any]] = []
    stand_ins: set[Any] = set()
    groups = sharded_groups(states)
    try:
        for state in states:
            ours = _hook_numbers(state)
            before, after = _stand_ins(state)
            stand_ins |= {before, after}
            for module in state._modules:
                for table, stand_in in ((module._forward_pre_hooks, before), (module._forward_hooks, after)):
                    for number in ours & set(table):
                        replaced.append((table, number, table[number]))
                        table[number] = stand_in
        for group in groups:
            for p in group.fsdp_params:
                p._unsharded_param.requires_grad_(p.sharded_param.requires_grad)
                p._setattr_on_modules(p._unsharded_param)
        yield frozenset(stand_ins)
    finally:
        for group in groups:
            for p in group.fsdp_params:
                p._setattr_on_modules(p.sharded_param)
        for table, number, hook in replaced:
            table[number] = hook
