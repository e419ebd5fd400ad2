"""Operations of a traced graph whose shapes, or whose kernels, the values of tensors decide: no CUDA graph holds them.

The host reads the values then, which fails while a stream captures. A failed capture costs memory and time, and the
error of a backward does not say which line it is about.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, fx

from pygraph_train.problems import Problem
from pygraph_train.torch_private.dynamic_shapes import depends_on_values
from pygraph_train.torch_private.dynamo import example_of
from pygraph_train.torch_private.selections import is_number_of_host
from pygraph_train.tracing.reasons import line_of, shape_of_values

__all__ = ["decided_by_values"]


def decided_by_values(graph: fx.GraphModule, constants: frozenset[fx.Node]) -> Iterator[Problem]:
    """Each such operation of a graph, and of those that it holds (checkpoints and the like).

    Args:
        graph: from Dynamo.
        constants: nodes whose values are the same in each step.
    """
    for module in graph.modules():
        for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
            if node in constants or node.op not in ("call_function", "call_method"):
                continue
            if _is_decided(node):
                yield shape_of_values(line_of(node))
            elif _backward_reads(node):
                yield _of_backward(node)


def _is_decided(node: fx.Node) -> bool:
    return _has_shape_of_values(node) or _writes_where_mask_is(node) or _backward_selects(node)


def _has_shape_of_values(node: fx.Node) -> bool:
    made = node.meta.get("example_value")
    return isinstance(made, (Tensor, tuple, list)) and depends_on_values(made)


def _writes_where_mask_is(node: fx.Node) -> bool:
    """`x[mask] = y` looks for the places of the mask first, but is a masked fill where `y` is a number of the host."""
    if node.target is operator.setitem or (_name(node) in ("index_put", "index_put_") and len(node.args) > 2):
        index, value = node.args[1:3]
    else:
        return False
    masks = [i for i in (index if isinstance(index, (tuple, list)) else (index,)) if _is_mask(i)]
    return len(masks) > 1 or (bool(masks) and not is_number_of_host(example_of(value)))


def _backward_selects(node: fx.Node) -> bool:
    """`x.masked_scatter(mask, source)`: the gradients of the source are selected with the mask."""
    if _name(node) not in ("masked_scatter", "masked_scatter_") or len(node.args) < 3:
        return False
    made, source = node.meta.get("example_value"), example_of(node.args[2])
    return all(isinstance(x, Tensor) and x.requires_grad for x in (made, source))


def _is_mask(index: Any) -> bool:
    example = example_of(index)
    return isinstance(example, Tensor) and example.dtype in (torch.bool, torch.uint8)


def _backward_reads(node: fx.Node) -> bool:
    """Whether autograd looks for zeros in the input, to choose the formula of its backward."""
    if _name(node) not in _LOOK_FOR_ZEROS or not node.args:
        return False
    made, given = node.meta.get("example_value"), example_of(node.args[0])
    return isinstance(made, Tensor) and made.requires_grad and isinstance(given, Tensor) and given.dim() > 0


_LOOK_FOR_ZEROS = {
    "cumprod": "torch.cumsum of the logarithms, and torch.exp of the result",
    "cumprod_": "torch.cumsum of the logarithms, and torch.exp of the result",
    "prod": "torch.sum of the logarithms, and torch.exp of the result; or write the product of a few factors out",
}
"""Operations, and what does without (in torch 2.11 and 2.13)."""


def _of_backward(node: fx.Node) -> Problem:
    return Problem(
        f"the backward of torch.{_name(node).rstrip('_')} looks on the host whether its input holds a zero, and this "
        "waits for the device",
        line_of(node),
        f"Where no factor can be zero or negative, use {_LOOK_FOR_ZEROS[_name(node)]}",
    )


def _name(node: fx.Node) -> str:
    return node.target if isinstance(node.target, str) else str(getattr(node.target, "__name__", ""))
