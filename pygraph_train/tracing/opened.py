"""Objects of classes of the user's that are opened to their attributes: batches and results with tensors inside.

An object is put together again as `copy.copy` does: a new object of its class with these attributes. This is right for
classes that are written in Python, whose objects are nothing but attributes.
"""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor, nn

__all__ = [
    "BATCHES",
    "attributes_of",
    "each_once",
    "is_container",
    "is_open",
    "is_plain_class",
    "looks_into",
    "met",
    "objects_in",
    "open_way_to",
    "parts_of",
    "rebuilt",
    "standing_for",
    "tensors_inside",
]

BATCHES: set[type] = set()
"""Classes of arguments that are opened: a step was seen to read a tensor inside of one of their objects."""

_HEAP_TYPE = 1 << 9  # Py_TPFLAGS_HEAPTYPE: the class was made by a class statement
_POINTER = 8
_DEPTH = 6
_LOOKS = 2000

_present: dict[int, Any] = {}
"""The objects that are being opened, by their ids, and what is made of each: an object may lead back to itself."""


_met: dict[int, Any] | None = None
"""What stands for each object that was opened in the arguments of one call, by its id: the step may ask whether two
are one, and Dynamo sets no guard."""


@contextmanager
def each_once() -> Iterator[None]:
    """Context: an object that comes several times in a tree is opened once."""
    global _met
    before, _met = _met, {}
    try:
        yield
    finally:
        _met = before


def met(tree: Any) -> int | None:
    """The number of an object in `each_once`, where it was opened before; None the first time."""
    if _met is None:
        return None
    place: int | None = _met.get(id(tree))
    if place is None:
        _met[id(tree)] = len(_met)
    return place


def is_plain_class(kind: type) -> bool:
    """Whether objects of a class hold attributes and nothing else: no base is written in C, and none is torch's.

    What a class does when one of its objects dies it would also do for copies.
    """
    if hasattr(kind, "__del__"):
        return False
    if issubclass(kind, (Tensor, nn.Module, type, BaseException)) or kind.__itemsize__:
        return False
    if any(not base.__flags__ & _HEAP_TYPE for base in kind.__mro__[:-1]):
        return False
    size = object.__basicsize__ + _POINTER * len(_slots(kind))
    size += _POINTER * sum(offset > 0 for offset in (kind.__dictoffset__, kind.__weakrefoffset__))
    return kind.__basicsize__ <= size


def _slots(kind: type) -> list[types.MemberDescriptorType]:
    found = [value for base in reversed(kind.__mro__) for value in vars(base).values()]
    return [value for value in found if isinstance(value, types.MemberDescriptorType)]


@contextmanager
def looks_into(tree: Any, made: Any = None) -> Iterator[Iterable[tuple[str, Any]]]:
    """Context: the attributes of an object. References that lead back to the object are leaves.

    Args:
        made: what is made of the object.
    """
    _present[id(tree)] = made
    try:
        yield attributes_of(tree).items()
    finally:
        del _present[id(tree)]


def standing_for(leaf: Any, value: Any) -> Any:
    """What a leaf becomes, of which `value` was made: a reference to an opened object leads to what is made of that."""
    if not _present:
        return value
    if type(leaf) is weakref.ref and id(leaf()) in _present:
        return weakref.ref(_present[id(leaf())])
    return _present.get(id(leaf), value)


def is_open(tree: Any, opens: Collection[type]) -> bool:
    """Whether an object is opened, where these classes are."""
    return type(tree) in opens and id(tree) not in _present


def attributes_of(tree: Any) -> dict[str, Any]:
    """What an object of a plain class holds, by name."""
    found = {slot.__name__: slot for slot in _slots(type(tree))}
    held = {name: slot.__get__(tree) for name, slot in found.items() if _is_set(slot, tree)}
    return held | dict(getattr(tree, "__dict__", ()))


def _is_set(slot: types.MemberDescriptorType, tree: Any) -> bool:
    try:
        slot.__get__(tree)
    except AttributeError:
        return False
    return True


