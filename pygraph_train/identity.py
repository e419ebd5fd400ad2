"""Whether many objects are the very same ones as before, by one comparison of memory."""

from __future__ import annotations

import ctypes
import operator
import struct
from collections.abc import Callable, Sequence
from typing import Any

_ITEMS = tuple.__basicsize__
"""Bytes from the beginning of a tuple to the references to its items."""

# as `ctypes.string_at`, which is a function of Python
_kind: Any = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t)
_string_at = _kind(("PyBytes_FromStringAndSize", ctypes.pythonapi))


def _by_memory(items: tuple[Any, ...], string_at: Callable[[int, int], bytes] = _string_at) -> bytes:
    return string_at(id(items) + _ITEMS, 8 * len(items))


def _one_by_one(items: tuple[Any, ...]) -> bytes:
    return struct.pack(f"{len(items)}P", *map(id, items))


def _tuples_are_as_expected() -> bool:
    """Whether the references stand in a row behind the head of a tuple, as in all versions of CPython so far."""
    try:
        some = tuple(object() for _ in range(5))
        return all(_by_memory(some[:n]) == _one_by_one(some[:n]) for n in range(len(some) + 1))
    except (TypeError, ValueError):
        return False


identities: Callable[[tuple[Any, ...]], bytes] = _by_memory if _tuples_are_as_expected() else _one_by_one
"""What tells these objects, in this order, from all others that exist at the same time. Hot path.

`==` of two tuples would ask the objects: tensors compare their values. And `is`, called for one pair after the other,
takes ten times as long.
"""


def picker(positions: Sequence[int]) -> Callable[[Sequence[Any]], tuple[Any, ...]]:
    """What gives the items at these positions of a sequence, by one call in C where there are several. Hot path."""
    if len(positions) > 1:
        return operator.itemgetter(*positions)
    return lambda items: tuple(map(items.__getitem__, positions))
