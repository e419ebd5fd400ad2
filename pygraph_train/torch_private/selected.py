"""`x[:, places[i]]`, where `places` are on the device: nobody waits for the number. (2.11, 2.13)

torch reads an index without dimensions on the host, and makes a view. Here the column is copied by the index where it
is. That gives the same bits where the index comes from `topk` or a sort of no more elements, where nothing but a stack
of columns has the result, and where nobody writes to the tensor.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx

from pygraph_train.torch_private.dynamo import example_of
from pygraph_train.torch_private.memory import tensor_version

__all__ = ["let_select", "selected", "unfit_selections"]

_SELECTED = "column that is selected"
_OF_PLACES = {torch.topk: 1, torch.sort: 1, torch.argsort: None, "topk": 1, "sort": 1, "argsort": None}
"""Functions and names of methods that give places in a dimension: which of their results, None for the only one."""
_COPIES = (torch.stack, torch.cat, torch.concat)


def selected(x: Tensor, place: Tensor, dim: int) -> Tensor:
    """A copy of `x.select(dim, int(place))`, for a place from zero on."""
    made: Tensor = _Select.apply(x, place, dim)  # type: ignore[no-untyped-call]
    return made


class _Select(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, place: Tensor, dim: int) -> Tensor:
        places = place.reshape(1).clone()  # the step may change them before the backward
        ctx.save_for_backward(places)
        ctx.dim, ctx.shape = dim, x.shape
        return x.index_select(dim, places).squeeze(dim)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        (places,) = ctx.saved_tensors
        return grad.new_zeros(ctx.shape).index_copy(ctx.dim, places, grad.unsqueeze(ctx.dim)), None, None


def let_select(node: fx.Node, allowed: Callable[[], str | None]) -> None:
    """Let a node that takes a column by a place on the device be `selected`, before anybody knows what it is like.

    Args:
        allowed: where that is in the step; None where the step has to read the place itself.
    """
    if node.target is not operator.getitem or len(node.args) != 2 or "example_value" in node.meta:
        return
    x, index = node.args
    parts = index if isinstance(index, tuple) else (index,)
    dims = [k for k, part in enumerate(parts) if isinstance(part, fx.Node)]
    example = example_of(x)
    if len(dims) != 1 or not isinstance(x, fx.Node) or not isinstance(example, Tensor):
        return
    (dim,) = dims
    whole = all(k == dim or part == slice(None) for k, part in enumerate(parts))
    if not whole or not dim < example.dim() <= 3 or len(parts) > example.dim() or not example.numel():
        return
    place: Any = parts[dim]
    if not _is_place(place, example, dim) or (where := allowed()) is None:
        return
    node.op, node.target, node.args = "call_function", selected, (x, place, dim)
    node.meta[_SELECTED] = where, tensor_version(example)


def unfit_selections(graph: fx.Graph) -> Iterator[str]:
    """At the end of a trace: where columns are taken for something else than to be joined, or are written to later."""
    for node in graph.nodes:
        if _SELECTED in node.meta:
            where, version = node.meta[_SELECTED]
            joined = all(user.target in _COPIES and user.op == "call_function" for user in node.users)
            if not joined or tensor_version(example_of(node.args[0])) != version:
                yield where


def _is_place(node: Any, x: Tensor, dim: int) -> bool:
    """Whether a node is a number on the device of a tensor, and a place in a dimension of it."""
    example, size = example_of(node), x.shape[dim]
    if not isinstance(example, Tensor) or example.dim() or example.dtype != torch.int64:
        return False
    if example.device != x.device:
        return False
    result: Any = None
    while isinstance(node, fx.Node):
        if isinstance(example_of(node), Tensor) and tensor_version(example_of(node)):
            return False  # it was changed
        if node.target in _OF_PLACES:
            given = example_of(node.args[0]) if node.args else None
            fits = isinstance(given, Tensor) and max(given.shape, default=1) <= size
            return fits and (_OF_PLACES[node.target] is None or result == 1)
        if node.target is not operator.getitem or not _is_number(node.args[1]):
            return False
        node, result = node.args[0], node.args[1]
    return False


def _is_number(index: Any) -> bool:
    return type(index) is int or (isinstance(index, tuple) and all(type(i) is int for i in index))
