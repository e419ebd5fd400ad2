"""Takes back what Dynamo's code has written to Python."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from pygraph_train.torch_private.side_effects import SideEffect

__all__ = ["Undo"]


class Undo:
    """What the objects hold now that some code is about to write to.

    Args:
        effects: the writes of this code; they are reproducible.
        frame, names: the locals and globals of the traced frame.
    """

    def __init__(
        self, effects: Iterable[SideEffect], frame: Mapping[str, Any], names: Mapping[str, Any]
    ) -> None:
        scope = {**names, "L": frame, "G": names}
        self._steps = [_kept(effect, eval(effect.source, scope)) for effect in effects]

    def restore(self) -> None:
        """Let the objects hold that again."""
        for step in reversed(self._steps):
            step()


def _kept(effect: SideEffect, owner: Any) -> Callable[[], None]:
    if effect.kind == "list":
        return _list(owner, list(owner))
    if effect.kind == "dict":
        return _entries(owner, dict(owner))
    if effect.kind == "set":
        return _entries(owner, set(owner))
    if effect.kind == "cell":
        return _cell(owner, owner.cell_contents)
    assert effect.kind == "attribute", effect
    return _attribute(vars(owner), effect.attribute)


def _list(owner: list[Any], items: list[Any]) -> Callable[[], None]:
    def restore() -> None:
        owner[:] = items

    return restore


def _entries(owner: Any, entries: Any) -> Callable[[], None]:
    def restore() -> None:
        owner.clear()
        owner.update(entries)

    return restore


def _cell(owner: Any, contents: Any) -> Callable[[], None]:
    def restore() -> None:
        owner.cell_contents = contents

    return restore


def _attribute(names: dict[str, Any], name: str) -> Callable[[], None]:
    had, value = name in names, names.get(name)

    def restore() -> None:
        if had:
            names[name] = value
        else:
            names.pop(name, None)

    return restore
