"""Gradients that are not there: what no differentiated output depends on keeps `grad` None, as in plain PyTorch.

A compiled backward computes the gradients of all inputs from the gradients of all outputs. AOTAutograd puts zeros for
those of outputs that nothing was made of (the head of another task, an auxiliary loss), and gets zeros for the
parameters behind them. An optimizer tells zero from None: with zeros, decay and momentum move a parameter.

Where eager kernels run, nothing is added to a gradient that is there either, see `partial`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from pygraph_train.boundary import BACKWARD, surely
from pygraph_train.regions.lazy_bits import without_lazy_bits
from pygraph_train.regions.partial import Backwards, Kernels, sources_in
from pygraph_train.torch_private.aot import (
    BuildRegion,
    CompileKernels,
    TracedGraph,
    compiled_function,
    compiled_function_of,
    saved_and_checked,
    tangent_places,
)
from pygraph_train.torch_private.autograd import autograd_is_traced, backward_keeps_graph
from pygraph_train.torch_private.dynamo import leave_to_python, untraced
from pygraph_train.torch_private.memory import storage_key

if TYPE_CHECKING:
    from pygraph_train.regions.pair import Pair

__all__ = [
    "Absent",
    "Backward",
    "has_several_gradients",
    "memory_behind",
    "noting",
    "versions",
    "what_changed",
    "with_absent",
]


_NONE: frozenset[int] = frozenset()


def has_several_gradients(gm: fx.GraphModule) -> bool:
    """Whether more than one result of a Dynamo graph can be differentiated."""
    (outputs,) = gm.graph.output_node().args
    values = [x.meta.get("example_value") for x in outputs if isinstance(x, fx.Node)]  # type: ignore[union-attr]
    return sum(isinstance(x, torch.Tensor) and x.requires_grad for x in values) > 1


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
        backwards: where eager kernels run, for each combination of gradients; None where there is nothing to choose.
    """

    def __init__(self) -> None:
        self.backwards: Backwards | None = None
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
        depends = sources_in(gm.graph)
        outputs: Any = gm.graph.output_node().args[0]
        self._count = sum(x.op == "placeholder" and bool(sources) for x, sources in depends.items())
        self.sources = tuple(depends.get(x, frozenset()) for x in outputs)
        self._without.clear()

    def choose_backwards(
        self, gm: fx.GraphModule, compile_kernels: Callable[[fx.GraphModule, Sequence[Any]], Kernels]
    ) -> None:
        """Let the backward compute no gradients of what is missing in the run that it is compiled for."""
        self.learn_backward(gm)
        missing = frozenset(getattr(self._now, "missing", ()))
        if self._count > 1:
            none = len(missing) == self._count  # such a run needs no backward
            self.backwards = Backwards(gm, compile_kernels, () if none else missing)

    def others(self, missing: Collection[int]) -> Kernels | None:
        """What runs in the place of the backward's region, where these gradients are not there."""
        return None if self.backwards is None else self.backwards.others(missing)

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
        """Note, when the backward of this call comes, which gradients it gets. It gets none with lazy bits."""
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

    def _note(self, gradients: Sequence[Any]) -> tuple[Any, ...] | None:
        assert self._places is not None
        missing, lazy = [], False
        for i, place in enumerate(self._places):
            if (gradient := gradients[place]) is None:
                missing.append(i)
            elif gradient.is_neg() or (gradient.dtype.is_complex and gradient.is_conj()):
                lazy = True
        self._now.missing = missing
        return without_lazy_bits(gradients) if lazy else None

    def take(self) -> tuple[list[int], frozenset[int]]:
        """Which gradients the backward that runs now in this thread did not get, and `without` them."""
        missing: list[int] = getattr(self._now, "missing", [])
        gone = self.without(missing) if missing else _NONE
        self._now.missing = []
        return missing, gone


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
        run_others: runs other kernels in its place.
    """

    def __init__(
        self,
        compiled: Callable[[list[Any]], Any],
        absent: Absent,
        run_others: Callable[[Kernels, list[Any]], Any] = lambda kernels, inputs: kernels(inputs),
    ) -> None:
        self._boxed_call = True
        self._compiled = compiled
        self._absent = absent
        self._run_others = run_others

    def __call__(self, inputs: list[Any]) -> Any:
        """Run the backward once; the list is emptied."""
        try:
            missing, gone = self._absent.take()
        except Exception:
            missing, gone = surely(self._absent.take, BACKWARD)
        if missing and len(gone) == len(self._absent.sources):
            inputs.clear()
            return [None] * len(gone)
        others = None if self._absent.backwards is None else self._absent.others(missing)
        outputs = self._compiled(inputs) if others is None else self._run_others(others, inputs)
        return [None if i in gone else x for i, x in enumerate(outputs)] if gone else outputs


def with_absent(build: BuildRegion, absent: Absent, exact: Pair | None = None) -> BuildRegion:
    """`build`, with backwards that return None where there is no gradient; those of `exact` compute nothing of it."""

    def learning(
        compile_kernels: CompileKernels,
        gm: torch.fx.GraphModule,
        example_inputs: Sequence[Any],
        traced: TracedGraph,
    ) -> Callable[[list[Any]], Any]:
        if traced.phase == "forward":
            absent.learn_forward()
            absent.saved = _returned_and_saved(gm, traced)
        if traced.phase != "backward":
            return build(compile_kernels, gm, example_inputs, traced)
        if exact is None:
            absent.learn_backward(gm)
            return Backward(build(compile_kernels, gm, example_inputs, traced), absent)
        absent.choose_backwards(gm, compile_kernels)
        return Backward(build(compile_kernels, gm, example_inputs, traced), absent, exact.run_others)

    return learning


def _returned_and_saved(gm: torch.fx.GraphModule, traced: TracedGraph) -> tuple[int, ...]:
    """Which results lie in memory that is saved for the backward."""
    outputs: Any = gm.graph.output_node().args[0]
    checked = saved_and_checked(gm)
    saved = {memory_behind(outputs[i]) for i in checked} - {None}
    results = outputs[traced.mutations : traced.saved_from]
    return tuple(i for i, node in enumerate(results) if memory_behind(node) in saved)


def memory_behind(node: Any) -> Any:
    """What tells whether two values of a graph share memory; None for what has none."""
    value = node.meta.get("val") if isinstance(node, torch.fx.Node) else None
    return storage_key(value.untyped_storage()) if isinstance(value, torch.Tensor) else None
