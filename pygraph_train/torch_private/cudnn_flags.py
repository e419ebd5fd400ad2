"""`with torch.backends.cudnn.flags(...)` under Dynamo, whose graphs end there. (2.11, 2.13)

The graph of a step sets the switches where the block begins, and puts them back where it ends. They decide which
kernels eager operations launch, and so which a capture holds; Inductor knows nothing of them.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch

from pygraph_train.torch_private.changes import Around

__all__ = ["changes", "present_flags", "set_flags"]

Flags = tuple[Any, ...]

_GUARDED = ("enabled", "benchmark", "deterministic", "allow_tf32")
"""Switches that a trace depends on as a whole, whoever reads them."""


def present_flags() -> Flags:
    """The switches of cuDNN as they are now, in the order of the arguments of `torch.backends.cudnn.flags`."""
    flags: Flags = torch.backends.cudnn.set_flags(*[None] * 6)  # type: ignore[no-untyped-call]
    return flags


def set_flags(*flags: Any) -> Flags:
    """Set them, as `flags` does. Returns what they were."""
    with getattr(torch.backends, "__allow_nonbracketed_mutation")():
        before: Flags = torch.backends.cudnn.set_flags(*flags)  # type: ignore[no-untyped-call]
    return before


def put_back(flags: Flags) -> None:
    """Set them to what `set_flags` has returned."""
    set_flags(*flags)


def changes() -> tuple[tuple[Any, str, Any], ...]:
    """(owner, attribute, value), for one trace: such blocks are part of the graph, and switches are read anew."""
    from torch._dynamo.variables.constant import ConstantVariable
    from torch._dynamo.variables.misc import PythonModuleVariable
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

    def reading(var_getattr: Callable[..., Any]) -> Callable[..., Any]:
        def read(self: Any, tx: Any, name: str) -> Any:
            if self.value is torch.backends.cudnn and name in _GUARDED:  # Dynamo would remember it
                return ConstantVariable.create(getattr(self.value, name))
            return var_getattr(self, tx, name)

        return read

    def around(call_function: Callable[..., Any]) -> Callable[..., Any]:
        def called(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
            if self.value is not torch.backends.cudnn.flags:
                return call_function(self, tx, args, kwargs)
            given = [x.as_python_constant() for x in args]
            named = {name: x.as_python_constant() for name, x in kwargs.items()}
            bound = inspect.signature(torch.backends.cudnn.flags).bind(*given, **named)
            bound.apply_defaults()
            return _block()(target_values=bound.args)

        return called

    return (
        (TorchInGraphFunctionVariable, "call_function", Around(around)),
        (PythonModuleVariable, "var_getattr", Around(reading)),
    )


@functools.cache
def _block() -> type:
    from torch._dynamo.variables.constant import ConstantVariable
    from torch._dynamo.variables.ctx_manager import ContextWrappingVariable

    class Block(ContextWrappingVariable):
        """The block while Dynamo traces it."""

        def enter(self, tx: Any) -> Any:
            before = set_flags(*self.target_values)
            self.set_cleanup_hook(tx, lambda: set_flags(*before))
            self.initial_values = tx.output.create_node("call_function", set_flags, self.target_values, {})
            return ConstantVariable.create(None)

        def exit(self, tx: Any, *args: Any) -> Any:
            self.cleanup_assert()
            tx.output.create_node("call_function", put_back, (self.initial_values,), {})
            return ConstantVariable.create(None)

        def module_name(self) -> str:
            return "torch.backends.cudnn"

        def fn_name(self) -> str:
            return "flags"

    return Block
