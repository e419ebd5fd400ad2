"""What a module and those in it hold in Python, to see whether a call has changed it. (2.11, 2.13)"""

from __future__ import annotations

import types
from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pygraph_train.torch_private.memory import storage_key, tensor_version

__all__ = ["ModuleState", "ObjectsAround", "reachable_from"]

_CONTAINERS = (list, dict, set, deque, OrderedDict)


class ModuleState:
    """Attributes as they are now, and what is in those that are lists, dicts or sets. Tensors count as objects."""

    def __init__(self, module: nn.Module) -> None:
        self._held = [(m, dict(vars(m))) for m in module.modules()]
        self._contents: list[tuple[str, Any, Any]] = [
            (name, value, value.copy())
            for _, held in self._held
            for name, value in held.items()
            if type(value) in _CONTAINERS and value
        ]
        self._empty: list[tuple[str, Any]] = [
            (name, value)
            for _, held in self._held
            for name, value in held.items()
            if type(value) in _CONTAINERS and not value
        ]

    def changed(self) -> str | None:
        """The name of an attribute that is not what it was."""
        for module, held in self._held:
            now = vars(module)
            if len(now) != len(held) or any(now.get(name, self) is not value for name, value in held.items()):
                names = [*held, *now]
                return next(n for n in names if now.get(n, self) is not held.get(n, self))
        filled = next((name for name, value in self._empty if value), None)
        return filled or next(
            (name for name, value, before in self._contents if not _same(value, before)), None
        )

    def restore(self) -> None:
        """Let the attributes be that again."""
        if self.changed() is None:
            return
        for module, held in self._held:
            vars(module).clear()
            vars(module).update(held)
        for _, value in self._empty:
            value.clear()
        for _, value, before in self._contents:
            value.clear()
            if isinstance(value, (list, deque)):
                value.extend(before)
            else:
                value.update(before)


def _same(value: Any, before: Any) -> bool:
    if len(value) != len(before):
        return False
    if isinstance(value, dict):
        return all(a is b and value[a] is before[b] for a, b in zip(value, before, strict=True))
    if isinstance(value, set):
        return set(map(id, value)) == set(map(id, before))
    return all(a is b for a, b in zip(value, before, strict=True))


def reachable_from(module: nn.Module, most: int) -> set[int]:
    """The ids of objects that lead from a module to others: attributes, and what lists, tuples, sets and dicts hold.

    Args:
        most: of objects that are looked at.
    """
    seen: dict[int, Any] = {}
    left: list[Any] = [module]
    while left and len(seen) < most:
        value = left.pop(0)
        if id(value) in seen or value is None or isinstance(value, (type, str, bytes, int, float, Tensor)):
            continue
        seen[id(value)] = value
        if isinstance(value, dict):
            left += [*value.keys(), *value.values()]
        elif isinstance(value, (list, tuple, set, frozenset, deque)):
            left += value
        elif not isinstance(value, types.ModuleType):
            held = getattr(value, "__dict__", None)
            left += [] if held is None else [held]
            left += [getattr(value, "__self__", None)]
    return set(seen)


_MOST_OBJECTS, _MOST_ELEMENTS = 5000, 1 << 16
_PLAIN = (int, float, complex, str, bytes, bool, type(None))


class ObjectsAround:
    """Objects that these lead to, and what each of them holds: more than `ModuleState` looks at, and slower.

    Args:
        roots: where to begin. Modules of Python, functions and classes are not gone through, unless they are roots.
        kept: tensors that may change.
    """

    def __init__(self, roots: Iterable[Any], kept: Sequence[Tensor]) -> None:
        self._kept = {storage_key(x.untyped_storage()) for x in kept}
        self._held: list[tuple[Any, Any]] = []
        left, seen = deque((root, True) for root in roots), set[int]()
        while left and len(seen) < _MOST_OBJECTS:
            value, is_root = left.popleft()
            if id(value) in seen or isinstance(value, _PLAIN):
                continue
            seen.add(id(value))
            if isinstance(value, (types.ModuleType, types.FunctionType, type)) and not (
                is_root and isinstance(value, type)
            ):
                continue
            held = self._look(value)
            if held is not None:
                self._held.append((value, held))
                left.extend((x, False) for x in _inside(value))

    def changed(self) -> str | None:
        """Which kind of object is not what it was."""
        return next((type(x).__name__ for x, held in self._held if not _alike(self._look(x), held)), None)

    def _look(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            if value.layout is not torch.strided or storage_key(value.untyped_storage()) in self._kept:
                return None
            small = value.device.type in ("cpu", "cuda") and value.numel() <= _MOST_ELEMENTS
            contents = value.detach().clone() if small else None
            return (0 if value.is_inference() else tensor_version(value)), contents
        if isinstance(value, torch.Generator):
            return 0, value.get_state()
        if isinstance(value, types.GeneratorType):
            return [None if value.gi_frame is None else value.gi_frame.f_lasti]
        if type(value).__module__ == "itertools" or type(value).__name__.endswith("_iterator"):
            return [
                repr(value.__reduce__()[1:])
            ]  # others, files among them, need not tell how far they have come
        return _inside(value)


def _inside(value: Any) -> list[Any]:
    """What an object holds."""
    held: list[Any] = []
    if isinstance(value, Tensor):
        return held
    if isinstance(value, dict):
        for key, x in dict.items(value):
            held += [key, x]
    elif isinstance(value, (list, tuple, set, frozenset, deque)):
        held += value
    try:
        own = object.__getattribute__(value, "__dict__")  # without Python of the object
    except AttributeError:
        own = None
    if own is not None:
        for key, x in own.items():
            held += [key, x]
    if isinstance(value, types.MethodType):
        held.append(value.__self__)
    return held


def _alike(now: Any, before: Any) -> bool:
    if isinstance(before, tuple):
        return isinstance(now, tuple) and now[0] == before[0] and _equal(now[1], before[1])
    if now is None or before is None:
        return now is before
    return len(now) == len(before) and all(
        a is b or (type(a) is type(b) and isinstance(a, _PLAIN) and (a == b or a != a))
        for a, b in zip(now, before, strict=True)
    )


def _equal(now: Tensor | None, before: Tensor | None) -> bool:
    if now is None or before is None:
        return now is before
    if (now.shape, now.dtype, now.device) != (before.shape, before.dtype, before.device):
        return False
    return bool(((now == before) | (now != now)).all())
