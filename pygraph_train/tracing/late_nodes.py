"""What of a graph of Dynamo's reads numbers of tensors, or computes with nothing but such."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from pygraph_train.torch_private.dispatch import bounds_bool

__all__ = ["LateNodes", "is_late", "nothing_depends_on_numbers", "value_of"]


@dataclass(frozen=True)
class LateNodes:
    """Nodes of a graph: those that read a value of a tensor, and all that computes with nothing but such."""

    reads: list[fx.Node]
    numbers: dict[fx.Node, None]

    @classmethod
    def of(cls, gm: fx.GraphModule) -> LateNodes:
        found = cls([], {})
        for node in gm.graph.nodes:
            if _reads(node):
                found.reads.append(node)
                found.numbers[node] = None
            elif (
                _computes(node)
                and node.all_input_nodes
                and all(x in found.numbers for x in node.all_input_nodes)
            ):
                found.numbers[node] = None
        return found

    def function(
        self, gm: fx.GraphModule, wanted: list[fx.Node], reads: list[fx.Node]
    ) -> Callable[..., tuple[Any, ...]]:
        """Takes the tensors that are read, and returns these numbers."""
        graph = fx.Graph()
        given = {node: graph.placeholder(node.name) for node in reads}
        copies: dict[fx.Node, fx.Node] = {}
        for node in gm.graph.nodes:
            if node in given:
                copies[node] = graph.call_method("item", (given[node],))
            elif (
                node in self.numbers
                and all(x in copies for x in node.all_input_nodes)
                and node not in self.reads
            ):
                copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output(tuple(copies[node] for node in wanted))
        graph.eliminate_dead_code()
        return fx.GraphModule(gm, graph).forward


def nothing_depends_on_numbers(gm: fx.GraphModule) -> bool:
    """Whether the numbers that a graph reads, if any, are for its results alone."""
    found = LateNodes.of(gm)
    if any(node.args[0] in found.numbers for node in found.reads):  # of a tensor that is made of a number
        return False
    allowed = {*found.numbers, gm.graph.output_node()}
    return all(allowed.issuperset(node.users) for node in found.numbers)


def is_late(node: fx.Node) -> bool:
    """Whether a node of Dynamo's graph reads a number of a tensor, or computes with nothing but such numbers."""
    left, seen = [node], set[fx.Node]()
    while left:
        each = left.pop()
        if each in seen or _reads(each):
            continue
        if not (_computes(each) and each.all_input_nodes):
            return False
        seen.add(each)
        left += each.all_input_nodes
    return True


def _reads(node: fx.Node) -> bool:
    return node.op == "call_method" and node.target == "item" and len(node.args) == 1


def _computes(node: fx.Node) -> bool:
    """Whether a node gives the same whenever it is done on the host, and raises nothing: the step is made by then."""
    if node.op != "call_function" or node.kwargs.keys() - {"dtype"}:
        return False
    if node.target in _ALWAYS or bounds_bool(node):
        return True
    if node.target in _DIVISIONS:
        divisor = node.args[1]
        return isinstance(divisor, int | float) and divisor != 0
    if node.target is torch.sym_int:  # there is none of what is not finite
        return all(isinstance(value_of(x), torch.SymInt) for x in node.all_input_nodes)
    # without a dtype it is of the user
    return node.target is torch.scalar_tensor and node.kwargs.get("dtype") is torch.float64


_ALWAYS = (
    *(operator.add, operator.sub, operator.mul, operator.neg, operator.pos, operator.abs),
    *(operator.iadd, operator.isub, operator.imul, torch.sym_float, torch.sym_ite, torch.sym_not),
    *(operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge),
)
_DIVISIONS = (operator.truediv, operator.floordiv, operator.mod)


def value_of(node: fx.Node) -> Any:
    """The number of Dynamo's for which a node stands."""
    return node.meta.get("example_value")
