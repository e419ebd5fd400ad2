"""An extension of Dynamo: lists that grow from step to step stay out of the graph, and no guard looks at their length.

Dynamo guards the length of each list that outlives a step, so `losses.append(loss)` would be traced anew in every step.
It breaks the graph at such a list instead, and Python appends. (2.11 to 2.15)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["Growing"]


class Growing:
    """The lists that one function was traced with. One that has grown at its next trace is left to Python from then on.

    Attributes:
        found: ids of those that grow.
    """

    def __init__(self) -> None:
        self._lengths: dict[int, int] = {}
        self.found: set[int] = set()

    def grows(self, value: Any) -> bool:
        """Whether a list has grown since it was traced before."""
        key, length = id(value), len(value)
        if length > self._lengths.setdefault(key, length):
            self.found.add(key)
        return key in self.found

    @contextmanager
    def left_to_python(self) -> Iterator[None]:
        """Around a trace."""
        from torch._dynamo.variables import UserDefinedObjectVariable
        from torch._dynamo.variables.builder import GuardBuilder, VariableBuilder

        table = VariableBuilder._type_dispatch()
        stock = {kind: table[kind] for kind in (list, deque) if kind in table}

        def wrapped(builder: Any, value: Any) -> Any:
            if not self.grows(value):
                return stock[type(value)](builder, value)
            builder.install_guards(GuardBuilder.TYPE_MATCH)
            return UserDefinedObjectVariable(value, source=builder.source)

        table.update(dict.fromkeys(stock, wrapped))
        try:
            yield
        finally:
            table.update(stock)
