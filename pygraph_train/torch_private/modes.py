"""Modes of torch that graphs of Dynamo's enter and leave: gradients, autocast, switches of kernels. (2.11, 2.13)"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.amp import autocast_mode
from torch.nn import attention

from pygraph_train.torch_private.cudnn_flags import present_flags, put_back, set_flags
from pygraph_train.torch_private.names import private

__all__ = ["changes_autocast", "leaving_no_mode", "putting_modes_back"]

_ENTERS = (
    private("torch._C._set_grad_enabled"),
    private("torch.amp.autocast_mode._enter_autocast"),
    private("torch.nn.attention._sdpa_kernel"),
    set_flags,
)


def changes_autocast(node: torch.fx.Node) -> bool:
    """Whether a node of a graph of Dynamo's is the beginning or the end of a block with autocast. (2.11, 2.13)"""
    return node.target in (autocast_mode._enter_autocast, autocast_mode._exit_autocast)


def leaving_no_mode(graph: torch.fx.GraphModule, forward: Callable[..., Any]) -> Callable[..., Any]:
    """Run a graph so that all modes are as before where it raises.

    In the user's code a `with` statement leaves its mode then. In a graph the end of the block is one more call, which
    an error passes by: later steps would find gradients off, or would take casts of weights from autocast's cache.

    Args:
        graph: of Dynamo, with eager kernels.
        forward: runs it.
    """
    graphs = [module.graph for module in graph.modules() if isinstance(module, torch.fx.GraphModule)]
    entered = [node for each in graphs for node in each.nodes if node.target in _ENTERS]
    if not entered:
        return forward
    devices = {node.args[0] for node in entered if node.target is autocast_mode._enter_autocast}

    def run(*inputs: Any) -> Any:
        leave = putting_modes_back(devices)
        try:
            return forward(*inputs)
        except BaseException:
            leave()
            raise

    return run


def putting_modes_back(devices: set[str]) -> Callable[[], None]:
    """A function that puts all modes back to what they are now."""
    gradients, cache = torch.is_grad_enabled(), torch.is_autocast_cache_enabled()
    casts = [(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices]
    depth = _autocast_depth()
    kernels, order = attention._cur_sdpa_kernel_backends(), torch._C._get_sdp_priority_order()
    flags = present_flags()

    def leave() -> None:
        torch.set_grad_enabled(gradients)
        for device, enabled, dtype in casts:
            torch.set_autocast_enabled(device, enabled)
            torch.set_autocast_dtype(device, dtype)
        torch.set_autocast_cache_enabled(cache)
        while _autocast_depth() > depth:
            if torch.autocast_decrement_nesting() == 0:
                torch.clear_autocast_cache()
        attention._sdpa_kernel(kernels)
        torch._C._set_sdp_priority_order(order)
        put_back(flags)

    return leave


def _autocast_depth() -> int:
    """How many blocks with autocast this thread is in."""
    torch.autocast_increment_nesting()
    return torch.autocast_decrement_nesting()
