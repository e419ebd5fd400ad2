"""Gradients that are not there: what no differentiated output depends on keeps `grad` None, as in plain PyTorch.

A compiled backward computes the gradients of all inputs from the gradients of all outputs. AOTAutograd puts zeros for
those of outputs that nothing was made of (the head of another task, an auxiliary loss), and gets zeros for the
parameters behind them. An optimizer tells zero from None: with zeros, decay and momentum move a parameter.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import fx

from pygraph_train.torch_private.aot import compiled_function, compiled_function_of, tangent_places
from pygraph_train.torch_private.autograd import autograd_is_traced, backward_keeps_graph
from pygraph_train.torch_private.dynamo import leave_to_python, untraced

__all__ = ["Absent", "Backward", "noting", "versions", "what_changed"]


def versions(tensors: Sequence[torch.Tensor]) -> list[int]:
    """How often each was changed in place."""
    return [x._version for x in tensors]


def what_changed(tensors: Sequence[torch.Tensor], before: Sequence[int]) -> str:
    """What autograd says of tensors that it saved and somebody changed."""
    tensor, version = next((t, v) for t, v in zip(tensors, before, strict=True) if t._version != v)
    return (
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{tensor.type()} {list(tensor.size())}] is at version {tensor._version}; expected version {version} instead."
    )


class Absent:
    """What of one compiled function's gradients comes from what.

    Attributes:
        sources: by output of the backward, the gradients of outputs that it is computed from.
        saved: results of the function that its backward reads.
    """

    def __init__(self) -> None:
        self.sources: tuple[frozenset[int], ...] = ()
        self.saved: tuple[int, ...] = ()
        self._places: tuple[int, ...] | None = None
        self._count = 0  # of the gradients that the backward takes
        self._name: object = None
        self._kind: type | None = None  # of the function's node in autograd's graph
        self._now = threading.local()  # backwards of one function may run in several threads
        self._without: dict[frozenset[int], frozenset[int]] = {}

    def learn_forward(self) -> None:
        """Look at the forward that AOTAutograd compiles now."""
        leave_to_python(Absent._note)  # in each backward, where `untraced` would be one more call
        self._places = tangent_places()
        self._name = compiled_function()

    @property
    def learnt(self) -> bool:
        """Whether a forward was looked at."""
        return self._places is not None

    def learn_backward(self, gm: fx.GraphModule) -> None:
        """Look at the graph of the backward, before anything is rewritten."""
        depends: dict[fx.Node, frozenset[int]] = {}
        count = 0
        for node in gm.graph.nodes:
            if node.op == "placeholder" and node.name.startswith("tangents"):
                depends[node] = frozenset([count])
                count += 1
            elif node.op != "output":
                depends[node] = frozenset().union(*(depends[read] for read in node.all_input_nodes))
        outputs: Any = gm.graph.output_node().args[0]
        self._count = count
        self.sources = tuple(depends.get(x, frozenset()) for x in outputs)
        self._without.clear()

    def without(self, missing: Collection[int]) -> frozenset[int]:
        """Outputs of the backward that are None where these gradients of outputs are.

        What comes from none of them all (a derivative that is zero everywhere) stays, but where there are none.
        """
        key = frozenset(missing)
        if key not in self._without:
            everything = len(key) == self._count
            gone = [i for i, sources in enumerate(self.sources) if everything or (sources and sources <= key)]
            self._without[key] = frozenset(gone)
        return self._without[key]

    # --- where AOTAutograd's runtime is between autograd and the backward --------------------------------

    def look_at_backward_of(self, result: Any) -> None:
        """Note, when the backward of this call comes, which gradients it gets."""
        if self._places is None or not torch.is_grad_enabled() or autograd_is_traced():
            return
        node = self._node(result)
        if node is not None:
            node.register_prehook(self._note)
            if self.saved:
                node.register_prehook(_unchanged(_saved_results(result, self.saved)))

    def _node(self, result: Any) -> Any:
        """The function's node in autograd's graph: it made the results, or what they are views of."""
        results = result if isinstance(result, (tuple, list)) else [result]
        if self._kind is not None:  # known since an earlier call
            for x in results:
                if isinstance(x, torch.Tensor) and type(node := x.grad_fn) is self._kind:
                    return node
        left = [(x.grad_fn, 3) for x in results if isinstance(x, torch.Tensor) and x.grad_fn is not None]
        seen = set()
        while left:
            node, depth = left.pop()
            if node in seen:
                continue
            seen.add(node)
            if self._kind is None and compiled_function_of(node) == self._name:
                self._kind = type(node)
            if type(node) is self._kind:
                return node
            if depth:
                left += [(source, depth - 1) for source, _ in node.next_functions if source is not None]
        return None

    def _note(self, gradients: Sequence[Any]) -> None:
        assert self._places is not None
        missing = [i for i, place in enumerate(self._places) if gradients[place] is None]
        self._now.missing = missing

    def take(self) -> list[int]:
        """Which gradients the backward that runs now in this thread did not get."""
        missing: list[int] = getattr(self._now, "missing", [])
        self._now.missing = []
        return missing


def _saved_results(result: Any, saved: Sequence[int]) -> list[torch.Tensor]:
    """These results without their history, but with their versions."""
    results = result if isinstance(result, (tuple, list)) else [result]
    found = [results[i] for i in saved if i < len(results)]
    return [x.detach() for x in found if isinstance(x, torch.Tensor)]


def _unchanged(results: list[torch.Tensor]) -> Callable[[Any], None]:
    """Refuse a backward after somebody changed results that it reads: it may read copies, and not notice."""
    before = versions(results)

    @untraced
    def look(_: Any) -> None:
        if results and versions(results) != before:
            raise RuntimeError(what_changed(results, before))
        if not backward_keeps_graph():
            results.clear()

    return look


def noting(compiled: Callable[..., Any], absent: Absent) -> Callable[..., Any]:
    """A compiled function through AOTAutograd's runtime; what its backwards get is noted, if it has any.

    Args:
        compiled: the function.
        absent: gets what its backwards get.
    """
    if not absent.learnt:
        return compiled

    def run(*args: Any) -> Any:
        result = compiled(*args)
        absent.look_at_backward_of(result)
        return result

    return run


class Backward:
    """A backward in AOTAutograd's boxed convention that returns None for gradients that are not there.

    Args:
        compiled: computes all gradients.
        absent: knows which gradients it got.
    """

    def __init__(self, compiled: Callable[[list[Any]], Any], absent: Absent) -> None:
        self._boxed_call = True
        self._compiled = compiled
        self._absent = absent

    def __call__(self, inputs: list[Any]) -> Any:
        """Run the backward once; the list is emptied."""
        missing = self._absent.take()
        if not missing:
            return self._compiled(inputs)
        gone = self._absent.without(missing)
        if len(gone) == len(self._absent.sources):
            inputs.clear()
            return [None] * len(gone)
        return [None if i in gone else x for i, x in enumerate(self._compiled(inputs))]
