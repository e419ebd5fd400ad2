"""Units of `fully_shard`: modules whose parameters are gathered together. Their hooks, parameters and communication."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pygraph_train.torch_private.names import private

tree_flatten: Callable[[Any], tuple[list[Any], Any]] = private("torch.utils._pytree.tree_flatten")
tree_unflatten: Callable[[Sequence[Any], Any], Any] = private("torch.utils._pytree.tree_unflatten")
"""Take nested tuples, lists and dicts apart, and put them together: Dynamo traces these. (2.11 to 2.15)"""

_SETTINGS = (
    "reduce_grads",
    "gradient_divide_factor",
    "force_sum_reduction_for_comms",
    "unshard_in_backward",
    "_all_reduce_hook",
    "_all_gather_comm",
    "_reduce_scatter_comm",
)
_STREAMS = "all_gather_copy_in_stream", "all_gather_stream", "reduce_scatter_stream", "all_reduce_stream"


class _Watched(dict[str, Any]):
    """The parameters of a module, the first read of which is told."""

    def __init__(self, held: dict[str, Any], read: Callable[[], object]) -> None:
        super().__init__(held)
        self._held, self._read = held, read

    def __getitem__(self, name: str) -> Any:
        self._read()  # which undoes `watch`
        return self._held[name]

    def items(self) -> Any:
        self._read()
        return self._held.items()


class Unit:
    """One of them, after its first forward. (2.11 to 2.15)

    Args:
        state: FSDP's.
        before: makes of its hook in front of the forward what stands in for it.
        after: as `before`, of the hook behind the forward.

    Attributes:
        groups: FSDP's groups of its parameters.
        parameters: FSDP's parameters.

    Raises:
        ValueError: hooks of several modules are one, or parameters were never gathered.
    """

    def __init__(self, state: Any, before: Callable[..., Any], after: Callable[..., Any]) -> None:
        self._state, (self._module,) = state, state._modules
        single = [g] if (g := getattr(state, "_fsdp_param_group", None)) is not None else []
        self.groups: list[Any] = getattr(state, "_fsdp_param_groups", single)  # from 2.13 on
        self.parameters = [p for group in self.groups for p in group.fsdp_params]
        if not all(hasattr(p, "_unsharded_param") for p in self.parameters):
            raise ValueError("parameters of FSDP were not gathered in the first forward")
        self._watched: list[tuple[nn.Module, dict[str, Any]]] = []
        hooks = (self._module._forward_pre_hooks, before), (self._module._forward_hooks, after)
        handles = state._pre_forward_hook_handle, state._post_forward_hook_handle
        self._hooks = [
            (held, h.id, stock := held[h.id], make(stock))
            for (held, make), h in zip(hooks, handles, strict=True)
        ]

    def stand_in(self) -> None:
        """Put the other hooks in place, and parameters as a whole that may have no memory. Hot path."""
        for held, number, _, own in self._hooks:
            held[number] = own
        for p in self.parameters:
            p._unsharded_param.requires_grad_(p.sharded_param.requires_grad)
            p._setattr_on_modules(p._unsharded_param)

    def step_back(self) -> None:
        """Undo `stand_in`. Hot path."""
        for held, number, stock, _ in self._hooks:
            held[number] = stock
        if all(group.is_sharded for group in self.groups):
            for p in self.parameters:
                p._setattr_on_modules(p.sharded_param)

    def gather(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """What FSDP's hook in front of the forward does, and makes of these arguments."""
        return self._state._pre_forward(self._module, tuple(tensors), {})[0]  # type: ignore[no-any-return]

    def leave(self, tensors: Sequence[Tensor]) -> Sequence[Tensor]:
        """What FSDP's hook behind the forward does, and makes of these results."""
        return self._state._post_forward(self._module, None, tuple(tensors))  # type: ignore[no-any-return]

    def watch(self) -> None:
        """Where FSDP keeps parameters whole after a forward: make them so before one is read. Hot path."""
        for group in self.groups:
            infos = [p._module_info for p in group.fsdp_params if group.post_forward_mesh_info is None]
            for part in {module for info in infos for module in (info.module, *info.shared_modules)}:
                held = part._parameters
                self._watched.append((part, held))
                part.__dict__["_parameters"] = _Watched(held, self._gather)

    def unwatch(self) -> None:
        """Undo `watch`. Hot path."""
        while self._watched:
            part, held = self._watched.pop()
            held.update(part._parameters)
            part.__dict__["_parameters"] = held

    def _gather(self) -> None:
        """Gather parameters until the next backward ends, in which autograd reduces their gradients."""
        self.unwatch()
        for group in self.groups:
            group.unshard()
            group.wait_for_unshard()

    @property
    def dtypes(self) -> tuple[torch.dtype | None, torch.dtype | None]:
        """What hooks cast floats to: those that the forward is given, and those that it returns."""
        policy = self._state._mp_policy
        return policy.param_dtype if policy.cast_forward_inputs else None, policy.output_dtype

    @property
    def streams(self) -> tuple[list[Any], Any]:
        """Those of its collectives, and the present one."""
        context = self._state._comm_ctx
        return [getattr(context, name) for name in _STREAMS], context.device_handle.current_stream()

    def reset(self) -> None:
        """After a forward or a backward that did not end: nothing is gathered, and nothing is awaited."""
        state, context, idle = self._state, self._state._comm_ctx, type(self._state._training_state).IDLE
        if hasattr(state, "_reset_iter_state"):  # from 2.13 on
            if state._is_root:
                state._reset_iter_state()
            return
        context.post_forward_order.clear()
        context.all_gather_state = context.reduce_scatter_state = None
        state._state_ctx.iter_forward_root = None
        state._state_ctx.post_backward_final_callback_queued = False
        state._training_state = idle
        for group in self.groups:
            group._training_state, group._all_gather_result, group._post_reduce_event = idle, None, None
            group._all_reduce_state = group._reshard_after_forward_event = None
            group._post_forward_indices.clear()
            group._to_sharded()


def settings_of(group: Any) -> tuple[Any, ...]:
    """What the user may change of FSDP's group, and a graph bakes in. Hot path. (2.11 to 2.15)"""
    return tuple([getattr(group, name, None) for name in _SETTINGS])


def is_idle(group: Any) -> bool:
    """Whether its parameters are neither gathered nor being gathered. Hot path. (2.11 to 2.15)"""
    return bool(group.is_sharded) and group._all_gather_result is None


def whole(parameter: Any) -> nn.Parameter:
    """FSDP's parameter as a whole, which has memory while it is gathered. (2.11 to 2.15)"""
    return parameter._unsharded_param  # type: ignore[no-any-return]


def kept_gradient(parameter: Any) -> Tensor | None:
    """The gradient that waits for a later backward, which reduces it. (2.11 to 2.15)"""
    total: Tensor | None = parameter.unsharded_accumulated_grad
    return whole(parameter).grad if total is None else total


def keep_gradient(parameter: Any, gradient: Tensor | None) -> None:
    """Have this one wait. (2.11 to 2.15)"""
    apart = "unsharded_accumulated_grad" in vars(parameter)  # not in 2.15
    other = apart and gradient is not None and gradient.dtype != whole(parameter).dtype
    whole(parameter).grad = None if other else gradient
    if apart:
        parameter.unsharded_accumulated_grad = gradient if other else None


def states_in(model: nn.Module) -> list[Any]:
    """FSDP's states of the units in a model. (2.11 to 2.15)"""
    found = (getattr(module, "_get_fsdp_state", None) for module in model.modules())
    return [state() for state in found if state is not None]
