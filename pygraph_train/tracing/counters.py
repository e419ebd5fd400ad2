"""Counters in a traced function (`self.n += 1`): numbers that change in every run, and that no tensor depends on.

Dynamo makes the number an input of the graph, and the new number (`self.n + 1`) a result. A captured graph holds one
value of each number, so every run would need another graph. Python computes the new number from the present one.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from pygraph_train.torch_private.dispatch import OpOverload, symbols_of
from pygraph_train.torch_private.dynamo import module_of_copy

__all__ = [
    "Counters",
    "baked_numbers",
    "counters",
    "numbers_that_are_no_sizes",
    "varying_counters",
    "without_counters",
]

_Number = (torch.SymInt, torch.SymFloat, torch.SymBool, int, float)


@dataclass(frozen=True)
class Counters:
    """The counters of one graph.

    Args:
        inputs: places of the counters among the graph's inputs.
        results: places of the new numbers among the graph's outputs.
        read: places of all inputs that the new numbers are computed from.
        compute: takes the inputs at `read`, and returns the outputs at `results`.
    """

    inputs: tuple[int, ...]
    results: tuple[int, ...]
    read: tuple[int, ...]
    compute: Callable[..., tuple[Any, ...]]


def counters(gm: fx.GraphModule) -> Counters | None:
    """The counters of a graph, None where it has none. The graph stays as it is.

    Args:
        gm: from AOTAutograd, or from Dynamo.
    """
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    numbers = [node for node in placeholders if isinstance(_value(node), torch.SymInt)]
    if not numbers:
        return None
    computed = set(numbers)
    for node in gm.graph.nodes:
        if _is_computed(node) and computed.issuperset(node.all_input_nodes):
            computed.add(node)
    free = _alone(gm, computed)
    inputs = [node for node in numbers if node in free]
    if not inputs:
        return None
    varying = set(inputs)
    for node in gm.graph.nodes:
        if node in computed and varying.intersection(node.all_input_nodes):
            varying.add(node)
    outputs: Any = gm.graph.output_node().args[0]
    results = tuple(i for i, node in enumerate(outputs) if node in varying)
    compute = _function(gm, numbers, [outputs[i] for i in results])
    places = {node: i for i, node in enumerate(placeholders)}
    return Counters(tuple(places[n] for n in inputs), results, tuple(places[n] for n in numbers), compute)


def varying_counters(gm: fx.GraphModule) -> Counters | None:
    """`counters`, but None where tracing has made constants of all of them, which Dynamo guards."""
    found = counters(gm)
    if found is None or found.results:
        return found
    placeholders = [node for node in gm.graph.nodes if node.op == "placeholder"]
    return found if symbols_of(_value(placeholders[i]) for i in found.inputs) else None


def baked_numbers(gm: fx.GraphModule) -> tuple[int, ...]:
    """Places of inputs that are numbers, are no sizes, and decide about tensors: a captured graph has one of each."""
    found = counters(gm)
    free = () if found is None else found.inputs
    return tuple(i for i in numbers_that_are_no_sizes(gm) if i not in free)


def numbers_that_are_no_sizes(gm: fx.GraphModule) -> tuple[int, ...]:
    """Places of inputs that are numbers, and no sizes or strides of the graph's tensor inputs."""
    inputs = [node for node in gm.graph.nodes if node.op == "placeholder"]
    numbers = [i for i, node in enumerate(inputs) if isinstance(_value(node), torch.SymInt)]
    if not numbers:
        return ()
    sizes = symbols_of(_value(node) for node in inputs if isinstance(_value(node), torch.Tensor))
    return tuple(i for i in numbers if not symbols_of([_value(inputs[i])]) & sizes)


def _alone(gm: fx.GraphModule, computed: set[fx.Node]) -> set[fx.Node]:
    """Those nodes of `computed` that nothing uses but such nodes and the graph's output."""
    output = gm.graph.output_node()
    alone: set[fx.Node] = set()
    for node in reversed(gm.graph.nodes):
        if node in computed and all(user is output or user in alone for user in node.users):
            alone.add(node)
    while True:  # a kernel takes a number, such as a size, from any input that has its symbol
        others = symbols_of(x for node in gm.graph.nodes if node not in alone for x in _values(node))
        taken = {n for n in alone if n.op == "placeholder" and others & symbols_of([_value(n)])}
        if not taken:
            return alone
        alone -= taken


def _value(node: fx.Node) -> Any:
    return node.meta.get("val", node.meta.get("example_value"))


def _values(node: fx.Node) -> list[Any]:
    value = _value(node)
    values = value if isinstance(value, (list, tuple)) else [value]
    return [x for x in values if isinstance(x, (torch.Tensor, *_Number))]


def _is_computed(node: fx.Node) -> bool:
    """Whether a node is plain arithmetic, which gives the same in Python whenever it is done."""
    if node.op != "call_function" or isinstance(node.target, OpOverload):
        return False
    known = getattr(operator, getattr(node.target, "__name__", ""), None) is node.target
    known = known or getattr(math, getattr(node.target, "__name__", ""), None) is node.target
    return known and bool(node.all_input_nodes) and isinstance(_value(node), _Number)


def _function(gm: fx.GraphModule, numbers: list[fx.Node], results: list[fx.Node]) -> Callable[..., Any]:
    """A Python function of these numbers that returns these results."""
    needed, left = set(results), list(results)
    while left:
        read = [node for node in left.pop().all_input_nodes if node not in needed]
        needed.update(read)
        left += read
    graph = fx.Graph()
    copies = {node: graph.placeholder(node.name) for node in numbers}
    for node in gm.graph.nodes:
        if node in needed and node not in copies:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[node] for node in results))
    made: Callable[..., Any] = fx.GraphModule(torch.nn.Module(), graph).forward
    return made


def without_counters(gm: fx.GraphModule, found: Counters) -> fx.GraphModule:
    """A copy of a graph of Dynamo's without its counters: it takes and returns the other values, in the same order.

    Dynamo calls what is compiled with the inputs of its own graph, which stays as it is.
    """
    copies: dict[fx.Node, fx.Node] = {}
    graph = fx.Graph()
    values: Any = graph.graph_copy(gm.graph, copies)
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    graph.output(tuple(value for i, value in enumerate(values) if i not in found.results))
    counted = [placeholders[i] for i in found.inputs]
    for node in list(reversed(graph.nodes)):
        if not node.users and (node in counted or _is_computed(node)):
            graph.erase_node(node)
    return module_of_copy(gm, graph, copies)
