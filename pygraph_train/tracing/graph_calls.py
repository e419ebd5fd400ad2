"""Calls in a graph of Dynamo's that is being made: what they call, and what they are like."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx

from pygraph_train.torch_private.dispatch import mode_of_fakes, no_fake_mode
from pygraph_train.torch_private.drawn_numbers import CallResult
from pygraph_train.tracing.recompute import RandomDraws

__all__ = [
    "alike",
    "draws",
    "function_of",
    "is_apart",
    "is_write",
    "memory_of",
    "slots_in",
    "tensors_in",
    "zeros",
]


def draws(node: fx.Node, examples: Sequence[Tensor]) -> bool:
    """Whether an operation draws random numbers. Nothing is executed."""
    with mode_of_fakes(examples), RandomDraws() as mode, torch.no_grad():
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), without_gradient)
        function_of(node)(*args, **kwargs)
    return mode.seen


def function_of(node: fx.Node) -> Callable[..., Any]:
    """What a call in a graph calls."""
    if node.op == "call_method":
        return getattr(Tensor, str(node.target), None) or operator.methodcaller(str(node.target))
    return node.target  # type: ignore[return-value]


def slots_in(tree: Any) -> set[int]:
    """Places of results among the arguments of a call."""
    if isinstance(tree, CallResult):
        return {tree.place}
    if isinstance(tree, (tuple, list)):
        return set().union(*map(slots_in, tree))
    if isinstance(tree, Mapping):
        return set().union(*map(slots_in, tree.values()))
    if isinstance(tree, slice):
        return slots_in((tree.start, tree.stop, tree.step))
    return set()


def is_write(fn: Callable[..., Any]) -> bool:
    """Whether a function of torch changes its first argument, as far as its name says."""
    name = getattr(fn, "__name__", "")
    if getattr(fn, "__module__", None) == "_operator":  # `and_` has its name because of the keyword
        return fn is operator.setitem or (name.startswith("i") and hasattr(operator, f"__{name[1:]}__"))
    return name.endswith("_") and not name.endswith("__")


def alike(value: Any, example: Any) -> bool:
    """Whether what was computed is of the kind that the graph has there."""
    if not isinstance(value, Tensor) or not isinstance(example, Tensor):
        return type(value) is type(example)
    return value.dtype == example.dtype and value.shape == example.shape


def tensors_in(values: Sequence[Any]) -> list[Tensor]:
    """Tensors among values, and in lists of these."""
    flat = [x for v in values for x in (v if isinstance(v, (tuple, list)) else [v])]
    return [x for x in flat if isinstance(x, Tensor)]


def memory_of(value: Any) -> Any:
    """Where a tensor lies; for anything else a value that nothing else has."""
    return value.untyped_storage().data_ptr() if isinstance(value, Tensor) else object()


def is_apart(value: Any, given: Sequence[Tensor]) -> bool:
    """Whether an array or a tensor has memory of its own, and not that of a tensor that a function was given."""
    if isinstance(value, Tensor):
        return memory_of(value) not in map(memory_of, given)
    of_host = [t.detach() for t in given if t.device.type == "cpu"]
    return not isinstance(value, np.ndarray) or not any(
        np.may_share_memory(value, t.numpy()) for t in of_host
    )


def without_gradient(node: fx.Node) -> Any:
    """A fake tensor in the place of a node; KeyError where Dynamo has no value for it."""
    example = node.meta["example_value"]
    return example.detach() if isinstance(example, Tensor) else example


def zeros(node: fx.Node) -> Any:
    """A real tensor like the one of a node: how many numbers are drawn does not depend on values."""
    like = node.meta["example_value"]
    if not isinstance(like, Tensor):
        return like
    with no_fake_mode():
        return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype).zero_()
