"""Attributes of a `torch.autograd.Function`'s class that its methods read. Dynamo does not trace them (2.11, 2.13)."""

from __future__ import annotations

import functools
import inspect
from typing import Any

__all__ = ["mends"]

_CONSTANTS = (bool, int, float, str, type(None))


@functools.cache
def mends() -> tuple[tuple[Any, str, Any], ...]:
    """Let Dynamo read numbers, strings and the like of such a class, with a guard for each."""
    from torch._dynamo.source import AttrSource
    from torch._dynamo.variables.base import VariableTracker
    from torch._dynamo.variables.misc import AutogradFunctionVariable

    stock = VariableTracker.var_getattr  # which `AutogradFunctionVariable` has from there

    def var_getattr(self: Any, tx: Any, name: str) -> Any:
        if isinstance(self, AutogradFunctionVariable) and self.source is not None:
            value = inspect.getattr_static(self.fn_cls, name, self)
            if type(value) in _CONSTANTS:
                return VariableTracker.build(tx, value, AttrSource(self.source, name))
        return stock(self, tx, name)

    return ((VariableTracker, "var_getattr", var_getattr),)
