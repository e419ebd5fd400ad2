"""Numbers of the host that change from step to step, under Dynamo: Python computes with them, and tensors read them.

Such a number is a value of its own kind. Python's arithmetic on it makes others of that kind, and a comparison is
answered and noted. An operation with a tensor gets the number as a tensor without dimensions, which is filled before
each run: see `numbers_with_tensors`.

Everything else ends the graph: powers, `alpha=`, limits, fills. (2.11, 2.13)
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

from pygraph_train.torch_private import host_numbers
from pygraph_train.torch_private.changes import Around
from pygraph_train.torch_private.jumps import conditional_jumps
from pygraph_train.torch_private.numbers_with_tensors import MOST, WITH_TENSORS, is_tensor, with_tensor

__all__ = ["MOST", "LiveRecorder", "changes", "is_live"]


class LiveRecorder(Protocol):
    """Who keeps the numbers of one trace."""

    device: torch.device

    def begin(self, trace: Any) -> None:
        """Dynamo traces: anew, where `trace` is another object than before."""

    def wanted(self, expression: str) -> bool:
        """Whether the number that is read from this expression changes."""

    def read(self, expression: str, value: float) -> Any:
        """A number that is read from outside."""

    def compute(self, fn: Callable[..., Any], args: Sequence[Any]) -> Any:
        """What a function of numbers returns, some of which are the recorder's own."""

    def value(self, number: Any) -> Any:
        """What it is in this trace."""

    def type_of(self, number: Any) -> type:
        """Its type, on which the trace depends from now on."""

    def expressions(self, number: Any) -> Sequence[str]:
        """What it is computed from."""

    def function(self, number: Any) -> Callable[..., Any]:
        """Computes the number from the values of its expressions."""

    def ask(self, number: Any) -> bool:
        """The answer to a condition, on which the trace depends from now on."""

    def tensor(self, number: Any, dtype: torch.dtype, *, inverse: bool) -> Tensor:
        """The number, or its reciprocal, as a tensor that is filled before each run."""

    def refuse(self, number: Any) -> None:
        """Note that something is done with a number that no graph can hold."""


_COMPARISONS = frozenset(getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge"))
_ANSWERS = frozenset({bool, operator.not_, operator.truth})
_ARITHMETIC = frozenset(
    getattr(operator, name)
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "neg", "pos", "abs")
) | {int, float, abs, round, min, max}
_IN_PLACE = {
    getattr(operator, f"i{name}"): getattr(operator, name)
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow")
}
_OF_TYPES = frozenset({isinstance, type, issubclass, callable, hasattr, id})
_STORES = frozenset({setattr, operator.setitem})
_METHODS = {
    **{"add": "add", "sub": "sub", "mul": "mul", "div": "truediv"},
    **{"add_": "iadd", "sub_": "isub", "mul_": "imul", "div_": "itruediv"},
}


def is_live(variable: Any) -> bool:
    """Whether a variable of Dynamo's is such a number."""
    return bool(isinstance(variable, _number_class()))


def changes(recorder: LiveRecorder) -> tuple[tuple[Any, str, Any], ...]:
    """(owner, attribute, value), on top of all others, for one trace."""
    from torch._dynamo import symbolic_convert
    from torch._dynamo.variables.builder import VariableBuilder
    from torch._dynamo.variables.builtin import BuiltinVariable
    from torch._dynamo.variables.lazy import LazyConstantVariable
    from torch._dynamo.variables.misc import StringFormatVariable
    from torch._dynamo.variables.tensor import TensorVariable
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

    hooks = _Hooks(recorder)
    return (
        (VariableBuilder, "_wrap", Around(hooks.wrapping)),
        (LazyConstantVariable, "create", Around(hooks.creating)),
        (StringFormatVariable, "create", Around(hooks.formatting)),
        (BuiltinVariable, "call_function", Around(hooks.computing)),
        (symbolic_convert, "compare_op_handlers", Around(hooks.comparing)),
        (TensorVariable, "call_method", Around(hooks.calling)),
        (TorchInGraphFunctionVariable, "call_function", Around(hooks.computing_with_functions)),
        *conditional_jumps(hooks.truth),
    )


