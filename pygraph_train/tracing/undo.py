"""Takes back what Dynamo's code has written to Python, and exchanges what it will replace."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from pygraph_train.boundary import put_back
from pygraph_train.torch_private.side_effects import SideEffect

__all__ = ["Undo", "exchange"]


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
        put_back(*reversed(self._steps))


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


def exchange(
    effects: Iterable[SideEffect],
    frame: Mapping[str, Any],
    names: Mapping[str, Any],
    reads: Sequence[str],
    change: Callable[[Any], Any],
) -> bool:
    """Let objects hold what `change` makes of what some code is about to replace. Returns whether anything changes.

    Args:
        effects, frame, names: see `Undo`.
        reads: expressions of tensors that this code reads before. They stay as they are.
    """
    scope = {**names, "L": frame, "G": names}
    changed = False
    for effect in effects:
        # nobody may know what a dict replaces, as of some classes of dicts
        if not effect.places or any(expression.startswith(effect.places) for expression in reads):
            continue
        owner: Any = eval(effect.source, scope)
        if effect.kind == "cell":
            changed |= _change_cell(owner, change)
        elif effect.kind == "attribute":
            changed |= _change(vars(owner), effect.attribute, change)
        elif effect.kind == "dict":
            for name in [name for name in owner if f"{effect.source}[{name!r}]" in effect.places]:
                changed |= _change(owner, name, change)
    return changed


def _change(names: dict[Any, Any], name: Any, change: Callable[[Any], Any]) -> bool:
    if name not in names or (other := change(names[name])) is names[name]:
        return False
    names[name] = other
    return True


def _change_cell(cell: Any, change: Callable[[Any], Any]) -> bool:
    try:
        contents = cell.cell_contents
    except ValueError:  # it is empty
        return False
    cell.cell_contents = other = change(contents)
    return other is not contents
