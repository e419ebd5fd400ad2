"""An extension of Dynamo: lists that grow from step to step stay out of the graph, and no guard looks at their length.

Dynamo guards the length of a list that outlives a step, so `losses.append(loss)` would be traced anew in every step. It
breaks the graph at such a list instead, and Python appends. So it does at generators of `random`, of which it would
draw once (2.11 to 2.14). A float64 of NumPy is a float: Dynamo makes a tensor of it, of another type. (2.11 to 2.15)
"""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock


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
        from torch._dynamo.guards import GuardBuilder
        from torch._dynamo.variables import UserDefinedObjectVariable
        from torch._dynamo.variables.builder import VariableBuilder

        table: dict[Any, Any] = VariableBuilder._type_dispatch()
        stock = table[list]  # of a deque as well

        def left(builder: Any, value: Any) -> Any:
            builder.install_guards(GuardBuilder.TYPE_MATCH)
            return UserDefinedObjectVariable(value, source=builder.source)

        def wrapped(builder: Any, value: Any) -> Any:
            return left(builder, value) if self.grows(value) else stock(builder, value)

        changed: dict[Any, Any] = {list: wrapped, deque: wrapped, random.Random: left}
        if (numpy := sys.modules.get("numpy")) is not None:
            changed[numpy.float64] = lambda builder, value: builder.wrap_symfloat(float(value))
        with mock.patch.dict(table, changed):
            yield
