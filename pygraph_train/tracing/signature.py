"""Trees of arguments: flattened, rebuilt, and reduced to what a capture depends on."""

from __future__ import annotations

import copy
import dataclasses
from collections import UserDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, MutableSequence, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pygraph_train.tracing.opened import BATCHES, each_once, is_open, looks_into, met, rebuilt, standing_for

__all__ = [
    "ALIGNMENT",
    "ARGUMENTS",
    "Dims",
    "Key",
    "Sizes",
    "alignment",
    "batch_expressions",
    "copied",
    "family_of",
    "flatten",
    "flattened",
    "key_of",
    "leaf_paths",
    "map_leaves",
]

ALIGNMENT = 16
"""Bytes. The widest loads of CUDA kernels; allocators of torch give more."""

Key = tuple[Any, ...]
"""Hashable: equal keys mean equal structure, tensor metadata and types of the other leaves."""


Sizes = tuple[tuple[int, ...], ...]
"""Of each leaf; () where it is no tensor."""

_PLAIN = frozenset({bool, int, float, complex, str, bytes, type(None)})
"""Classes whose objects are leaves, which need no further look."""

Dims = Mapping[int, frozenset[int]]
"""Dimensions of leaves, by the position of the leaf."""


def flatten(tree: Any, leaves: list[Any], opens: Collection[type] = ()) -> Any:
    """Append the leaves of `tree` to `leaves`, depth first, and return its hashable structure.

    Mappings (also dict-like classes such as transformers' BatchEncoding), sequences, namedtuples and
    dataclass instances are containers, and objects of the classes `opens`. Everything else, strings included,
    is a leaf.
    """
    kind = type(tree)
    if kind is Tensor or kind in _PLAIN:
        leaves.append(tree)
        return None
    if kind is tuple or kind is list:
        return _flat([kind], tree, leaves, opens)
    if kind is dict or isinstance(tree, Mapping):
        return _flat([kind, tuple(tree)], tree.values(), leaves, opens)
    if isinstance(tree, Sequence) and not isinstance(tree, (str, bytes, bytearray, range)):
        return _flat([kind], tree, leaves, opens)
    if is_open(tree, opens):  # also a dataclass, with attributes that are no fields
        if (place := met(tree)) is not None:
            return kind, place
        with looks_into(tree) as attributes:
            named = dict(attributes)
            return _flat([kind, tuple(named)], named.values(), leaves, opens)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return _flat([kind], [getattr(tree, f.name) for f in dataclasses.fields(tree)], leaves, opens)
    leaves.append(tree)
    return None


def flattened(tree: Any) -> tuple[Any, list[Any]]:
    """The hashable structure of arguments, and their leaves: see `flatten`."""
    leaves: list[Any] = []
    if not BATCHES:
        return flatten(tree, leaves), leaves
    with each_once():
        return flatten(tree, leaves, BATCHES), leaves


def _flat(
    structure: list[Any], values: Iterable[Any], leaves: list[Any], opens: Collection[type]
) -> tuple[Any, ...]:
    """Hot path: most values are tensors."""
    for value in values:
        if type(value) is Tensor:
            leaves.append(value)
            structure.append(None)
        else:
            structure.append(flatten(value, leaves, opens))
    return tuple(structure)


def map_leaves(fn: Callable[[Any], Any], tree: Any, opens: Collection[type] = ()) -> Any:
    """A copy of `tree` with `fn` applied to each leaf, in `flatten`'s order.

    Raises:
        TypeError: a container of another library, of which a shallow copy might share its contents.
    """
    kind = type(tree)
    if kind is Tensor or kind in _PLAIN:
        return fn(tree)
    if kind is tuple or kind is list:
        return kind([map_leaves(fn, value, opens) for value in tree])
    if kind is dict:
        return {name: map_leaves(fn, value, opens) for name, value in tree.items()}
    if isinstance(tree, Mapping):
        if not isinstance(tree, (dict, UserDict)):
            raise TypeError(
                f"{kind.__name__} is a mapping of an unknown class, and pygraph-train cannot build another one"
            )
        other: Any = copy.copy(tree)
        for name, value in tree.items():
            other[name] = map_leaves(fn, value, opens)
        return other
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return kind(*[map_leaves(fn, value, opens) for value in tree])
    if isinstance(tree, MutableSequence) and kind is not list and not isinstance(tree, bytearray):
        other = copy.copy(tree)  # the most items of a deque, attributes of a class of the user's
        for k, value in enumerate(tree):
            other[k] = map_leaves(fn, value, opens)
        return other
    if isinstance(tree, Sequence) and not isinstance(tree, (str, bytes, bytearray, range)):
        return kind([map_leaves(fn, value, opens) for value in tree])  # type: ignore[call-arg]
    if is_open(tree, opens):
        return rebuilt(tree, lambda value: map_leaves(fn, value, opens))
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        other = copy.copy(tree)
        for field in dataclasses.fields(tree):
            # frozen dataclasses refuse plain assignment
            object.__setattr__(other, field.name, map_leaves(fn, getattr(tree, field.name), opens))
        return other
    return standing_for(tree, fn(tree))


def copied(fn: Callable[[Any], Any], tree: Any) -> Any:
    """A copy of arguments with `fn` applied to each leaf of `flattened`: see `map_leaves`."""
    with each_once():
        return map_leaves(fn, tree, BATCHES)


