"""Dynamo's expressions for what a traced function reads: `L['fn'].net.weight` and the like."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

__all__ = ["Read", "owner_of", "reader"]

Read = Callable[[dict[str, Any], dict[str, Any]], Any]


def reader(namespace: dict[str, Any], *groups: Iterable[str]) -> Read:
    """One function that reads all of Dynamo's own source expressions: a call for each would be slow.

    What several of them start with (a module's parameters) is read once. It returns a tuple for each group.
    """
    lines: list[str] = []
    known: dict[str, str] = {}

    def name_of(expression: str) -> str:
        owner, last = owner_of(expression)
        if not owner:
            return expression
        if owner not in known:
            place = name_of(owner)
            known[owner] = f"v{len(known)}"
            lines.append(f"    {known[owner]} = {place}\n")
        return known[owner] + last

    tuples = [f"({''.join(name_of(e) + ', ' for e in expressions)})" for expressions in groups]
    scope = dict(namespace)
    exec(f"def read(L, G):\n{''.join(lines)}    return {', '.join(tuples)},\n", scope)
    read: Read = scope["read"]
    return read


_ACCESS = re.compile(r"\.\w+|\['[^'\\]*'\]|\[\d+\]")


def owner_of(expression: str) -> tuple[str, str]:
    """`L['fn'].net.weight` is read from `L['fn'].net` with `.weight`; ("", "") where that is not so simple."""
    if not expression.startswith(("L[", "G[")):
        return "", ""
    parts = _ACCESS.findall(expression)
    if len(parts) < 2 or expression[0] + "".join(parts) != expression:
        return "", ""
    return expression[: -len(parts[-1])], parts[-1]
