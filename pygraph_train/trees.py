"""Arguments and results as trees: what is done to each of their leaves."""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Iterator, Mapping, MutableSequence, Sequence
from typing import Any

from torch import Tensor

_LEAVES = (Tensor, str, bytes, bytearray, range)


def map_leaves(fn: Callable[[Any], Any], tree: Any) -> Any:
    """A copy of `tree` with `fn` applied to each leaf.

    Mappings (also dict-like classes such as transformers' BatchEncoding), sequences, namedtuples and dataclass
    instances are containers. Everything else, strings included, is a leaf.

    Raises:
        TypeError: a container of another library, of which a shallow copy might share its contents.
    """
    kind = type(tree)
    if isinstance(tree, _LEAVES):
        return fn(tree)
    if kind is dict:
        return {name: map_leaves(fn, value) for name, value in tree.items()}
    if isinstance(tree, Mapping):
        if not isinstance(tree, (dict, UserDict)):
            raise TypeError(
                f"{kind.__name__} is a mapping of an unknown class, and pygraph-train cannot build another one"
            )
        other: Any = copy.copy(tree)
        for name, value in tree.items():
            other[name] = map_leaves(fn, value)
        return other
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return kind(*[map_leaves(fn, value) for value in tree])
    if isinstance(tree, MutableSequence) and kind is not list:
        other = copy.copy(tree)  # the most items of a deque, attributes of a class of the user's
        for k, value in enumerate(tree):
            other[k] = map_leaves(fn, value)
        return other
    if isinstance(tree, Sequence):
        return kind([map_leaves(fn, value) for value in tree])  # type: ignore[call-arg]
    if _is_dataclass(tree):
        other = copy.copy(tree)
        for field in dataclasses.fields(tree):
            # frozen dataclasses refuse plain assignment
            object.__setattr__(other, field.name, map_leaves(fn, getattr(tree, field.name)))
        return other
    return fn(tree)


def leaves_of(tree: Any) -> Iterator[Any]:
    """The leaves of a tree: see `map_leaves`."""
    if isinstance(tree, _LEAVES):
        yield tree
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from leaves_of(value)
    elif isinstance(tree, Sequence):
        for value in tree:
            yield from leaves_of(value)
    elif _is_dataclass(tree):
        for field in dataclasses.fields(tree):
            yield from leaves_of(getattr(tree, field.name))
    else:
        yield tree


def tensors_in(tree: Any) -> list[Tensor]:
    """The leaves of a tree that are tensors."""
    return [leaf for leaf in leaves_of(tree) if isinstance(leaf, Tensor)]


def detached_results(result: Any) -> Any:
    """What a step has returned, with its tensors detached."""
    if type(result) is Tensor:
        return result.detach()
    try:
        return map_leaves(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, result)
    except TypeError:  # a container that only its author can rebuild
        return result


def _is_dataclass(tree: Any) -> bool:
    return dataclasses.is_dataclass(tree) and not isinstance(tree, type)