def rebuilt(tree: Any, change: Callable[[Any], Any]) -> Any:
    """Another object of the class of `tree`, with what `change` makes of its attributes."""
    if _met is not None and id(tree) in _met:
        return _met[id(tree)]
    made = object.__new__(type(tree))
    if _met is not None:
        _met[id(tree)] = made
    slots = {slot.__name__: slot for slot in _slots(type(tree))}
    with looks_into(tree, made) as attributes:
        for name, value in attributes:
            if name in slots:
                slots[name].__set__(made, change(value))
            else:
                made.__dict__[name] = change(value)
    return made


def objects_in(tree: Any, opens: Collection[type]) -> Iterator[Any]:
    """The objects of these classes in a tree, outer ones first. One that comes again is not looked into again."""
    return _objects_in(tree, opens, set())


def _objects_in(tree: Any, opens: Collection[type], seen: set[int]) -> Iterator[Any]:
    if type(tree) in opens:
        yield tree
        if id(tree) in seen:
            return
        seen.add(id(tree))
        inside: Iterable[Any] = attributes_of(tree).values()
    else:
        inside = parts_of(tree)
    for part in inside:
        yield from _objects_in(part, opens, seen)


def is_container(tree: Any) -> bool:
    """Whether `flatten` looks into it, apart from objects that are opened."""
    if isinstance(tree, Sequence):
        return not isinstance(tree, (str, bytes, bytearray, range))
    return isinstance(tree, Mapping) or (is_dataclass(tree) and not isinstance(tree, type))


def parts_of(tree: Any) -> Iterable[Any]:
    """What a container holds; nothing where it is none."""
    if not is_container(tree):
        return ()
    if isinstance(tree, Mapping):
        return tree.values()
    return tree if isinstance(tree, Sequence) else [getattr(tree, field.name) for field in fields(tree)]


def tensors_inside(value: Any) -> Iterator[tuple[Tensor, type]]:
    """The tensors that objects of plain classes hold, with the class of the object that holds each.

    Args:
        value: one of these objects, or something that holds some.
    """
    level: list[tuple[Any, type | None]] = [(value, None)]
    seen: set[int] = set()
    for _ in range(_DEPTH):
        below: list[tuple[Any, type | None]] = []
        for part, holder in level:
            if isinstance(part, Tensor) and holder is not None:
                yield part, holder
            if id(part) not in seen and len(seen) <= _LOOKS:
                seen.add(id(part))
                below += [(inner, next(iter(kind), holder)) for inner, kind in _parts(part)]
        level = below


def open_way_to(tensors: Sequence[Tensor], leaves: Sequence[Any]) -> bool:
    """Open the classes of arguments in which these tensors lie.

    Args:
        leaves: of the arguments.
    Returns:
        Whether all of the tensors are leaves from the next call on.
    """
    classes: set[type] = set()
    for tensor in tensors:
        found = _way(tensor, leaves)
        if found is None or not all(map(is_plain_class, found)):
            return False
        classes |= found
    BATCHES.update(classes)
    return True


def _way(tensor: Tensor, leaves: Sequence[Any]) -> set[type] | None:
    """The classes of the objects on the way from a leaf to a tensor inside of it; None where there is no way."""
    level: list[tuple[Any, frozenset[type]]] = [(leaf, frozenset()) for leaf in leaves]
    seen: set[int] = set()
    for _ in range(_DEPTH):
        below: list[tuple[Any, frozenset[type]]] = []
        for value, classes in level:
            if value is tensor:
                return set(classes)
            if id(value) in seen or len(seen) > _LOOKS:
                continue
            seen.add(id(value))
            below += [(part, classes | extra) for part, extra in _parts(value)]
        level = below
    return None


def _parts(value: Any) -> Iterator[tuple[Any, set[type]]]:
    if isinstance(value, Mapping):
        yield from ((part, set()) for part in value.values())
    elif isinstance(value, (list, tuple)):
        yield from ((part, set()) for part in value)
    elif not isinstance(value, (Tensor, type, str, bytes, nn.Module)) and is_plain_class(type(value)):
        yield from ((part, {type(value)}) for part in attributes_of(value).values())
