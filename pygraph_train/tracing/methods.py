"""The functions of classes that a step may call, and the environment that it reads. Dynamo does not guard them all."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from itertools import chain
from typing import Any

from pygraph_train.dict_versions import Versions, changed, class_dict, versions_are_known
from pygraph_train.identity import identities
from pygraph_train.problems import Problem

__all__ = ["Environment", "Methods", "classes_of", "reads_environment"]

_HEAP_TYPE = 1 << 9
"""`Py_TPFLAGS_HEAPTYPE`: of classes that a `class` statement has made, among others."""
_READERS = (os.environ, os.getenv, os.getenv.__code__)
_FIX = "Change it before training, or rarely: each change costs a new trace"


def classes_of(value: object) -> Iterable[type]:
    """The classes in which an attribute of this object, or of this class, may be found."""
    kind = value if isinstance(value, type) else type(value)
    known = versions_are_known()  # otherwise all functions are looked at in each step
    for base in kind.__mro__:
        if base.__flags__ & _HEAP_TYPE and (known or base.__module__.partition(".")[0] != "torch"):
            yield base


def reads_environment(value: object) -> bool:
    """Whether it is `os.environ`, `os.getenv` or its code."""
    return any(value is reader for reader in _READERS)


class Methods:
    """The functions, properties and other descriptors that classes had.

    Args:
        classes: which are looked at.
    """

    def __init__(self, classes: Iterable[type]) -> None:
        self._classes = list(classes)
        self._dicts = [class_dict(kind) for kind in self._classes]
        self._found = list(map(_descriptors, self._dicts))
        self._ids = list(map(identities, self._found))
        self._versions = Versions((), self._dicts) if versions_are_known() and self._dicts else None
        self._words = b"" if self._versions is None else self._versions.read()
        self._values = () if versions_are_known() else self._all()

    def are_as_they_were(self) -> bool:
        """Hot path."""
        if self._versions is None:
            return self._have_the_same_values()
        now = self._versions.read()
        if now == self._words:
            return True
        if self._changed(changed(self._words, now)):
            return False
        self._words = now
        return True

    def _have_the_same_values(self) -> bool:
        now = self._all()
        if identities(now) == identities(self._values):
            return True
        if self._changed(range(len(self._dicts))):
            return False
        self._values = now
        return True

    def _all(self) -> tuple[Any, ...]:
        return tuple(chain.from_iterable(map(dict.values, self._dicts)))

    def _changed(self, places: Sequence[int]) -> list[int]:
        return [i for i in places if identities(_descriptors(self._dicts[i])) != self._ids[i]]

    def problem(self) -> Problem | None:
        """Which class has other functions now."""
        for i in self._changed(range(len(self._dicts))):
            kind, own = self._classes[i], self._dicts[i]
            before = set(map(id, self._found[i]))
            names = [name for name, value in own.items() if _is_descriptor(value) and id(value) not in before]
            what = (
                f"{kind.__qualname__}.{names[0]} was replaced"
                if names
                else f"{kind.__qualname__} lost a method"
            )
            return Problem(f"{what} since the step was traced", fix=_FIX)
        return None


class Environment:
    """The variables of the environment, as they were."""

    def __init__(self) -> None:
        self._variables = dict(os.environ)

    def is_as_it_was(self) -> bool:
        """Whether no variable has another value."""
        return dict(os.environ) == self._variables

    def problem(self) -> Problem | None:
        """Which variable has another value now."""
        now, before = dict(os.environ), self._variables
        other = [name for name in {**before, **now} if now.get(name) != before.get(name)]
        if not other:
            return None
        text = f"os.environ[{other[0]!r}] has changed, and the step reads the environment"
        return Problem(text, fix=_FIX)


def _descriptors(own: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(value for value in own.values() if _is_descriptor(value))


def _is_descriptor(value: object) -> bool:
    return hasattr(type(value), "__get__")
