"""Backwards of which some gradients are not there, computed as autograd does: without them, and not with zeros.

What nothing was made of has no gradient. Autograd leaves it out where it adds gradients up; only where an operation
has given several results (a tensor that was split) it takes zeros for the parts that have none. AOTAutograd has zeros
in all of these places. Added to another gradient they turn -0.0 into 0.0, and zero times infinity is NaN.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import fx

from pygraph_train.problems import Problem, user_line_in
from pygraph_train.regions.passes.draft import copy_module
from pygraph_train.regions.unfit import Unfit
from pygraph_train.torch_private.dispatch import has_symbols

__all__ = ["Backwards", "refuse_mixtures", "sources_in"]

Kernels = Callable[[list[Any]], Any]

_JOINS = (torch.ops.aten.cat.default, torch.ops.aten.stack.default)
_MOST = 8
"""Combinations of gradients that kernels are kept for."""


def sources_in(graph: fx.Graph) -> dict[fx.Node, frozenset[int]]:
    """By value, the gradients of results that it is computed from."""
    found: dict[fx.Node, frozenset[int]] = {}
    count = 0
    for node in graph.nodes:
        if node.op == "placeholder" and node.name.startswith("tangents"):
            found[node] = frozenset([count])
            count += 1
        elif node.op != "output":
            found[node] = frozenset().union(*(found[read] for read in node.all_input_nodes))
    return found


def refuse_mixtures(graph: fx.Graph) -> None:
    """Look at the backward of a function, within the graph of both.

    Raises:
        Unfit: something is computed of several gradients, and nobody knows how without one of them.
    """
    sources = sources_in(graph)
    for node in graph.nodes:
        if node.op == "output" or len({sources[x] for x in node.all_input_nodes} - {frozenset()}) < 2:
            continue
        if not _adds(node) and not _joins(node):
            where = user_line_in(node.meta.get("stack_trace"))
            why = f"{node.target} computes a gradient of several, and some of them may not be there"
            raise Unfit(str(Problem(why, where)))


class Backwards:
    """The backward of one function for each combination of gradients that are there.

    Args:
        gm: computes it from all of them. It is changed: it computes it without those of `missing`.
        compile_kernels: compiles a graph.
        missing: gradients that are not there in most runs.
    """

    def __init__(
        self,
        gm: fx.GraphModule,
        compile_kernels: Callable[[fx.GraphModule, Sequence[Any]], Kernels],
        missing: Collection[int],
    ) -> None:
        self.missing = frozenset(missing)
        self._whole = copy_module(gm)
        self._compile = compile_kernels
        self._kernels: dict[frozenset[int], Kernels] = {}
        _leave_out(gm, self.missing)

    def others(self, missing: Collection[int]) -> Kernels | None:
        """What computes it without these gradients, None where that is what was compiled first."""
        key = frozenset(missing)
        if key == self.missing:
            return None
        if key not in self._kernels:
            while len(self._kernels) >= _MOST:
                del self._kernels[next(iter(self._kernels))]
            gm = copy_module(self._whole)
            _leave_out(gm, key)
            self._kernels[key] = self._compile(gm, ())
        return self._kernels[key]


def _adds(node: fx.Node) -> bool:
    """Whether autograd adds two gradients of one tensor here."""
    if node.target is not torch.ops.aten.add.Tensor or node.kwargs or len(node.args) != 2:
        return False
    values = [x.meta.get("val") for x in (node, *node.args) if isinstance(x, fx.Node)]
    # as text: comparing symbols could add guards
    looks = [(x.dtype, x.device, str(list(x.size()))) for x in values if isinstance(x, torch.Tensor)]
    return len(looks) == 3 and looks[0] == looks[1] == looks[2]


def _joins(node: fx.Node) -> bool:
    """Whether the gradients of what a tensor was split into are put together here."""
    values = [x.meta.get("val") for x in node.all_input_nodes]
    plain = all(isinstance(x, torch.Tensor) and not has_symbols([x]) for x in values)
    return node.target in _JOINS and plain


def _leave_out(gm: fx.GraphModule, missing: frozenset[int]) -> None:
    """Compute nothing of these gradients."""
    if not missing:
        return
    graph, sources = gm.graph, sources_in(gm.graph)
    gone, passed = dict[fx.Node, None](), []
    for node in list(graph.nodes):
        if node.op == "output":
            (outputs,) = node.args
            node.args = (tuple(None if x in gone else x for x in outputs),)
        elif sources[node] and sources[node] <= missing:
            gone[node] = None
        elif lost := [x for x in node.all_input_nodes if x in gone]:
            if _adds(node):
                (left,) = [x for x in node.all_input_nodes if x not in gone]
                node.replace_all_uses_with(left)
                passed.append(node)
                continue
            for x in lost:
                node.replace_input_with(x, _zeros_before(graph, node, x))
    for node in (*passed, *reversed(gone)):
        if node.op != "placeholder":
            graph.erase_node(node)
    graph.eliminate_dead_code()
    graph.lint()
    gm.recompile()


def _zeros_before(graph: fx.Graph, node: fx.Node, like: fx.Node) -> fx.Node:
    value = like.meta["val"]
    with graph.inserting_before(node):
        zeros = graph.call_function(
            torch.ops.aten.full.default,
            (list(value.size()), 0),
            {"dtype": value.dtype, "device": value.device, "pin_memory": False},
        )
    zeros.meta.update(val=value)
    return zeros
