"""Values in a trace of Dynamo that only a run of the step would know. (2.11, 2.13)"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor

__all__ = ["is_stand_in", "is_text_of_tensor", "one_round", "stand_in_for", "unknown"]


@functools.cache
def _unknown_class() -> type:
    from torch._dynamo.variables.base import VariableTracker

    class Unknown(VariableTracker):
        """A value that only a real run would know. What is made of it is not known either."""

        def python_type(self) -> type:
            return object

        def var_getattr(self, tx: Any, name: str) -> Any:
            return Unknown()

        def call_function(self, tx: Any, args: Any, kwargs: Any) -> Any:
            return Unknown()

        def call_method(self, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
            return Unknown()

        def reconstruct(self, codegen: Any) -> None:
            codegen.append_output(codegen.create_load_const(None))

    return Unknown


def unknown() -> Any:
    return _unknown_class()()


def one_round() -> Any:
    """What a loop over something unknown goes through."""
    from torch._dynamo.variables.base import ValueMutationNew
    from torch._dynamo.variables.lists import ListIteratorVariable

    return ListIteratorVariable([unknown()], mutation_type=ValueMutationNew())


def stand_in_for(operands: list[Any]) -> Any:
    """A result: `loss * unknown` is a tensor as `loss` is."""
    from torch._dynamo.variables.tensor import TensorVariable

    if len(operands) == 2 and any(map(is_stand_in, operands)):
        for operand in operands:
            if type(operand) is TensorVariable:
                return operand
    return unknown()


def is_stand_in(variable: Any, depth: int = 3) -> bool:
    """Whether a value is not known before the step runs, or holds one that is not."""
    from torch._dynamo.variables.dicts import ConstDictVariable
    from torch._dynamo.variables.lists import BaseListVariable
    from torch._dynamo.variables.misc import GetAttrVariable
    from torch._dynamo.variables.tensor import SymNodeVariable, TensorVariable

    if isinstance(variable, GetAttrVariable):  # a method that is about to be called
        return is_stand_in(variable.obj, depth)
    if isinstance(variable, (_unknown_class(), SymNodeVariable)):
        return True
    if type(variable) is TensorVariable:
        return _depends_on_values(variable.proxy.node.meta.get("example_value"))
    if depth and isinstance(variable, BaseListVariable):
        return any(is_stand_in(item, depth - 1) for item in variable.items)
    if depth and type(variable) is ConstDictVariable:
        return any(is_stand_in(item, depth - 1) for item in variable.items.values())
    return is_text_of_tensor(variable)


def is_text_of_tensor(variable: Any) -> bool:
    """Whether it is a text that tensors, or numbers that are read from them, have gone into."""
    from torch._dynamo.variables.tensor import SymNodeVariable, TensorVariable

    if type(variable).__name__ != "StringFormatVariable":
        return False
    values = [*variable.sym_args, *variable.sym_kwargs.values()]
    return any(isinstance(value, (SymNodeVariable, TensorVariable)) for value in values)


def _depends_on_values(value: Any) -> bool:
    """Whether the shape of a fake tensor depends on the values of another one."""
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    return isinstance(value, Tensor) and bool(free_unbacked_symbols(value))
