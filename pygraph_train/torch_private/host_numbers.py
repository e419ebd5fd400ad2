"""Numbers of the host under Dynamo: what Python makes of them, not what torch would.

Dynamo turns a NumPy scalar into a tensor of its dtype, computes NumPy functions with torch, and passes what
`random` draws as a tensor. Then `loss * np.float64(0.3)` is a float64 loss where eager has a float32 one, sums
are rounded in another way, and `np.random` draws from torch's generator. Here a NumPy scalar is a constant with
a guard, a NumPy function of constants is computed by NumPy, and everything else ends the graph. (2.11, 2.13)
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any, NoReturn

import numpy as np
import torch

from pygraph_train.torch_private import named_tuples, texts

__all__ = ["end_graph", "mends"]

_TENSOR_MAKERS = (torch.tensor, torch.as_tensor, torch.asarray)
"""They take the dtype of a NumPy scalar; every other function takes its value alone."""

_OPERATORS = frozenset(
    getattr(operator, name)
    for name in (
        *("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "neg", "pos", "abs"),
        *("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow"),
        *("eq", "ne", "lt", "le", "gt", "ge", "not_", "truth"),
    )
) | {float, int, bool, abs, round, max, min, pow}


@functools.cache
def mends() -> tuple[tuple[Any, str, Any], ...]:
    """(owner, attribute, value): what Dynamo gets while we trace. `config.trace_numpy` has to be False."""
    from torch._dynamo import symbolic_convert
    from torch._dynamo.variables import misc, user_defined
    from torch._dynamo.variables.builder import SourcelessBuilder, VariableBuilder
    from torch._dynamo.variables.builtin import BuiltinVariable
    from torch._dynamo.variables.constant import ConstantVariable
    from torch._dynamo.variables.misc import NumpyVariable
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

    return (
        (VariableBuilder, "_wrap", _wrapping(VariableBuilder._wrap)),
        (ConstantVariable, "__init__", _constructing(ConstantVariable.__init__)),
        (ConstantVariable, "create", staticmethod(_creating(ConstantVariable.create))),
        (SourcelessBuilder, "create", staticmethod(_building(SourcelessBuilder.create))),
        (BuiltinVariable, "call_function", _computing(BuiltinVariable.call_function)),
        (BuiltinVariable, "_call_min_max_binary", _choosing(BuiltinVariable._call_min_max_binary)),
        (symbolic_convert, "compare_op_handlers", _comparing(symbolic_convert.compare_op_handlers)),
        (NumpyVariable, "call_function", _folding()),
        (
            TorchInGraphFunctionVariable,
            "call_function",
            _refusing_dtypes(TorchInGraphFunctionVariable.call_function),
        ),
        (user_defined, "call_random_fn", _refuse_random),
        (misc, "call_random_fn", _refuse_random),
    )


@functools.cache
def _scalar_class() -> type:
    from torch._dynamo.codegen import PyCodegen
    from torch._dynamo.variables.constant import ConstantVariable

    class NumPyScalar(ConstantVariable):
        """A NumPy scalar: arithmetic on it is NumPy's own, and operations on tensors take its value."""

        def __init__(self, value: np.generic, **kwargs: Any) -> None:
            super().__init__(value.item(), **kwargs)
            self.value = value

        def as_proxy(self) -> Any:
            return self.value.item()

        def reconstruct(self, codegen: PyCodegen) -> None:
            name = codegen.tx.output.install_global_by_id("numpy_scalar", self.value)
            codegen.append_output(codegen.create_load_global(name, add=True))

    return NumPyScalar


def _is_scalar(value: object) -> bool:
    return isinstance(value, (np.number, np.bool_))


def _wrapping(wrap: Callable[..., Any]) -> Callable[..., Any]:
    """A NumPy scalar that is read from outside gets a guard for its type and value."""
    from torch._dynamo.guards import GuardBuilder

    def wrapped(self: Any, value: Any) -> Any:
        if isinstance(
            value, np.ndarray
        ):  # Dynamo computes with its present values, and sets no guard for them
            end_graph("it reads a NumPy array, whose values a graph would hold")
        if not _is_scalar(value):
            return wrap(self, value)
        if value != value or isinstance(value, np.bool_):
            end_graph(f"Dynamo has no guard for a numpy.{type(value).__name__} that is {value}")
        self.install_guards(GuardBuilder.CONSTANT_MATCH)
        return _scalar_class()(value, source=self.source)

    return wrapped


def _creating(create: Callable[..., Any]) -> Callable[..., Any]:
    """Constants that are computed from NumPy scalars stay NumPy scalars."""

    def created(value: Any, **kwargs: Any) -> Any:
        return _scalar_class()(value, **kwargs) if _is_scalar(value) else create(value, **kwargs)

    return created


def _constructing(init: Callable[..., None]) -> Callable[..., None]:
    """Dynamo would make a Python number of a NumPy scalar here, and go on with Python's arithmetic."""

    def constructed(self: Any, value: Any, **kwargs: Any) -> None:
        if _is_scalar(value):
            end_graph(f"Dynamo knows no numpy.{type(value).__name__} here")
        init(self, value, **kwargs)

    return constructed


