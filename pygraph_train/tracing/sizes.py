"""Sizes that a step computes with tensors on the host: they are numbers of the graph."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from pygraph_train.torch_private.dispatch import no_autocast, no_fake_mode
from pygraph_train.tracing.chains import chain_of
from pygraph_train.tracing.graph_calls import function_of

__all__ = ["make_sizes_numbers"]

_TAKES_SIZES = {
    *("view", "reshape", "expand", "repeat", "as_strided", "narrow", "unfold"),
    *("new_zeros", "new_ones", "new_empty", "new_full"),
}


def make_sizes_numbers(graph: fx.GraphModule) -> None:
    """Let methods that take sizes get numbers, where they get tensors that hold the same number in each step.

    As `x.view(torch.div(16, 4, rounding_mode="trunc"), -1)`: the host reads the tensor in each step.

    Args:
        graph: of Dynamo, is changed.
    """
    found = []
    for node in graph.graph.nodes:
        if node.op == "call_method" and node.target in _TAKES_SIZES:
            found += [(node, size) for size in node.all_input_nodes[1:] if _is_size(size)]
    values = {size: _number_of(size) for _, size in found}
    known = {size: value for size, value in values.items() if value is not None}
    if not known:
        return
    for node, size in found:
        if size in known:
            sizes, named = fx.node.map_arg((node.args[1:], node.kwargs), lambda x: known.get(x, x))
            node.args, node.kwargs = (node.args[0], *sizes), named
    for size in known:
        for x in reversed(chain_of(size) or ()):
            if not x.users:
                graph.graph.erase_node(x)
    graph.recompile()


def _is_size(node: fx.Node) -> bool:
    example = node.meta.get("example_value")
    if not isinstance(example, Tensor) or example.dim():
        return False
    return not example.is_floating_point() and example.dtype != torch.bool


def _number_of(node: fx.Node) -> int | None:
    """The number that a tensor holds in each step; None where it may be another one."""
    chain = chain_of(node)
    if chain is None or any(x.op == "placeholder" for x in chain):
        return None
    made: dict[fx.Node, Any] = {}
    with no_fake_mode(), no_autocast(), torch.no_grad():
        for x in chain:
            args, kwargs = fx.node.map_arg((x.args, x.kwargs), made.__getitem__)
            made[x] = function_of(x)(*args, **kwargs)
    return int(made[node])
