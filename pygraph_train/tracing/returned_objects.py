"""Objects that a step makes and returns: which of them a replay can make again."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from pygraph_train.torch_private.new_objects import taking_apart
from pygraph_train.tracing.opened import attributes_of, is_container, is_plain_class, objects_in, parts_of
from pygraph_train.tracing.traced_code import held_weakly, opened

__all__ = ["ReturnedObjects", "undeclared"]


class ReturnedObjects:
    """What one trace has seen of them. Guards stand for the numbers and texts that they hold.

    Attributes:
        may_open: whether they can be made again. They cannot where something else changes results after a replay, nor
            where the step stores them as well.
    """

    def __init__(self) -> None:
        self.may_open = True
        self._held: dict[type, set[str]] = {}
        self._as_they_are: set[type] = set()  # of objects that a replay would have to return themselves

    def changes(self) -> tuple[tuple[Any, str, Any], ...]:
        """Changes of Dynamo while it traces."""
        self._held.clear()
        self._as_they_are.clear()
        return taking_apart(opened, held_weakly(self._met))

    def _met(self, kind: type, names: Sequence[str] | None) -> bool:
        if names is None or not is_plain_class(kind):
            self._as_they_are.add(kind)
            return False
        self._held.setdefault(kind, set()).update(names)
        return True

    @property
    def opens(self) -> Collection[type]:
        """Classes of results that are opened."""
        return self._held.keys() - self._as_they_are if self.may_open else ()

    def knows(self, result: Any) -> bool:
        """Whether the trace has seen all that an object of an opened class holds."""
        return self._held[type(result)].issuperset(attributes_of(result))


def undeclared(tree: Any, opens: Collection[type]) -> Iterator[tuple[type, str]]:
    """Attributes of containers in a result that are neither fields nor items: a copy of the container would keep them.

    Args:
        opens: classes of objects that are no containers, see `flatten`.
    """
    for found in objects_in(tree, opens):
        for part in attributes_of(found).values():
            yield from undeclared_in(part, opens)
    yield from undeclared_in(tree, opens)


def undeclared_in(tree: Any, opens: Collection[type]) -> Iterator[tuple[type, str]]:
    """The same, without those inside of objects."""
    if type(tree) in opens or not is_container(tree):
        return
    items = tree if isinstance(tree, Mapping) else {}
    declared = {field.name for field in fields(tree)} if is_dataclass(tree) else set()
    if isinstance(tree, UserDict):
        declared.add("data")
    for name, value in getattr(tree, "__dict__", {}).items():
        if value is not None and name not in declared and items.get(name) is not value:
            yield type(tree), name
    for part in parts_of(tree):
        yield from undeclared_in(part, opens)
