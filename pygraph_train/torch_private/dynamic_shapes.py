"""Sizes of tensors and other integers that Dynamo keeps as symbols, so that one trace is for many."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from pygraph_train.torch_private.changes import Around

__all__ = [
    "depends_on_values",
    "is_settled",
    "is_size_of_tensor",
    "sizes_are_symbols",
    "source_of_size",
    "symbolic",
]

_MARKS = ("_dynamo_weak_dynamic_indices", "_has_dynamo_dim_marking")
"""What `maybe_mark_dynamic` leaves on a tensor; 2.11 has the first one only."""


@contextmanager
def sizes_are_symbols(marks: Sequence[tuple[Tensor, Iterable[int]]]) -> Iterator[None]:
    """Context: what Dynamo traces inside it is for any size of these dimensions. (2.11, 2.13)

    A size that the traced Python depends on gets a guard, and may become a constant. The marks are attributes of
    the tensors, and are taken off again.

    Args:
        marks: tensors, each with dimensions.
    """
    before = [
        (tensor, {name: getattr(tensor, name) for name in _MARKS if hasattr(tensor, name)})
        for tensor, _ in marks
    ]
    try:
        for (tensor, dims), (_, own) in zip(marks, before, strict=True):
            if _MARKS[0] in own:  # of the user's: it is the same set again afterwards
                setattr(tensor, _MARKS[0], set(own[_MARKS[0]]))
            torch._dynamo.maybe_mark_dynamic(tensor, list(dims))
        yield
    finally:
        for tensor, own in before:
            for name in _MARKS:
                if name in own:
                    setattr(tensor, name, own[name])
                elif hasattr(tensor, name):
                    delattr(tensor, name)


def is_size_of_tensor(node: torch.fx.Node) -> bool:
    """Whether an input of a graph of Dynamo's is a size of a tensor, or a stride. (2.11, 2.13)"""
    from torch._dynamo.source import TensorPropertySource

    grapharg = node.meta.get("grapharg")
    symbol = isinstance(node.meta.get("example_value"), torch.SymInt)
    return symbol and isinstance(getattr(grapharg, "source", None), TensorPropertySource)


def depends_on_values(made: Any) -> bool:
    """Whether a shape among these tensors of a trace is known only when values are (`nonzero`). (2.11, 2.13)"""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    return bool(free_unbacked_symbols(made))


def symbolic(wanted: Callable[[str], bool]) -> tuple[tuple[Any, str, Any], ...]:
    """Changes of Dynamo: integers that are read from these expressions are inputs of the graph. (2.11, 2.13)"""
    import torch._dynamo.variables.builder as builder
    from torch._dynamo.variables.lazy import LazyConstantVariable

    stock = builder.is_dynamic_source

    def is_dynamic_source(name: str, *dim: Any) -> bool:
        return wanted(name) or bool(stock(name, *dim))

    def around(create: Any) -> Any:
        def created(value: Any, source: Any, **options: Any) -> Any:
            made = create.__func__(value, source, **options)
            if type(value) is not int:
                return made
            name = source.name
            # otherwise Dynamo compares a number that it has not looked at as if it were a constant
            return made.realize() if wanted(name() if callable(name) else name) else made

        return staticmethod(created)

    return (
        (builder, "is_dynamic_source", is_dynamic_source),
        (LazyConstantVariable, "create", Around(around)),
    )


def is_settled(number: Any) -> bool:
    """Whether no guard may stand for a number, because it is on the device, or need stand for it. (2.11, 2.13)

    Each capture is for its sizes of tensors, so no guard is needed for a number that follows from sizes alone.
    """
    from torch._dynamo.source import TensorPropertySource

    symbols = getattr(number.node.expr, "free_symbols", ())
    known = number.node.shape_env.var_to_sources
    if not all(known.get(symbol) for symbol in symbols):  # read from a tensor
        return True
    return bool(symbols) and all(
        any(isinstance(source, TensorPropertySource) for source in known[symbol]) for symbol in symbols
    )


def source_of_size(number: Any) -> Any:
    """Dynamo's source of a number that is a size of a tensor; None for another one. (2.11, 2.13)"""
    from torch._dynamo.source import TensorProperty, TensorPropertySource

    symbol = getattr(number.node, "expr", None)
    for source in number.node.shape_env.var_to_sources.get(symbol, ()):
        if isinstance(source, TensorPropertySource) and source.prop is TensorProperty.SIZE:
            return source
    return None
