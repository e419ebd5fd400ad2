"""Python numbers that change from call to call, as inputs of a region's graph.

Dynamo hands numbers to a graph as symbols, and floats as 0-dim tensors on the CPU whose value the graph reads. Where a
number only meets float32 and float64 tensors in arithmetic, a 0-dim tensor stands for it that each replay reads anew.
Every other number is a constant of a recording.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from pygraph_train.core.passes import is_on_host, value_of

_SYMBOLS = (torch.SymInt, torch.SymFloat, torch.SymBool)
_EXACT: set[Any] = {operator.mul, operator.add, operator.sub, operator.imul, operator.iadd, operator.isub}
_EXACT |= {torch.mul, torch.add, torch.sub, "mul", "add", "sub"}
_DIVIDES: set[Any] = {operator.truediv, operator.itruediv, torch.div, torch.true_divide, "div", "true_divide"}


def _is_read(node: Node) -> bool:
    """Whether it reads a float that Dynamo handed over as a tensor."""
    if node.op != "call_method" or node.target != "item" or len(node.args) != 1:
        return False
    source = node.args[0]
    if not isinstance(source, Node):
        return False
    return source.op == "placeholder" and is_on_host(source) and value_of(source).dim() == 0


def _is_number(node: Node) -> bool:
    if not node.op.startswith("call"):
        return False
    return _is_read(node) or isinstance(value_of(node), _SYMBOLS) or node.target is torch.scalar_tensor


class Numbers:
    """A graph whose numbers are inputs.

    Args:
        gm: of Dynamo.

    Attributes:
        body: takes what `inputs` makes.
        any: whether some of them are no constants of a recording; without any there is nothing to do.
    """

    def __init__(self, gm: GraphModule) -> None:
        nodes = list(gm.graph.nodes)
        placeholders = [n for n in nodes if n.op == "placeholder"]
        read = {n.args[0] for n in nodes if _is_read(n)}
        self._read = [i for i, n in enumerate(placeholders) if n in read]
        roots: dict[Node, frozenset[Node]] = {}
        for n in nodes:
            if n in read or (n.op == "placeholder" and isinstance(value_of(n), _SYMBOLS)):
                roots[n] = frozenset([n])
            elif _is_number(n) and n.all_input_nodes and all(x in roots for x in n.all_input_nodes):
                roots[n] = frozenset().union(*(roots[x] for x in n.all_input_nodes))
        self.any = bool(roots)
        if not self.any:
            return
        outputs = list(nodes[-1].args[0])
        baked = {
            r
            for n in nodes[:-1]
            if n not in roots and not self._stands(n, roots)
            for x in n.all_input_nodes
            for r in roots.get(x, ())
        }
        graph, copy = Graph(), {}
        kept = [n for n in placeholders if n not in roots or n in baked]
        self._kept = [placeholders.index(n) for n in kept]
        for n in kept:
            copy[n] = graph.placeholder(n.name)
        calls = [n for n in nodes[:-1] if n.op != "placeholder"]
        takes = {
            n: self._kind_of_slot(n, roots)
            for n in calls
            if n not in roots and not all(roots.get(x, baked) <= baked for x in n.all_input_nodes)
        }
        self._slots = list(
            dict.fromkeys((x, *kind) for n, kind in takes.items() for x in n.args if x in roots)
        )
        slots = {key: graph.placeholder(f"number_{k}") for k, key in enumerate(self._slots)}
        for n in calls:
            if n in roots:
                if roots[n] <= baked:
                    copy[n] = (
                        copy[n.all_input_nodes[0]] if _is_read(n) else graph.node_copy(n, copy.__getitem__)
                    )
            elif n not in takes:
                copy[n] = graph.node_copy(n, copy.__getitem__)
            else:
                args = tuple(copy[x] if x not in roots else slots[(x, *takes[n])] for x in n.args)
                _, _, inverse = takes[n]
                op, target = ("call_function", torch.mul) if inverse else (n.op, n.target)
                copy[n] = graph.create_node(op, target, args)
        self._known = [i for i, n in enumerate(outputs) if n in roots]
        graph.output(tuple(copy.get(n, n) if isinstance(n, Node) else n for n in outputs if n not in roots))
        self.body = GraphModule(gm, graph)
        wanted = [key[0] for key in self._slots] + [outputs[i] for i in self._known]
        self.any = bool(wanted or self._read)
        self._computed = self._function(nodes, placeholders, roots, wanted)

    @staticmethod
    def _stands(node: Node, roots: dict[Node, frozenset[Node]]) -> bool:
        """Whether a 0-dim tensor may stand for the number that an operation takes, if it takes one."""
        if not any(x in roots for x in node.all_input_nodes):
            return True
        others = [x for x in node.all_input_nodes if x not in roots]
        exact = node.target in _EXACT or (node.target in _DIVIDES and node.args[0] in others)
        made = value_of(node)
        return (
            exact
            and len(node.args) == 2
            and not node.kwargs
            and len(others) == 1
            and isinstance(made, Tensor)
            and made.dtype in (torch.float32, torch.float64)
            and isinstance(value_of(others[0]), Tensor)
            and value_of(others[0]).dtype is made.dtype
        )

    @staticmethod
    def _kind_of_slot(
        node: Node, roots: dict[Node, frozenset[Node]]
    ) -> tuple[torch.dtype, torch.device, bool]:
        """Of the tensor for a number: dtype, device, and whether it holds the inverse, by which CUDA multiplies."""
        like = next(value_of(x) for x in node.all_input_nodes if x not in roots)
        return like.dtype, like.device, node.target in _DIVIDES and like.is_cuda

    @staticmethod
    def _function(
        nodes: Sequence[Node], placeholders: Sequence[Node], roots: dict[Node, Any], wanted: Sequence[Node]
    ) -> Callable[..., Sequence[Any]]:
        """Computes numbers from the inputs that are numbers."""
        graph, copy = Graph(), {}
        for n in placeholders:
            copy[n] = graph.placeholder(n.name)
        for n in nodes:
            if n in roots and n.op != "placeholder":
                copy[n] = copy[n.all_input_nodes[0]] if _is_read(n) else graph.node_copy(n, copy.__getitem__)
        graph.output(tuple(copy[n] for n in wanted))
        graph.eliminate_dead_code()
        made: Callable[..., Sequence[Any]] = GraphModule(torch.nn.Module(), graph).forward
        return made

    def inputs(self, given: Sequence[Any]) -> tuple[list[Any], Sequence[Any]]:
        """The inputs of `body`, and the numbers among the outputs."""
        values = list(given)
        for i in self._read:
            values[i] = values[i].item()
        computed = self._computed(*values)
        numbers = [_in_tensor(key, v) for key, v in zip(self._slots, computed, strict=False)]
        return [values[i] for i in self._kept] + numbers, computed[len(self._slots) :]

    def outputs(self, made: Sequence[Any], numbers: Sequence[Any]) -> list[Any]:
        """The outputs of the graph: those of `body`, and the numbers."""
        result = list(made)
        for position, number in zip(self._known, numbers, strict=True):
            result.insert(position, number)
        return result


def _in_tensor(key: tuple[Node, torch.dtype, torch.device, bool], value: Any) -> Tensor:
    _, dtype, device, inverse = key
    if inverse:  # as the kernel that divides by a number of the host does it
        value = torch.tensor(float(value), dtype=dtype, device="cpu").reciprocal().item()
    return torch.full((), value, dtype=dtype, device=device)
