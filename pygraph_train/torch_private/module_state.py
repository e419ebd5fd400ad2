"""What a module and those in it hold in Python, to see whether a call has changed it. (2.11, 2.13)"""

from __future__ import annotations

import types
from collections import OrderedDict, deque
from typing import Any

from torch import Tensor, nn

__all__ = ["ModuleState", "reachable_from"]

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
