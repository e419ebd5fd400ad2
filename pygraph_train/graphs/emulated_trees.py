"""The arguments of recorded operations: their tensors, their aliases and their numbers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch

from pygraph_train.graphs.engine import NumberSlot

__all__ = ["aliases", "leaves_of", "number_slots", "poison", "tensors_of"]


def leaves_of(tree: Any) -> Iterator[Any]:
    if isinstance(tree, (list, tuple)):
        for item in tree:
            yield from leaves_of(item)
    elif isinstance(tree, dict):
        yield from leaves_of(list(tree.values()))
    else:
        yield tree


def tensors_of(tree: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in leaves_of(tree) if isinstance(leaf, torch.Tensor))


def aliases(tree: Any) -> Any:
    """The same tree with other tensor objects on the same memory.

    `.data`, because it shares neither the autograd graph (which would be kept alive, and whose leaf
    gradients are only adopted, not copied, while nobody else holds them) nor the version counter
    (replays write memory behind autograd's back, as CUDA graphs do).
    """
    if isinstance(tree, (list, tuple)):
        return type(tree)(aliases(item) for item in tree)
    if isinstance(tree, dict):
        return {key: aliases(value) for key, value in tree.items()}
    return tree.data if isinstance(tree, torch.Tensor) else tree


def poison(storage: torch.UntypedStorage, dtype: torch.dtype) -> None:
    """NaN in floating-point memory, a huge number in integer memory, nothing in booleans."""
    if dtype is torch.bool or not storage.nbytes():
        return
    # All ones is NaN in every IEEE-like format; 0x7f7f... is large in every integer one, never an index.
    byte = 0xFF if dtype.is_floating_point or dtype.is_complex else 0x7F
    torch.empty(0, dtype=torch.uint8).set_(storage).fill_(byte)


class _HasArguments(Protocol):
    args: Any
    kwargs: dict[str, Any]


class _Slot:
    """A number in a list or a dict of arguments."""

    __slots__ = ("_container", "_key")

    def __init__(self, container: Any, key: Any) -> None:
        self._container = container
        self._key = key

    def write(self, value: float) -> None:
        """See `engine.NumberSlot`."""
        self._container[self._key] = value


def number_slots(operations: Sequence[_HasArguments], value: float) -> list[NumberSlot]:
    """Every argument of these operations that is exactly this number."""
    slots: list[NumberSlot] = []
    for operation in operations:
        if any(
            type(leaf) is float and leaf == value for leaf in leaves_of((operation.args, operation.kwargs))
        ):
            operation.args, operation.kwargs = _writable(operation.args), _writable(operation.kwargs)
            slots += _slots_in(operation.args, value)
            slots += _slots_in(operation.kwargs, value)
    return slots


def _writable(tree: Any) -> Any:
    """The same tree with lists in the place of tuples. Those that are lists or dicts stay the same objects."""
    if isinstance(tree, tuple):
        return [_writable(item) for item in tree]
    entries = enumerate(tree) if isinstance(tree, list) else tree.items() if isinstance(tree, dict) else ()
    for key, item in list(entries):
        tree[key] = _writable(item)
    return tree


def _slots_in(tree: Any, value: float) -> Iterator[NumberSlot]:
    entries = enumerate(tree) if isinstance(tree, list) else tree.items() if isinstance(tree, dict) else ()
    for key, item in entries:
        if type(item) is float and item == value:
            yield _Slot(tree, key)
        else:
            yield from _slots_in(item, value)
