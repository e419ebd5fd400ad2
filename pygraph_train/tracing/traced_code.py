"""The function that Dynamo traces: it calls a step's function, and lets guards stand for what this returns."""

from __future__ import annotations

import dataclasses
import re
import types
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, device, dtype

from pygraph_train.torch_private.guards import guarded_expression

__all__ = [
    "appended",
    "fresh_code",
    "guard_constants",
    "held_weakly",
    "is_of_this_file",
    "known_later",
    "opened",
    "returning_appended",
    "settled",
]


def fresh_code() -> types.FunctionType:
    """A function with a code object of its own: Dynamo keeps its compiled variants per code object."""

    def traced_step(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = fn(*args, **kwargs)
        guard_constants(result)
        return result

    return types.FunctionType(traced_step.__code__.replace(co_name="traced_step"), globals())


def guard_constants(tree: Any) -> None:
    """Inside a traced function: let a guard stand for each Python number, string, ... of `tree`.

    Dynamo sets none for a value that is only passed through, and a replay would return the old one.
    """
    if known_later(tree):
        return
    if isinstance(tree, (str, bytes)):
        settled(tree)
        if tree:  # any use of the value will do
            return
    elif isinstance(tree, (bool, int, float, complex)):
        settled(tree)
        if tree == tree:  # a use of the value, and also of one on the device that Dynamo knows nothing of
            return
    elif isinstance(tree, (list, tuple)):
        for item in tree:
            guard_constants(item)
    elif isinstance(tree, Mapping):
        for item in tree.values():
            guard_constants(item)
    # the next line would ask the classes of these for an attribute, which Dynamo of torch 2.11 does not trace
    elif tree is None or isinstance(tree, LEAVES):
        return
    elif dataclasses.is_dataclass(tree):
        for field in dataclasses.fields(tree):
            guard_constants(getattr(tree, field.name))
    else:
        for item in opened(tree):
            guard_constants(item)


LEAVES = (Tensor, dtype, device, type, types.FunctionType, types.BuiltinFunctionType)
"""Guards of names of this file are not kept where the names begin with a letter."""


def returning_appended() -> types.FunctionType:
    """As `fresh_code`, and what the function has appended to lists comes back beside its result."""

    def traced_step(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = fn(*args, **kwargs)
        guard_constants(result)
        return result, appended()

    return types.FunctionType(traced_step.__code__.replace(co_name="traced_step"), globals())


def settled(number: object) -> None:
    """Inside a traced function: let a guard stand for a number that is an input of the graph."""


def known_later(number: object) -> bool:
    """Inside a traced function: whether a number is computed of tensors when the graph has run."""
    return False


def appended() -> tuple[tuple[Any, Any], ...]:
    """At the end of a traced function: what it has appended to lists that it does not look at, each with its list."""
    return ()


def opened(tree: object) -> tuple[Any, ...]:
    """Inside a traced function: what an object holds that the function has made, see `returned_objects`."""
    return ()


def held_weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """A bound method for Dynamo's caches, which outlive the object and must not keep it."""
    weak = weakref.WeakMethod(method)

    def call(*args: Any, **kwargs: Any) -> Any:
        alive = weak()
        assert alive is not None
        return alive(*args, **kwargs)

    return call


def is_of_this_file(guard: Any) -> bool:
    """Whether it stands for a name that `guard_constants` uses, and the user's code cannot see."""
    found = _GLOBAL.match(guarded_expression(guard))
    return found is not None and found[1] in globals()


_GLOBAL = re.compile(r"G\['([^\W_]\w*)'\]")
"""A global of the traced function, whose names are those of this file; other modules come as `__import_...`."""
