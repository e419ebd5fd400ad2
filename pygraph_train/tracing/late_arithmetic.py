"""Python's arithmetic with numbers that are known when the graph has run, and what of it raises nothing.

By then the step is made. So an operation that raises for some values has to be done at its line, unless those values
are out of the question: an integer that is too large for a float, a divisor that is zero.
"""

from __future__ import annotations

import itertools
import operator
import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = [
    "DIVISIONS",
    "FLOATS",
    "INTEGERS",
    "LIVE",
    "MODERATE",
    "Formatted",
    "Late",
    "is_moderate",
    "late_result",
]

MODERATE = 2**480
"""No meter has greater integers, and floats hold the products of two of these."""


@dataclass(frozen=True)
class Late:
    """What is known of a number before it is there.

    Attributes:
        kinds: the types that it may have.
        most: an integer is between this number and its negative.
        nonzero: whether it is not zero.
    """

    kinds: frozenset[type]
    most: int = 0
    nonzero: bool = False


_INT, _FLOAT = frozenset({int}), frozenset({float})
FLOATS = Late(_FLOAT)
INTEGERS = Late(_INT, 2**64)
"""What tensors hold."""
LIVE = Late(_INT | _FLOAT, MODERATE)

DIVISIONS = frozenset({operator.truediv, operator.floordiv, operator.mod})
_SUMS = frozenset({operator.add, operator.sub})
_SIGNS = frozenset({operator.neg, operator.pos, operator.abs, abs})


def is_moderate(number: float) -> bool:
    """Whether a number is a float, or no great integer."""
    return type(number) is not int or abs(number) <= MODERATE


@dataclass(frozen=True)
class Formatted:
    """`str.format` of this text."""

    text: str

    def __call__(self, *args: Any) -> str:
        """The text with these."""
        return self.text.format(*args)


def late_result(fn: Callable[..., Any], args: Sequence[Any]) -> Late | None:
    """What is known of the result of an operation; None where it might raise.

    Args:
        fn: takes numbers.
        args: what is known of each; or constants.
    """
    known = [x if isinstance(x, Late) else _of_constant(x) for x in args]
    if isinstance(fn, Formatted):
        return _text(fn, args, known)
    if fn is round:
        return _rounded(args, known)
    if any(x is None for x in known):
        return None
    found: list[Any] = known
    made = _unary(fn, found[0]) if len(found) == 1 else None
    if len(found) == 2:
        made = _binary(fn, *found)
    if fn in (min, max) and len(found) > 1:
        kinds = frozenset().union(*(x.kinds for x in found))
        positive = fn is max and any(type(x) in (int, float) and x > 0 for x in args)  # or it is no number
        made = Late(kinds, max(x.most for x in found), positive or all(x.nonzero for x in found))
    return made if made is not None and made.most <= 2**1023 else None


def _of_constant(value: Any) -> Late | None:
    if type(value) is int and abs(value) <= MODERATE:
        return Late(_INT, abs(value), value != 0)
    return Late(_FLOAT, 0, value != 0) if type(value) is float else None


def _unary(fn: Any, x: Late) -> Late | None:
    if fn in _SIGNS or (fn is int and x.kinds == _INT) or (fn is float and x.kinds == _FLOAT):
        return x
    if fn is float:
        return Late(_FLOAT, 0, x.nonzero)
    return None


def _binary(fn: Any, a: Late, b: Late) -> Late | None:
    mixed = a.kinds | b.kinds
    kinds = _FLOAT if _FLOAT in (a.kinds, b.kinds) else mixed
    if fn in _SUMS:
        return Late(kinds, a.most + b.most)
    if fn is operator.mul:
        return Late(kinds, a.most * b.most)
    if fn in DIVISIONS and b.nonzero:
        return Late(_FLOAT if fn is operator.truediv else kinds, max(a.most, b.most))
    return None


def _rounded(args: Sequence[Any], known: Sequence[Late | None]) -> Late | None:
    """Floats that no digit of which lies behind the point stay as they are. There is no integer of nan."""
    x = known[0]
    if x is None or len(args) > 2:
        return None
    if len(args) == 1 or args[1] is None:
        return x if x.kinds == _INT else None
    return Late(x.kinds, x.most) if type(args[1]) is int and args[1] >= 0 else None


def _text(fn: Formatted, args: Sequence[Any], known: Sequence[Late | None]) -> Late | None:
    specs = [spec or "" for _, _, spec, _ in string.Formatter().parse(fn.text)]
    if any(spec.endswith("c") or "{" in spec for spec in specs):  # not each number is a letter, or a width
        return None
    if any(x is None and type(y) is not str for x, y in zip(known, args, strict=True)):
        return None
    choices = [sorted(x.kinds, key=str) if isinstance(x, Late) else [x] for x in args]
    try:
        for chosen in itertools.product(*choices):
            fn(*[x(1) if isinstance(x, type) else x for x in chosen])
    except Exception:  # the step itself will say what is wrong
        return None
    return Late(frozenset({str}))
