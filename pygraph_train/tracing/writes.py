"""What the operations of a graph of Dynamo's may write to, as their schemas say.

Dynamo's own tensors count what is changed in place, but not in lists (`torch._foreach_mul_`), and an operator of
somebody else need not count anything. Who has to know all of it asks here: what is not known counts as written.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from pygraph_train.torch_private.counted_scatter import counted_scatter
from pygraph_train.torch_private.ctc_loss import ctc_loss
from pygraph_train.torch_private.dispatch import FakeTensor, HigherOrderOperator, written_by_schema
from pygraph_train.torch_private.host_backwards import backward_in_gap
from pygraph_train.torch_private.memory import storage_key, tensor_version
from pygraph_train.tracing.graph_calls import function_of, is_write, tensors_in

__all__ = ["NORMALISATIONS", "maybe_written", "memory_in_trace", "statistics_written", "written_arguments"]

_OF_TORCH = ("torch", "_operator", "builtins", "math")
"""Packages whose functions count what they change."""


_FUNCTIONAL = "torch.nn.functional"

_OF_FUNCTIONAL = ((1, "running_mean"), (2, "running_var"))
_OF_OPERATORS = ((3, "running_mean"), (4, "running_var"))
_STATISTICS: dict[str, dict[bool, tuple[tuple[int | None, str], ...]]] = {
    "batch_norm": {True: _OF_FUNCTIONAL, False: _OF_OPERATORS},
    "instance_norm": {True: _OF_FUNCTIONAL, False: _OF_OPERATORS},
    "native_batch_norm": {False: _OF_OPERATORS},
    "cudnn_batch_norm": {False: _OF_OPERATORS},
    "miopen_batch_norm": {False: _OF_OPERATORS},
}
"""What normalisation writes, and neither counts nor has in its schema: in `torch.nn.functional`, and elsewhere."""

NORMALISATIONS = frozenset(_STATISTICS)
"""Names of functions that write their statistics, and nothing else."""


def maybe_written(graph: fx.GraphModule) -> list[fx.Node]:
    """The inputs of a graph that it may write to, through another name of their memory as well."""
    written: set[int] = set()
    reached: set[fx.Node] = set()
    for node in graph.graph.nodes:
        targets = written_arguments(node)
        if any(map(tensor_version, tensors_in([node.meta.get("example_value")]))):
            targets = [*targets, node]
        for target in targets:
            memory = memory_in_trace(target)
            written |= memory
            if not memory:  # it may lie anywhere
                reached |= _origins(target)
    inputs = graph.graph.find_nodes(op="placeholder")
    return [x for x in inputs if x in reached or not written.isdisjoint(memory_in_trace(x))]


def statistics_written(graph: fx.GraphModule) -> list[fx.Node]:
    """The inputs of a graph in whose memory normalisations write their statistics, which nothing counts."""
    written: set[int] = set()
    for node in graph.graph.nodes:
        if getattr(function_of(node), "__name__", "") in NORMALISATIONS:
            written = written.union(*map(memory_in_trace, written_arguments(node)))
    inputs = graph.graph.find_nodes(op="placeholder")
    return [x for x in inputs if not written.isdisjoint(memory_in_trace(x))]


def memory_in_trace(node: fx.Node) -> set[int]:
    """Where tensors of a node lie in the trace. Nowhere, where the trace does not say it of one of them."""
    tensors = tensors_in([node.meta.get("example_value")])
    if any(type(x) is not FakeTensor or x.layout is not torch.strided for x in tensors):
        return set()
    return {storage_key(x.untyped_storage()) for x in tensors}


def _origins(node: fx.Node) -> set[fx.Node]:
    found, waiting = {node}, [node]
    while waiting:
        further = [x for x in waiting.pop().all_input_nodes if x not in found]
        found.update(further)
        waiting += further
    return found


def written_arguments(node: fx.Node) -> list[fx.Node]:
    """The arguments that an operation may write to."""
    if node.op == "call_module":
        return node.all_input_nodes
    if node.op not in ("call_function", "call_method"):
        return []
    fn = function_of(node)
    if isinstance(fn, HigherOrderOperator):
        return _written_within(node)
    if fn in (counted_scatter, ctc_loss, backward_in_gap):
        return []
    found: list[fx.Node] = []
    names = _STATISTICS.get(getattr(fn, "__name__", ""), {}).get(
        getattr(fn, "__module__", None) == _FUNCTIONAL
    )
    names = written_by_schema(fn) if names is None else names
    if names is not None:
        for place, name in names:
            fx.node.map_arg(node.kwargs.get(name), found.append)
            if place is not None and place < len(node.args):
                fx.node.map_arg(node.args[place], found.append)
        return found
    if not _is_of_torch(node, fn):
        return node.all_input_nodes
    if is_write(fn) or node.kwargs.get("inplace"):
        fx.node.map_arg(node.args[:1], found.append)
    fx.node.map_arg(node.kwargs.get("out"), found.append)
    return found


def _written_within(node: fx.Node) -> list[fx.Node]:
    """The arguments that a higher-order operator may write to: all, unless its graphs say it of each."""
    bodies = list(_bodies(node))
    written = [maybe_written(body) for body in bodies]
    if bodies and not any(written):
        return []
    operands = [x for x in node.args if isinstance(x, fx.Node) and x.op != "get_attr"]
    inputs = bodies[0].graph.find_nodes(op="placeholder") if len(bodies) == 1 else []
    if len(inputs) != len(operands) or len(node.args) != len(operands) + 1:
        return node.all_input_nodes
    return [operand for operand, given in zip(operands, inputs, strict=True) if given in written[0]]


def _bodies(node: fx.Node) -> Iterator[fx.GraphModule]:
    owner = node.graph.owning_module
    for given in node.all_input_nodes:
        if given.op == "get_attr" and owner is not None:
            body = getattr(owner, str(given.target), None)
            if isinstance(body, fx.GraphModule):
                yield body


def _is_of_torch(node: fx.Node, fn: object) -> bool:
    if node.op == "call_method":
        return True
    module = getattr(fn, "__module__", None) or "torch"  # functions in C have none
    return module.partition(".")[0] in _OF_TORCH and not module.startswith(("torch._ops", "torch.ops"))