def _building(create: Callable[..., Any]) -> Callable[..., Any]:
    """As `_creating`, where Dynamo does not know that it has a constant."""

    def built(tx: Any, value: Any) -> Any:
        return _scalar_class()(value) if _is_scalar(value) else create(tx, value)

    return built


def _computing(call_function: Callable[..., Any]) -> Callable[..., Any]:
    """Operators on NumPy scalars and other constants are NumPy's."""
    from torch._dynamo.variables.constant import ConstantVariable

    def computed(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        texts.refuse_questions(self.fn, args)
        args = named_tuples.as_plain(self.fn, args)
        of_scalars = self.fn in _OPERATORS and not kwargs and any(map(_stands_for_scalar, args))
        if of_scalars and all(x.is_python_constant() for x in args):
            return ConstantVariable.create(self.fn(*[x.as_python_constant() for x in args]))
        if of_scalars and any(map(_is_symbol, args)):
            end_graph("Python computes with a NumPy scalar and a number that the graph has")
        return call_function(self, tx, args, kwargs)

    return computed


def _choosing(choose: Callable[..., Any]) -> Callable[..., Any]:
    """The least and the greatest of an integer and a float: Dynamo's graph has a float in the place of each."""

    def chosen(self: Any, tx: Any, a: Any, b: Any) -> Any:
        given = [x.realize() for x in (a, b) if x is not None]
        if any(map(_is_symbol, given)):
            kinds = {_kind(x) for x in given} - {None}
            if len(kinds) > 1 or any(map(_stands_for_scalar, given)):
                end_graph("Python chooses between numbers of several types, one of which the graph has")
        return choose(self, tx, a, b)

    return chosen


def _comparing(handlers: dict[str, Any]) -> dict[str, Any]:
    """`a == b` and the like: their handlers were bound before `_computing` could take their place."""
    from torch._dynamo.variables.builtin import BuiltinVariable

    computed = _computing(BuiltinVariable.call_function)
    signs = {"==": "eq", "!=": "ne", "<": "lt", "<=": "le", ">": "gt", ">=": "ge"}
    ours = {
        sign: functools.partial(computed, BuiltinVariable(getattr(operator, op)))
        for sign, op in signs.items()
    }
    return {**handlers, **ours}


def _folding() -> Callable[..., Any]:
    """NumPy computes its functions of constants itself, where they return a scalar."""
    from torch._dynamo.variables.constant import ConstantVariable

    def folded(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        given = [*args, *kwargs.values()]
        makes_scalar = isinstance(self.value, type) and issubclass(self.value, np.generic)
        pure = makes_scalar or isinstance(self.value, np.ufunc)
        if pure and all(x.is_python_constant() for x in given):
            found = self.value(
                *[x.as_python_constant() for x in args],
                **{name: x.as_python_constant() for name, x in kwargs.items()},
            )
            if _is_scalar(found):
                return ConstantVariable.create(found)
        end_graph(f"numpy.{getattr(self.value, '__name__', self.value)} runs on the host")

    return folded


def _refusing_dtypes(call_function: Callable[..., Any]) -> Callable[..., Any]:
    def refused(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if self.value in _TENSOR_MAKERS and any(map(_holds_scalar, [*args, *kwargs.values()])):
            end_graph("a tensor is made of a NumPy scalar, whose dtype it takes")
        return call_function(self, tx, args, kwargs)

    return refused


def _stands_for_scalar(variable: Any) -> bool:
    """Looks at what Dynamo has not looked at yet without having it guarded: a dict would have guards for each item."""
    from torch._dynamo.variables.lazy import LazyVariableTracker

    if isinstance(variable, LazyVariableTracker):
        if not variable.is_realized():
            return _is_scalar(variable.peek_value())
        variable = variable.realize()
    return isinstance(variable, _scalar_class())


def _is_symbol(variable: Any) -> bool:
    """Whether Dynamo's graph has the number."""
    from torch._dynamo.variables.lazy import LazyVariableTracker
    from torch._dynamo.variables.tensor import SymNodeVariable

    if isinstance(variable, LazyVariableTracker):
        return variable.is_realized() and _is_symbol(variable.realize())
    return isinstance(variable, SymNodeVariable)


def _kind(variable: Any) -> type | None:
    if _is_symbol(variable):
        kind: type = variable.python_type()
        return kind
    return type(variable.as_python_constant()) if variable.is_python_constant() else None


def _holds_scalar(variable: Any) -> bool:
    from torch._dynamo.variables.lists import BaseListVariable

    if isinstance(variable, _scalar_class()):
        return True
    return isinstance(variable, BaseListVariable) and any(map(_holds_scalar, variable.items))


def _refuse_random(*_: Any) -> NoReturn:
    end_graph("Python's random module draws a number on the host")


def end_graph(why: str, where: str | None = None) -> NoReturn:
    """Let Dynamo end its graph.

    Args:
        why: without a full stop.
        where: `file:line`, if what ends it was made in another line than the one that is traced.
    """
    from torch._dynamo.exc import unimplemented

    path, _, line = (where or "").rpartition(":")
    unimplemented(
        gb_type="number of the host",
        context=f'{why}\n  File "{path}", line {line}, in the step' if where else why,
        explanation=why,
        hints=["Make it a tensor before the step, or draw it there"],
    )