@functools.cache
def _number_class() -> Any:
    from torch._dynamo.variables.base import VariableTracker

    class LiveNumber(VariableTracker):
        """A number of Python that another run of the graph may have another value of."""

        def __init__(self, number: Any, recorder: LiveRecorder, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.number = number
            self.recorder = recorder

        def python_type(self) -> type:
            return self.recorder.type_of(self.number)

        def as_proxy(self) -> Any:
            self.refuse()

        def call_method(self, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
            self.refuse()

        def var_getattr(self, tx: Any, name: str) -> Any:
            self.refuse()

        def refuse(self) -> NoReturn:
            self.recorder.refuse(self.number)
            host_numbers.end_graph("a number that changes is used in a way that no graph can hold")

        def reconstruct(self, codegen: Any) -> None:
            from torch._dynamo.bytecode_transformation import create_call_function

            function = self.recorder.function(self.number)
            name = codegen.tx.output.install_global_by_id("computes_number", function)
            sources = [self.sources[e] for e in self.recorder.expressions(self.number)]
            codegen.add_push_null(lambda: codegen.append_output(codegen.create_load_global(name, add=True)))
            for source in sources:
                codegen(source)
            codegen.extend_output(create_call_function(len(sources), False))

        @property
        def sources(self) -> dict[str, Any]:
            return _sources(self.recorder)

    return LiveNumber


def _sources(recorder: Any) -> dict[str, Any]:
    """Dynamo's sources of what is read, by their expressions."""
    found: dict[str, Any] = recorder.__dict__.setdefault("_sources", {})
    return found


class _Hooks:
    """What Dynamo calls around its own functions."""

    def __init__(self, recorder: LiveRecorder) -> None:
        self._recorder = recorder
        self._class = _number_class()

    def wrapping(self, wrap: Callable[..., Any]) -> Callable[..., Any]:
        """A number that is read from outside."""
        from torch._dynamo.guards import GuardBuilder

        recorder = self._recorder

        def wrapped(builder: Any, value: Any) -> Any:
            if type(value) not in (int, float) or builder.source is None:
                return wrap(builder, value)
            expression = _name(builder.source)
            if not recorder.wanted(expression):
                return wrap(builder, value)
            recorder.begin(builder.tx.output)
            _sources(recorder)[expression] = builder.source
            builder.install_guards(GuardBuilder.TYPE_MATCH)
            return self._class(recorder.read(expression, value), recorder, source=builder.source)

        return wrapped

    def creating(self, create: Any) -> Any:
        """Otherwise Dynamo takes a number that it has not looked at for a constant."""

        def created(value: Any, source: Any, **options: Any) -> Any:
            made = create.__func__(value, source, **options)
            wanted = type(value) in (int, float) and self._recorder.wanted(_name(source))
            return made.realize() if wanted else made

        return staticmethod(created)

    def truth(self, tx: Any, variable: Any) -> bool | None:
        """The answer to a condition that is a number; None for another one."""
        variable = _looked_at(variable, self._recorder)
        if not isinstance(variable, self._class):
            return None
        return self._recorder.ask(self._recorder.compute(bool, [variable.number]))

    def formatting(self, create: Any) -> Any:
        """A text with a number: Dynamo's code would make another one."""

        def created(text: str, args: Any, kwargs: Any) -> Any:
            for x in (*args, *kwargs.values()):
                if is_live(x):
                    x.refuse()
            return create.__func__(text, args, kwargs)

        return staticmethod(created)

    def computing(self, call_function: Callable[..., Any]) -> Callable[..., Any]:
        """Python's operators and functions."""

        def computed(variable: Any, tx: Any, args: Any, kwargs: Any) -> Any:
            args = [_looked_at(x, self._recorder) for x in args]
            live = [x for x in args if isinstance(x, self._class)]
            fn = variable.fn
            if not live or fn in _OF_TYPES or (fn in _STORES and live == [args[-1]]):
                return call_function(variable, tx, args, kwargs)
            args = [x.realize() for x in args]
            if not kwargs and len(args) == 2 and fn in WITH_TENSORS and any(map(is_tensor, args)):
                return self._with_tensor(tx, WITH_TENSORS[fn], *args)
            return self._of_numbers(tx, _IN_PLACE.get(fn, fn), args, kwargs, live[0])

        return computed

    def computing_with_functions(self, call_function: Callable[..., Any]) -> Callable[..., Any]:
        """Functions of `math` and of torch."""

        def computed(variable: Any, tx: Any, args: Any, kwargs: Any) -> Any:
            args = [_looked_at(x, self._recorder) for x in args]
            live = [x for x in args if isinstance(x, self._class)]
            if not live:
                return call_function(variable, tx, args, kwargs)
            args = [x.realize() for x in args]
            fn = variable.value
            if not kwargs and len(args) == 2 and fn in WITH_TENSORS and any(map(is_tensor, args)):
                return self._with_tensor(tx, WITH_TENSORS[fn], *args)
            if getattr(math, getattr(fn, "__name__", ""), None) is fn:
                return self._of_numbers(tx, fn, args, kwargs, live[0])
            live[0].refuse()

        return computed

    def comparing(self, handlers: dict[str, Any]) -> dict[str, Any]:
        """`a < b` and the like."""
        signs = {"==": "eq", "!=": "ne", "<": "lt", "<=": "le", ">": "gt", ">=": "ge"}

        def compared(sign: str, handler: Callable[..., Any]) -> Callable[..., Any]:
            def compare(tx: Any, args: Any, kwargs: Any) -> Any:
                args = [_looked_at(x, self._recorder) for x in args]
                live = [x for x in args if isinstance(x, self._class)]
                if not live:
                    return handler(tx, args, kwargs)
                args = [x.realize() for x in args]
                return self._of_numbers(tx, getattr(operator, signs[sign]), args, kwargs, live[0])

            return compare

        return {**handlers, **{sign: compared(sign, handlers[sign]) for sign in signs}}

    def calling(self, call_method: Callable[..., Any]) -> Callable[..., Any]:
        """Methods of tensors."""

        def called(variable: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
            args = [_looked_at(x, self._recorder) for x in args]
            if len(args) == 1 and not kwargs and name in _METHODS and isinstance(args[0], self._class):
                return self._with_tensor(tx, _METHODS[name], variable, args[0])
            return call_method(variable, tx, name, args, kwargs)

        return called

    def _of_numbers(self, tx: Any, fn: Any, args: Sequence[Any], kwargs: Any, live: Any) -> Any:
        from torch._dynamo.variables.constant import ConstantVariable

        pure = fn in _ARITHMETIC or fn in _COMPARISONS or fn in _ANSWERS or fn.__module__ == "math"
        values = [x.number if isinstance(x, self._class) else _constant(x) for x in args]
        if not pure or kwargs or any(x is _NONE for x in values):
            live.refuse()
        number = self._recorder.compute(fn, values)
        if type(self._recorder.value(number)) is bool:
            return ConstantVariable.create(self._recorder.ask(number))
        if type(self._recorder.value(number)) not in (int, float):
            live.refuse()
        return self._class(number, self._recorder)

    def _with_tensor(self, tx: Any, name: str, left: Any, right: Any) -> Any:
        """An operation of a tensor and a number."""
        first = isinstance(left, self._class)
        live, tensor = (left, right) if first else (right, left)
        made = with_tensor(
            tx, name, tensor, live.number, self._recorder, functools.partial(self._built, tx), first=first
        )
        if made is None:
            live.refuse()
        return made

    def _built(self, tx: Any, tensor: Tensor) -> Any:
        """A tensor of the recorder's as an input of the graph."""
        from torch._dynamo.source import GlobalSource
        from torch._dynamo.variables.builder import VariableBuilder

        name = tx.output.install_global_by_id("live_number", tensor)
        return VariableBuilder(tx, GlobalSource(name))(tensor)


_NONE: Any = object()


def _constant(variable: Any) -> Any:
    try:
        value = variable.as_python_constant() if variable.is_python_constant() else _NONE
    except NotImplementedError:
        return _NONE
    return value if type(value) in (int, float, bool, type(None)) else _NONE


def _looked_at(variable: Any, recorder: LiveRecorder) -> Any:
    """What Dynamo has put off looking at, where that is a number: it may be one of these."""
    from torch._dynamo.variables.lazy import LazyVariableTracker

    if not isinstance(variable, LazyVariableTracker):
        return variable
    if variable.is_realized():
        return variable.realize()
    is_number = type(variable.peek_value()) in (int, float)
    return variable.realize() if is_number and recorder.wanted(_name(variable.source)) else variable


def _name(source: Any) -> str:
    name = source.name
    return str(name() if callable(name) else name)
