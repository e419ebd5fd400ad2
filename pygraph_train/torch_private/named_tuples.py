"""Named tuples in comparisons: Dynamo of 2.11 takes each for different from every plain tuple. (2.11)"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["as_plain"]

_COMPARISONS = frozenset(getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge"))

_MENDED = torch.__version__ >= "2.13"
"""Compares versions, not text. To read both takes longer than Dynamo takes for most of the calls that it traces."""


def as_plain(fn: Any, args: Sequence[Any]) -> Sequence[Any]:
    """The arguments of a function of Python's, with plain tuples where it compares named ones as plain ones."""
    if _MENDED or fn not in _COMPARISONS:
        return args
    from torch._dynamo.variables.lists import TupleVariable
    from torch._dynamo.variables.user_defined import UserDefinedTupleVariable

    if not all(isinstance(x, (TupleVariable, UserDefinedTupleVariable)) for x in args):
        return args
    name = f"__{fn.__name__}__"
    plain = [
        x._tuple_vt  # type: ignore[attr-defined]
        if isinstance(x, UserDefinedTupleVariable) and getattr(type(x.value), name) is getattr(tuple, name)
        else x
        for x in args
    ]
    return plain if all(isinstance(x, TupleVariable) for x in plain) else args
