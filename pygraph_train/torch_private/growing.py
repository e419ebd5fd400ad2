"""An extension of Dynamo: lists that grow and numbers that count from step to step take no trace in each of them.

Dynamo guards the length of a list that outlives a step, so `losses.append(loss)` would be traced anew in every step. It
breaks the graph at such a list instead, and Python appends; also at `append` where a graph ends behind it, as in
`losses.append(loss.item())`: that is another object in each step; and at generators of `random`, of which it would draw
once. It takes integers of global objects for fixed; those that change are numbers here. It would make a tensor of a
float64 of NumPy, of another type. And it takes an array of NumPy for a constant, so that it changes the array itself
while it traces `array += 1`. (2.11 to 2.15)
"""

from __future__ import annotations

import random
import sys
import types
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock


class Growing:
    """The lists and numbers that one function was traced with. A list that has grown since is left to Python."""

    def __init__(self) -> None:
        self._lengths, self._numbers = dict[tuple[str, int], int](), dict[str, int]()

    def grows(self, name: str, value: Any) -> bool:
        """Whether a list has grown since it was traced before, under this name: the next list may have its id."""
        key, length = (name, id(value)), len(value)
        if length > self._lengths.setdefault(key, length):
            self._lengths[key] = -1  # it is left to Python from now on
        return self._lengths[key] < 0

    def counts(self, name: str, value: Any) -> bool:
        """Whether a number of a global object has changed since it was traced before. Dynamo takes it for fixed."""
        counted = type(value) is int and name.startswith("G[")
        return counted and self._numbers.setdefault(name, value) != value

    @contextmanager
    def left_to_python(self) -> Iterator[None]:
        """Around a trace."""
        from torch._dynamo.guards import GuardBuilder
        from torch._dynamo.variables import UserDefinedObjectVariable
        from torch._dynamo.variables.builder import VariableBuilder
        from torch.fx.experimental.symbolic_shapes import DimDynamic

        stock, number, lists = VariableBuilder._wrap, VariableBuilder.wrap_symint, (list, deque)
        numpy = sys.modules.get("numpy")
        double, array = getattr(numpy, "float64", None), getattr(numpy, "ndarray", None)

        def wrap(builder: Any, value: Any) -> Any:
            waits = str(getattr(builder.source, "local_name", "")).startswith("___stack")
            appends = waits and isinstance(value, types.BuiltinMethodType) and type(value.__self__) in lists
            if self.counts(builder.name, value):
                return number(builder, value, DimDynamic.DYNAMIC)
            if (
                appends
                or type(value) in (random.Random, array)
                or (type(value) in lists and self.grows(builder.name, value))
            ):
                builder.install_guards(GuardBuilder.TYPE_MATCH)
                return UserDefinedObjectVariable(value, source=builder.source)
            return builder.wrap_symfloat(float(value)) if type(value) is double else stock(builder, value)

        with mock.patch.object(VariableBuilder, "_wrap", wrap):
            yield
