"""Inputs of a region that share memory, where the region changes one of them.

AOTAutograd traces the inputs as they lie at the first call: which of them share memory, and which do not. What it makes
changes copies and brings the results back at the end, and no guard looks where the inputs of a later call lie. Where a
change would reach another input than in the trace (`model.b = model.a.view(6)` between two steps), the graph that
Dynamo has made runs by eager kernels: it computes the same wherever its inputs lie.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor, fx

from pygraph_train.boundary import not_needed
from pygraph_train.torch_private.dispatch import FakeTensor
from pygraph_train.torch_private.memory import storage_key
from pygraph_train.tracing.recompute import as_eager
from pygraph_train.tracing.writes import maybe_written

__all__ = ["plain_where_shared", "shared_otherwise"]


def shared_otherwise(graph: fx.GraphModule, inputs: Sequence[Any]) -> Callable[[Sequence[Any]], bool] | None:
    """Finds out whether what a graph changes reaches other inputs than these, at which it was traced.

    Args:
        graph: from Dynamo.
        inputs: its inputs in the trace.

    Returns:
        A function of the inputs of a call; None where the graph changes none, or has inputs without memory.
    """
    nodes = graph.graph.find_nodes(op="placeholder")
    changed = set(maybe_written(graph))
    tensors = [i for i, x in enumerate(inputs) if isinstance(x, Tensor)]
    written = [i for i in tensors if nodes[i] in changed]
    if not written or not all(_has_memory(inputs[i]) for i in tensors):
        return None
    owners = _owners(inputs, written)
    expected = {i: owners.get(_key(inputs[i])) for i in tensors}
    changes, last = frozenset(written), list[int]()
    pick: Callable[[Sequence[Any]], Sequence[Any]] = itemgetter(*tensors, tensors[0])  # two or more: a tuple

    def differs(given: Sequence[Any]) -> bool:
        nonlocal last, owners
        now = list(map(Tensor.data_ptr, pick(given)))
        if now == last:
            return False
        places = (
            [i for i, old, new in zip(tensors, last, now, strict=False) if old != new] if last else tensors
        )
        if not last or any(i in changes for i in places):
            owners, places = _owners(given, written), tensors
        if any(owners.get(_key(given[i])) != expected[i] for i in places):
            last = []
            return True
        last = now
        return False

    return differs


def plain_where_shared(
    graph: fx.GraphModule, inputs: Sequence[Any], compiling: Callable[[], Callable[..., Any]]
) -> Callable[..., Any]:
    """What `compiling()` returns, but for calls whose inputs share memory in another way than in the trace."""
    differs = shared_otherwise(graph, inputs)
    if differs is None:
        return compiling()
    plain, compiled = as_eager(_copied(graph)), compiling()  # which may change the graph

    def run(*args: Any) -> Any:
        try:
            shared = differs(args)
        except Exception as error:
            not_needed(error)
            shared = True
        return plain(*args) if shared else compiled(*args)

    return run


def _has_memory(x: Tensor) -> bool:
    return type(x) in (Tensor, torch.nn.Parameter, FakeTensor) and x.layout is torch.strided


def _key(x: Tensor) -> int:
    return storage_key(x.untyped_storage())


def _owners(inputs: Sequence[Any], written: Sequence[int]) -> dict[int, int]:
    """The first of the inputs that are written, by the memory in which it lies."""
    return {_key(inputs[i]): i for i in reversed(written)}


def _copied(graph: fx.GraphModule) -> fx.GraphModule:
    copied = fx.GraphModule(graph, copy.deepcopy(graph.graph))
    for node in copied.graph.nodes:
        node.meta.clear()  # what the compiler knows would live as long as the copy
    for name, child in graph.named_children():
        if isinstance(child, fx.GraphModule):
            setattr(copied, name, _copied(child))
    return copied
