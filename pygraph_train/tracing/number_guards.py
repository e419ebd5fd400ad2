"""Numbers that changed from one call to another, as Dynamo's guards tell."""

from __future__ import annotations

import re
from collections.abc import Iterable

__all__ = ["changed_numbers"]

_FLOAT = re.compile(r"([LG]\[.+) == -?(?:[\d.]+(?:e[+-]?\d+)?|inf|nan)")
_WHOLE = re.compile(r"([LG]\[.+) == -?\d+")


def changed_numbers(failures: Iterable[tuple[str, str | None]]) -> tuple[set[str], set[str]]:
    """Expressions of integers, and of floats.

    Args:
        failures: guards that failed.
    """
    guards = [guard for guard, _ in failures]
    whole = {found[1] for guard in guards if (found := _WHOLE.fullmatch(guard))}
    return whole, {found[1] for guard in guards if (found := _FLOAT.fullmatch(guard))} - whole