def key_of(structure: Any, leaves: Sequence[Any]) -> Key:
    """What a capture depends on besides the guards of its trace.

    Values of leaves that are not tensors are left to the guards: a file name that the step never reads
    does not matter, a number that it reads does.
    """
    if len(set(map(id, leaves))) == len(leaves):
        return (structure, *[_leaf_key(leaf) for leaf in leaves])
    return (structure, *[_leaf_key(leaf) for leaf in leaves], *_repeated(leaves))


def _repeated(leaves: Sequence[Any]) -> list[tuple[int, int]]:
    """Which tensors are the same object as one before: their positions. The step may ask for it (`a is b`)."""
    first: dict[int, int] = {}
    places = [(k, first.setdefault(id(leaf), k)) for k, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    return [(place, before) for place, before in places if place != before]


def _leaf_key(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return type(leaf)
    if leaf.layout is not torch.strided or leaf.is_nested:
        return (type(leaf), leaf.layout)  # they have no strides, and are refused anyhow
    # kernels choose their loads, and with them the order of sums, by the alignment of what they read
    return (
        leaf.shape,
        leaf.dtype,
        leaf.stride(),
        leaf.device,
        leaf.requires_grad,
        leaf.data_ptr() % ALIGNMENT,
    )


def family_of(key: Key) -> tuple[Key, Sizes]:
    """What keys have in common that differ in sizes alone, and the sizes. Strides and alignment follow from sizes."""
    structure, *leaves = key
    known, sizes = [structure], []
    for leaf in leaves:
        of_tensor = isinstance(leaf, tuple) and isinstance(leaf[0], torch.Size)
        if of_tensor:
            size, dtype, stride, device, requires_grad, _ = leaf
            known.append((dtype, device, requires_grad, _order(size, stride)))
        else:
            known.append(leaf)
        sizes.append(tuple(leaf[0]) if of_tensor else ())
    return tuple(known), tuple(sizes)


def _order(size: Sequence[int], stride: Sequence[int]) -> tuple[bool, bool, tuple[int, ...]]:
    """Whether elements lie side by side, whether some are the same, and the dimensions, the outermost first."""
    expected, usual = 1, True  # a dimension of size 1 may have any stride
    for n, step in zip(reversed(size), reversed(stride), strict=True):
        usual &= n == 1 or step == expected
        expected *= max(n, 1)  # as torch counts them
    dims = range(len(size))
    expanded = not usual and any(n > 1 and step == 0 for n, step in zip(size, stride, strict=True))
    return usual, expanded, tuple(dims if usual else sorted(dims, key=lambda dim: -stride[dim]))


def alignment(tensor: Tensor) -> int:
    """Bytes by which a tensor's first element misses the next lower address that suits every kernel."""
    return tensor.data_ptr() % ALIGNMENT


def leaf_paths(args: tuple[Any, ...], kwargs: dict[str, Any], names: tuple[str, str]) -> list[str]:
    """How the user would write each leaf of arguments, in the order of `flattened`: `args[0]['x']`."""
    with each_once():
        return [
            path for tree, name in zip((args, kwargs), names, strict=True) for path in _leaf_paths(tree, name)
        ]


def _leaf_paths(tree: Any, prefix: str) -> list[str]:
    if isinstance(tree, Mapping):
        return [path for name, value in tree.items() for path in _leaf_paths(value, f"{prefix}[{name!r}]")]
    if isinstance(tree, Sequence) and not isinstance(tree, (str, bytes, bytearray, range)):
        return [path for i, value in enumerate(tree) for path in _leaf_paths(value, f"{prefix}[{i}]")]
    if is_open(tree, BATCHES):
        if met(tree) is not None:
            return []
        with looks_into(tree) as attributes:
            return [path for name, value in attributes for path in _leaf_paths(value, f"{prefix}.{name}")]
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        fields = dataclasses.fields(tree)
        return [path for f in fields for path in _leaf_paths(getattr(tree, f.name), f"{prefix}.{f.name}")]
    return [prefix]


def batch_expressions(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[str], bool]:
    """Whether an expression of Dynamo's means a tensor of the batch.

    A model among the arguments is no part of the batch: its tensors are where they are, and stay there.
    """
    paths = leaf_paths(args, kwargs, (_ARGS, _KWARGS))
    leaves = flattened((args, kwargs))[1]
    models = tuple(
        f"{path}." for path, leaf in zip(paths, leaves, strict=True) if isinstance(leaf, nn.Module)
    )

    written = dict(_of_dict_classes(args, _ARGS)) | dict(_of_dict_classes(kwargs, _KWARGS))

    def is_of_batch(expression: str) -> bool:
        for theirs, ours in written.items():
            expression = expression.replace(theirs, ours)
        return expression.startswith((_ARGS, _KWARGS)) and not expression.startswith(models)

    return is_of_batch


def _of_dict_classes(tree: Any, prefix: str) -> Iterator[tuple[str, str]]:
    """How Dynamo writes an item of a dict of the user's own class, and how `leaf_paths` does. Outer dicts come first.
    (2.11, 2.13)"""
    if isinstance(tree, Mapping):
        for k, (name, value) in enumerate(tree.items()):
            ours = f"{prefix}[{name!r}]"
            if isinstance(tree, dict) and type(tree) is not dict:
                yield f"dict.__getitem__({prefix}, list(dict.keys({prefix}))[{k}])", ours
            yield from _of_dict_classes(value, ours)
    elif isinstance(tree, (list, tuple)):
        for k, value in enumerate(tree):
            yield from _of_dict_classes(value, f"{prefix}[{k}]")


ARGUMENTS = _ARGS, _KWARGS = "L['args']", "L['kwargs']"
"""How expressions of Dynamo's begin that mean an argument of the traced call."""
