"""Numbers for calls that are made ahead of a step: the same number for calls that return the same in one step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pygraph_train.torch_private.drawn_numbers import CallResult

__all__ = ["hashable", "key_of"]


_keys: dict[Any, int] = {}


def key_of(call: Any) -> int:
    """The same number for the same call with what follows from the same tensors."""
    return _keys.setdefault(call, len(_keys))


def hashable(tree: Any, keys: Mapping[int, int]) -> Any:
    """Arguments with keys in the place of slots, where equal ones are the same ones.

    Raises:
        TypeError: one has no hash.
    """
    if isinstance(tree, CallResult):
        return "slot", keys[tree.place]
    if isinstance(tree, (tuple, list)):
        return type(tree), *[hashable(x, keys) for x in tree]
    if isinstance(tree, Mapping):
        return dict, *[(name, hashable(x, keys)) for name, x in sorted(tree.items())]
    if isinstance(tree, slice):
        return slice, hashable((tree.start, tree.stop, tree.step), keys)
    hash(tree)
    return type(tree), repr(tree) if type(tree) in (float, complex) else tree  # 0.0 == -0.0
