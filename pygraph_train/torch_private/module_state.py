"""What a module and those in it hold in Python, to see whether a call has changed it. (2.11, 2.13)"""

from __future__ import annotations

from collections import OrderedDict, deque
from typing import Any

from torch import nn

__all__ = ["ModuleState"]

_CONTAINERS = (list, dict, set, deque, OrderedDict)


class ModuleState:
    """Attributes as they are now, and what is in those that are lists, dicts or sets. Tensors count as objects."""

    def __init__(self, module: nn.Module) -> None:
        self._held = [(m, dict(vars(m))) for m in module.modules()]
        self._contents: list[tuple[str, Any, Any]] = [
            (name, value, value.copy())
            for _, held in self._held
            for name, value in held.items()
            if type(value) in _CONTAINERS
        ]

    def changed(self) -> str | None:
        """The name of an attribute that is not what it was."""
        for module, held in self._held:
            now = vars(module)
            if len(now) != len(held) or any(now.get(name, self) is not value for name, value in held.items()):
                names = [*held, *now]
                return next(n for n in names if now.get(n, self) is not held.get(n, self))
        return next((name for name, value, before in self._contents if not _same(value, before)), None)

    def restore(self) -> None:
        """Let the attributes be that again."""
        if self.changed() is None:
            return
        for module, held in self._held:
            vars(module).clear()
            vars(module).update(held)
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
