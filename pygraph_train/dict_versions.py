"""Which of many objects may have other attributes than before, from a few words of memory each.

CPython 3.11 and 3.12 give a dict a number that no dict has had before whenever it changes. This is how Dynamo's own
guards know that nothing has changed. Other versions of Python have no such number, or do not always change it.
"""

from __future__ import annotations

import ctypes
import functools
import gc
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

__all__ = ["Versions", "changed", "class_dict", "versions_are_known"]

_WORD = 8
_CLASS, _VERSION, _ATTRIBUTES = 8, 24, -24
"""Where an object has its class, a dict the number of its last change, and an object its `__dict__`."""
_MANAGED_DICT = 1 << 4
"""`Py_TPFLAGS_MANAGED_DICT` of a class: Python itself keeps the `__dict__` of its objects, before each of them."""


class Versions:
    """Words that are others after any change of these dicts, and after an object got another class or `__dict__`.

    The words may be others although nothing has changed: who asks has to look then.

    Args:
        objects: each has a `__dict__` that is among `dicts`. `Versions` keeps them, as it reads their memory.
        dicts: of class `dict`.

    Raises:
        ValueError: an object keeps its attributes in another way.
    """

    def __init__(self, objects: Sequence[Any], dicts: Sequence[dict[Any, Any]]) -> None:
        if not all(type(thing).__flags__ & _MANAGED_DICT for thing in objects):
            raise ValueError("a class keeps attributes of its objects in a way of its own")
        self._kept = (tuple(objects), tuple(dicts))
        self.size = len(dicts) + 2 * len(objects)
        addresses = [id(d) + _VERSION for d in dicts]
        addresses += [id(thing) + offset for thing in objects for offset in (_CLASS, _ATTRIBUTES)]
        first, last = min(addresses, default=0), max(addresses, default=0)
        memory = (ctypes.c_char * (last - first + _WORD)).from_address(first)
        self._memory = np.frombuffer(memoryview(memory), np.uint64)
        self._places = np.array([(address - first) // _WORD for address in addresses], np.intp)
        words = self._memory.take(self._places)[len(dicts) :].tolist()
        if words != [word for thing in objects for word in (id(type(thing)), id(vars(thing)))]:
            raise ValueError("attributes of an object are not where they should be")

    def read(self) -> bytes:
        """The words as they are now: of each dict one, then of each object two. Hot path: one gathering in C."""
        return self._memory.take(self._places).tobytes()


def changed(before: bytes, now: bytes) -> list[int]:
    """The positions of the words that are not the same."""
    places: list[int] = np.flatnonzero(
        np.frombuffer(before, np.uint64) != np.frombuffer(now, np.uint64)
    ).tolist()
    return places


def class_dict(kind: type) -> dict[str, Any]:
    """The dict behind `vars(kind)`, to be looked at only."""
    found: dict[str, Any] = gc.get_referents(vars(kind))[0]
    return found


class _Probe:
    a: Any
    b: Any


def _numbers_follow_changes() -> bool:
    """Whether every way to change a dict or an object's attributes is seen, and reading them is none."""
    probe = _Probe()
    probe.a = probe.b = 1
    attributes = vars(probe)
    of_class = class_dict(_Probe)
    if type(of_class) is not dict or of_class != dict(vars(_Probe)):
        return False
    try:
        versions = Versions([probe], [attributes, of_class])
    except ValueError:
        return False

    def assign(value: Any) -> Callable[[], Any]:
        return functools.partial(_assign, probe, value)

    changes: list[Callable[[], Any]] = [
        *map(assign, range(2, 60))
    ]  # so often that Python specializes the assignment
    changes += [
        lambda: attributes.update(a=100),
        lambda: attributes.__setitem__("b", 101),
        lambda: setattr(probe, "new", 1),
        lambda: delattr(probe, "new"),
        lambda: object.__setattr__(probe, "b", 102),
        lambda: attributes.setdefault("later", 103),
        lambda: attributes.pop("later"),
        lambda: attributes.__ior__({"a": 104}),
        lambda: attributes.clear(),
        lambda: setattr(_Probe, "new", 1),
        lambda: setattr(_Probe, "new", 2),
        lambda: delattr(_Probe, "new"),
        lambda: attributes.update({"a": 105, "b": 106}),
        lambda: setattr(probe, "__class__", type("Other", (_Probe,), {})),
        lambda: setattr(probe, "__dict__", dict(attributes)),
    ]
    for change in changes:
        before = versions.read()
        repr((probe.a, probe.b, vars(probe), attributes.get("c")))
        if versions.read() != before:
            return False
        change()
        if versions.read() == before:
            return False
        attributes.setdefault("a", 1)
        attributes.setdefault("b", 1)
    return True


def _assign(probe: _Probe, value: Any) -> None:
    probe.a = value


def versions_are_known() -> bool:
    """Whether `Versions` see every change in this Python. Others have no `Versions`."""
    return _KNOWN


_KNOWN = (
    sys.implementation.name == "cpython"
    and sys.version_info[:2] in ((3, 11), (3, 12))
    and ctypes.sizeof(ctypes.c_void_p) == _WORD
    and _numbers_follow_changes()
)
