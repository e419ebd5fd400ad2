"""Numbers that only numbers are computed from, such as a counter in a forward: each run has another one.

Dynamo makes such a number an input of the graph, and what the function leaves in Python (`self.n + 1`) a result. A
captured graph stands for one value of each of its numbers. A region gets the same one in all its runs where no
tensor depends on it, and Python computes the results from the present one, as the user's code would have done.
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

__all__ = ["Counters", "Counting", "baked_numbers", "counters", "numbers_that_are_no_sizes"]

_Number = (torch.SymInt, torch.SymFloat, torch.SymBool, int, float)


@dataclass(frozen=True)
class Counters:
    """What a graph computes from numbers alone.

    Args:
        inputs: numbers that no tensor depends on.
        results: outputs that are computed from such numbers.
        read: inputs that they are computed from.
        compute: computes them from these.
    """

    inputs: tuple[int, ...]
    results: tuple[int, ...]
    read: tuple[int, ...]
    compute: Callable[..., tuple[Any, ...]]


def counters(gm: fx.GraphModule) -> Counters | None:
    """Look for numbers that no tensor depends on, None where there are none. `gm` itself is not changed.

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


def baked_numbers(gm: fx.GraphModule) -> tuple[int, ...]:
    """Inputs that are numbers and no sizes, and that tensors depend on: a captured graph has one value of each."""
    found = counters(gm)
    free = () if found is None else found.inputs
    return tuple(i for i in numbers_that_are_no_sizes(gm) if i not in free)


def numbers_that_are_no_sizes(gm: fx.GraphModule) -> tuple[int, ...]:
    """Inputs that are numbers, and no sizes or strides of its other inputs."""
    inputs = [node for node in gm.graph.nodes if node.op == "placeholder"]
    numbers = [i for i, node in enumerate(inputs) if isinstance(_value(node), torch.SymInt)]
    if not numbers:
        return ()
    sizes = symbols_of(_value(node) for node in inputs if isinstance(_value(node), torch.Tensor))
    return tuple(i for i in numbers if not symbols_of([_value(inputs[i])]) & sizes)


def _alone(gm: fx.GraphModule, computed: set[fx.Node]) -> set[fx.Node]:
    """What of this, which is computed from numbers alone, leads to nothing else."""
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


class Counting:
    """A region whose results that are numbers come from Python.

    Args:
        region: in the boxed convention; its runs get the numbers of the first one.
        counters: of its graph.
    """

    def __init__(self, region: Callable[[list[Any]], Any], counters: Counters) -> None:
        self._boxed_call = True
        self._region = region
        self._inputs = counters.inputs
        self._results = counters.results
        self._read = counters.read
        self._compute = counters.compute
        self._first: list[Any] | None = None

    def __call__(self, inputs: list[Any]) -> list[Any]:
        """Run the region once; the list is emptied."""
        results = self._compute(*[inputs[i] for i in self._read])
        if self._first is None:
            self._first = [inputs[i] for i in self._inputs]
        for i, number in zip(self._inputs, self._first, strict=True):
            inputs[i] = number
        outputs = list(self._region(inputs))
        for i, number in zip(self._results, results, strict=True):
            outputs[i] = number
        return outputs
