"""Private APIs of `fully_shard` (FSDP2): its states, its hooks, and parameters in their two forms."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

__all__ = [
    "at_rest",
    "flags",
    "forget_iteration",
    "gathered_parameters",
    "has_started",
    "is_last_backward",
    "local_tensor",
    "mesh_of",
    "obstacles_of",
    "opened",
    "owners_of_unreduced",
    "sharded_by_gathered",
    "sharded_groups",
    "sharded_states",
    "without_outside_events",
    "wrapped_by_fsdp1",
]


def local_tensor(tensor: Tensor) -> Tensor:
    """The part of a DTensor that this process holds; any other tensor itself (torch 2.11, 2.13)."""
    part: Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


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


def mesh_of(group: Any) -> tuple[Any, bool, bool]:
    """Where the parameters of a group are spread (torch 2.11, 2.13).

    Returns:
        The process group among which they are sharded, None where they are replicas; whether they are replicated, too;
        whether they were spread before (by tensor parallelism).
    """
    info = group.mesh_info
    spread = any(getattr(p, "is_dtensor", False) for p in group.fsdp_params)
    shard = getattr(info, "shard_process_group", None)
    return shard, getattr(info, "replicate_process_group", None) is not None, spread


def obstacles_of(group: Any) -> list[str]:
    """What a group does in Python or on the CPU that no graph can hold (torch 2.11, 2.13)."""
    found = []
    if type(group.offload_policy).__name__ != "OffloadPolicy":
        found.append(type(group.offload_policy).__name__)
    if group._all_reduce_hook is not None:
        found.append("an all-reduce hook")
    for comm, stock in (
        ("_all_gather_comm", "DefaultAllGather"),
        ("_reduce_scatter_comm", "DefaultReduceScatter"),
    ):
        if (name := type(getattr(group, comm)).__name__) != stock:
            found.append(name)
    if any(hasattr(p._sharded_local_tensor, "fsdp_pre_all_gather") for p in group.fsdp_params):
        found.append("parameters with fsdp_pre_all_gather")
    return found


def has_started(groups: Sequence[Any]) -> bool:
    """Whether a step has gathered all parameters once (torch 2.11, 2.13)."""
    return all(hasattr(p, "_unsharded_param") for group in groups for p in group.fsdp_params)


def at_rest(groups: Sequence[Any]) -> bool:
    """Whether all parameters are sharded, and no group is in a forward or backward (torch 2.11, 2.13)."""
    return all(group.is_sharded and group._training_state.name == "IDLE" for group in groups)


flags: Callable[[Any], tuple[bool, ...]] = operator.attrgetter(
    "reduce_grads", "all_reduce_grads", "reshard_after_backward"
)
"""What a loop may switch between micro-batches, of one group (torch 2.11, 2.13)."""


def is_last_backward(states: Sequence[Any]) -> bool:
    """Whether the next backward waits for all that it has begun (torch 2.11, 2.13)."""
    return all(state._state_ctx.is_last_backward for state in states)


def gathered_parameters(groups: Sequence[Any]) -> list[Tensor]:
    """The whole parameters that steps have gathered so far; they have memory during a step only (torch 2.11, 2.13)."""
    parameters = [p for group in groups for p in group.fsdp_params]
    return [p._unsharded_param for p in parameters if hasattr(p, "_unsharded_param")]


def sharded_by_gathered(groups: Sequence[Any]) -> dict[int, Tensor]:
    """The sharded parameters by the `id` of the whole ones that steps have gathered (torch 2.11, 2.13)."""
    parameters = [p for group in groups for p in group.fsdp_params]
    return {id(p._unsharded_param): p.sharded_param for p in parameters if hasattr(p, "_unsharded_param")}


class _InReduceType:
    """A gathered parameter, as the owner of the gradient that waits in the type in which it will be reduced."""

    __slots__ = ("_parameter",)

    def __init__(self, parameter: Any) -> None:
        self._parameter = parameter

    @property
    def grad(self) -> Tensor | None:
        """The gradient, None where there is none."""
        waiting: Tensor | None = self._parameter.unsharded_accumulated_grad
        return waiting

    @grad.setter
    def grad(self, gradient: Tensor | None) -> None:
        self._parameter.unsharded_accumulated_grad = gradient


def owners_of_unreduced(groups: Sequence[Any]) -> list[Any]:
    """What has, as `.grad`, the gradients of micro-batches that wait to be reduced. The same objects each time.

    Whole parameters have them, as soon as a step has gathered these; in the type of the reduction, where that is
    another one, attributes of FSDP do (torch 2.11, 2.13).
    """
    owners: list[Any] = []
    for p in (p for group in groups for p in group.fsdp_params):
        owners.append(p._unsharded_param)
        if p.reduce_dtype not in (None, p.param_dtype or p.orig_dtype):
            if not hasattr(p, "_pygraph_owner"):
                p._pygraph_owner = _InReduceType(p)
            owners.append(p._pygraph_owner)
    return owners


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


@contextmanager
def without_outside_events(states: Sequence[Any]) -> Iterator[None]:
    """Gathering waits for the present stream, and not for an event of the user's: a capture cannot wait for one.

    The event is there again afterwards (torch 2.11, 2.13).
    """
    contexts = {id(state._state_ctx): state._state_ctx for state in states}.values()
    before = [context.post_optim_event for context in contexts]
    for context in contexts:
        context.post_optim_event = None
    try:
        yield
    finally:
        for context, event in zip(contexts, before, strict=True):
            context.post_optim_event = event


def forget_iteration(states: Sequence[Any]) -> None:
    """Let a capture leave nothing behind: all is sharded and idle, and no event of the capture is waited for.

    `FSDPModule._reset_iter_state` of torch 2.13 does the same after real work, and waits (torch 2.11, 2.13).
    """
    idle = None
    for state in states:
        idle = type(state._training_state).IDLE
        state._training_state = idle
        getattr(state, "_modules_to_run_forward", set()).clear()
        context, comm = state._state_ctx, state._comm_ctx
        context.iter_forward_root = None
        context.post_backward_final_callback_queued = False
        comm.all_gather_state = None
        comm.post_forward_order.clear()
        for name in ("reduce_scatter_states", "_last_post_reduce_events"):
            if hasattr(comm, name):
                getattr(comm, name).clear()
        if hasattr(comm, "reduce_scatter_state"):
            comm.reduce_scatter_state = None
    for group in sharded_groups(states):
        group._all_gather_result = group._post_reduce_event = group._reshard_after_forward_event = None
        group._partial_reduce_output = None
        group._all_reduce_state = None
        group._post_forward_indices.clear()
        group._training_state = idle
        if not group.is_sharded:
            group._to_sharded()
