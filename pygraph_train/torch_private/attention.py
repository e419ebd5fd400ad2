"""Where the random state of attention with dropout lies: kernels read it on the host, and in captures on the device.

The memory-efficient kernels for CUDA return the seed and the offset of their dropout for the backward. Outside of a
capture these are tensors on the CPU, and a backward reads their values on the host; within one they lie on the device.
A backward that runs without a graph after a forward that ran from one would read memory of the device on the host.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

__all__ = ["keep_dropout_on_device"]

_FORWARDS = ("_scaled_dot_product_efficient_attention", "_efficient_attention_forward")
_BACKWARDS = ("_scaled_dot_product_efficient_attention_backward", "_efficient_attention_backward")
_STATE = ("philox_seed", "philox_offset")


def keep_dropout_on_device(graph: fx.Graph) -> None:
    """Let parts of a graph of aten operations hand seed and offset on as tensors of the device. (2.11, 2.13)

    Args:
        graph: is changed.
    """
    for node in list(graph.nodes):
        packet = getattr(node.target, "overloadpacket", None)
        name = getattr(packet, "__name__", "") if node.op == "call_function" else ""
        if name in _FORWARDS:
            _hand_on(graph, node)
        elif name in _BACKWARDS:
            _read(graph, node)


def _hand_on(graph: fx.Graph, node: fx.Node) -> None:
    places = [i for i, r in enumerate(node.target._schema.returns) if r.name in _STATE]  # type: ignore[union-attr]
    for got in list(node.users):
        if got.target.__name__ == "getitem" and got.args[1] in places:  # type: ignore[union-attr]
            with graph.inserting_after(got):
                moved = graph.call_function(_on_device, (got, node.args[0]))
            moved.meta.update(got.meta)
            got.replace_all_uses_with(moved, delete_user_cb=moved.__ne__)


def _read(graph: fx.Graph, node: fx.Node) -> None:
    places = [i for i, a in enumerate(node.target._schema.arguments) if a.name in _STATE]  # type: ignore[union-attr]
    for place in places:
        state: Any = node.args[place]
        with graph.inserting_before(node):
            read = graph.call_function(_where_it_is_read, (state,))
        read.meta.update(state.meta)
        node.update_arg(place, read)


def _on_device(state: Tensor, query: Tensor) -> Tensor:
    if state.device == query.device:
        return state
    return torch.full((), int(state), dtype=state.dtype, device=query.device)


def _where_it_is_read(state: Tensor) -> Tensor:
    if state.device.type == "cpu" or torch.cuda.is_current_stream_capturing():
        return state
    return state.cpu()
