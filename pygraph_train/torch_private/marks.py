"""A place in a traced function: what of Dynamo's graph comes behind it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from pygraph_train.torch_private.changes import Around

__all__ = ["gradients_are_set", "marking", "uses_behind_mark"]

_KNOWN = "_pygraph_train_known_at_mark"


def marking(mark: Callable[[], None]) -> tuple[tuple[Any, str, Any], ...]:
    """A change of Dynamo: where the frame calls `mark`, there is a mark. (2.11, 2.13)"""
    from torch._dynamo.variables.builder import VariableBuilder

    def around(stock: Callable[..., Any]) -> Callable[..., Any]:
        def wrap(self: Any, value: Any) -> Any:
            return _marker()(source=self.source) if value is mark else stock(self, value)

        return wrap

    return ((VariableBuilder, "_wrap", Around(around)),)


@functools.cache
def _marker() -> Any:
    from torch._dynamo.variables.base import VariableTracker
    from torch._dynamo.variables.constant import ConstantVariable

    class Marker(VariableTracker):
        """The function that marks."""

        def call_function(self, tx: Any, args: Any, kwargs: Any) -> Any:
            tx.output.__dict__.setdefault(_KNOWN, {node.name for node in tx.output.graph.nodes})
            return ConstantVariable.create(None)

    return Marker


def uses_behind_mark(graph: fx.GraphModule) -> list[fx.Node] | None:
    """Operations behind the first mark that use parameters, or memory of theirs; call inside a backend.

    Returns:
        None where the frame has no mark.
    """
    known = _output().__dict__.get(_KNOWN)
    if known is None:
        return None
    nodes = list(graph.graph.nodes)
    given = [n for n in nodes if n.op in ("placeholder", "get_attr") and _is_trained(_example(n))]
    memory = {_memory(_example(n)) for n in given}
    behind = [n for n in nodes if n.op not in ("placeholder", "get_attr", "output") and n.name not in known]
    return [n for n in behind if any(_memory(_example(x)) in memory for x in n.all_input_nodes)]


def gradients_are_set() -> bool:
    """Whether the frame being compiled sets the gradient of a tensor; call inside a backend. (2.11, 2.13)"""
    return any("grad" in names for names in _output().side_effects.store_attr_mutations.values())


def _output() -> Any:
    from torch._dynamo.symbolic_convert import InstructionTranslator

    return InstructionTranslator.current_tx().output


def _example(node: fx.Node) -> Any:
    return node.meta.get("example_value")


def _is_trained(value: Any) -> bool:
    return isinstance(value, Tensor) and (value.requires_grad or isinstance(value, torch.nn.Parameter))


def _memory(value: Any) -> int | None:
    """Of a tensor; of anything else None, which no parameter has."""
    if not isinstance(value, Tensor):
        return None
    try:
        return value.untyped_storage()._cdata
    except NotImplementedError:  # sparse ones
        return id(value)
