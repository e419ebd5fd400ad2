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
from typing import Any

import torch
from torch import Tensor

from pygraph_train.torch_private import host_numbers
from pygraph_train.torch_private.changes import Around
from pygraph_train.torch_private.dynamic_shapes import source_of_size
from pygraph_train.torch_private.jumps import conditional_jumps, instructions
from pygraph_train.torch_private.live_variables import (
    NO_CONSTANT,
    LiveRecorder,
    constant_of,
    is_live,
    is_symbol,
    live_class,
    looked_at,
    name_of,
    sources_of,
)
from pygraph_train.torch_private.numbers_with_tensors import MOST, WITH_TENSORS, is_tensor, with_tensor

__all__ = ["MOST", "changes"]


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
_OPERATORS = frozenset(_IN_PLACE) | frozenset(_IN_PLACE.values())
_TEXTS = {str: "{!s}", repr: "{!r}"}
_WAITS = frozenset({round, min, max, *_TEXTS})
_CONVERSIONS = ("", "!s", "!r", "!a")
_OF_TYPES = frozenset({isinstance, type, issubclass, callable, hasattr, id})
_ASKING = frozenset(
    {"__contains__", "index", "count", "remove", "sort", "__eq__", "__ne__", "__lt__", "__gt__"}
)
"""Methods of lists and tuples: Dynamo compares constants with constants alone."""
_STORES = frozenset({setattr, operator.setitem})
_METHODS = {
    **{"add": "add", "sub": "sub", "mul": "mul", "div": "truediv"},
    **{"add_": "iadd", "sub_": "isub", "mul_": "imul", "div_": "itruediv"},
}


def changes(recorder: LiveRecorder) -> tuple[tuple[Any, str, Any], ...]:
    """(owner, attribute, value), on top of all others, for one trace."""
    from torch._dynamo import symbolic_convert
    from torch._dynamo import utils as dynamo_utils
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase
    from torch._dynamo.variables import lists
    from torch._dynamo.variables.builder import VariableBuilder
    from torch._dynamo.variables.builtin import BuiltinVariable
    from torch._dynamo.variables.lazy import LazyConstantVariable
    from torch._dynamo.variables.lists import BaseListVariable
    from torch._dynamo.variables.misc import StringFormatVariable
    from torch._dynamo.variables.tensor import TensorVariable
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

    hooks = _Hooks(recorder)
    return (
        (VariableBuilder, "_wrap", Around(hooks.wrapping)),
        (LazyConstantVariable, "create", Around(hooks.creating)),
        (StringFormatVariable, "create", Around(hooks.formatting)),
        (dynamo_utils, "iter_contains", Around(hooks.containing)),
        (lists, "iter_contains", Around(hooks.containing)),
        (BaseListVariable, "call_method", Around(hooks.of_lists)),
        (InstructionTranslatorBase, "_format_value", Around(hooks.formatting_value)),
        (BuiltinVariable, "call_function", Around(hooks.computing)),
        (symbolic_convert, "compare_op_handlers", Around(hooks.comparing)),
        (TensorVariable, "call_method", Around(hooks.calling)),
        (TorchInGraphFunctionVariable, "call_function", Around(hooks.computing_with_functions)),
        *conditional_jumps(hooks.truth),
        *instructions("BUILD_STRING", hooks.joining),
    )


class _Hooks:
    """What Dynamo calls around its own functions."""

    def __init__(self, recorder: LiveRecorder) -> None:
        self._recorder = recorder
        self._class = live_class()

    def wrapping(self, wrap: Callable[..., Any]) -> Callable[..., Any]:
        """A number that is read from outside."""
        recorder = self._recorder

        def wrapped(builder: Any, value: Any) -> Any:
            if type(value) not in (int, float) or builder.source is None:
                return wrap(builder, value)
            expression = name_of(builder.source)
            if not recorder.wanted(expression):
                return wrap(builder, value)
            recorder.begin(builder.tx.output)
            sources_of(recorder)[expression] = builder.source
            return self._class(recorder.read(expression, value), recorder, source=builder.source)

        return wrapped

    def creating(self, create: Any) -> Any:
        """Otherwise Dynamo takes a number that it has not looked at for a constant."""

        def created(value: Any, source: Any, **options: Any) -> Any:
            made = create.__func__(value, source, **options)
            wanted = type(value) in (int, float) and self._recorder.wanted(name_of(source))
            return made.realize() if wanted else made

        return staticmethod(created)

    def truth(self, tx: Any, variable: Any) -> bool | None:
        """The answer to a condition that is a number; None for another one."""
        variable = looked_at(variable, self._recorder)
        if not isinstance(variable, self._class):
            return None
        answer = self._recorder.compute(bool, [variable.number])
        return variable.refuse() if answer is None else self._recorder.ask(answer)

    def formatting(self, create: Any) -> Any:
        """A text with a number: Dynamo's code would make another one."""
        from torch._dynamo.symbolic_convert import InstructionTranslator

        def created(text: str, args: Any, kwargs: Any) -> Any:
            tx = InstructionTranslator.current_tx()
            args = [self._number(tx, x, sizes=False) for x in args]
            live = [x for x in (*args, *kwargs.values()) if is_live(x)]
            if not live:
                return create.__func__(text, args, kwargs)
            return live[0].refuse() if kwargs else self._text(text, args)

        return staticmethod(created)

    def formatting_value(self, format_value: Callable[..., Any]) -> Callable[..., Any]:
        """`f"{x:.3f}"`"""

        def formatted(tx: Any, fmt_spec: Any, flags: int) -> Any:
            number = self._number(tx, looked_at(tx.stack[-1], self._recorder), sizes=False)
            if not is_live(number):
                return format_value(tx, fmt_spec, flags)
            tx.pop()
            text = "{" + _CONVERSIONS[flags & 3] + ":" + fmt_spec.as_python_constant() + "}"
            return tx.push(self._text(text, [number]))

        return formatted

    def joining(self, build_string: Callable[..., Any]) -> Callable[..., Any]:
        """Parts of such a text."""

        def joined(tx: Any, inst: Any) -> Any:
            if not any(map(is_live, tx.stack[-inst.arg :])):
                return build_string(tx, inst)
            parts = tx.popn(inst.arg)
            return tx.push(self._text("{}" * len(parts), parts))

        return joined

    def _text(self, text: str, parts: Sequence[Any]) -> Any:
        live = [x for x in parts if is_live(x)]
        values = [x.number if is_live(x) else constant_of(x, texts=True) for x in parts]
        made = None if NO_CONSTANT in values else self._recorder.compute(self._recorder.text(text), values)
        return live[0].refuse() if made is None else self._made(made, live)

    def computing(self, call_function: Callable[..., Any]) -> Callable[..., Any]:
        """Python's operators and functions."""

        def computed(variable: Any, tx: Any, args: Any, kwargs: Any) -> Any:
            args = [looked_at(x, self._recorder) for x in args]
            live = [x for x in args if isinstance(x, self._class)]
            fn = variable.fn
            if not live and self._waits(tx, fn, args):
                return self._of_numbers(tx, _IN_PLACE.get(fn, fn), args, kwargs)
            if fn is isinstance and (answer := self._is_instance(args)) is not None:
                return answer
            if not live or fn in _OF_TYPES or (fn in _STORES and live == [args[-1]]):
                return call_function(variable, tx, args, kwargs)
            args = [x.realize() for x in args]
            if not kwargs and len(args) == 2 and fn in WITH_TENSORS and any(map(is_tensor, args)):
                return self._with_tensor(tx, WITH_TENSORS[fn], *args)
            return self._of_numbers(tx, _IN_PLACE.get(fn, fn), args, kwargs)

        return computed

    def _is_instance(self, args: Sequence[Any]) -> Any:
        """The answer where it is the same for each type that a number may have; None where nothing is known of it."""
        from torch._dynamo.variables.constant import ConstantVariable

        if not is_live(args[0]) or not self._recorder.is_late(args[0].number):
            return None
        classes = args[1].realize().as_python_constant()
        answers = {isinstance(kind(), classes) for kind in self._recorder.types_of(args[0].number)}
        return ConstantVariable.create(answers.pop()) if len(answers) == 1 else None

    def _waits(self, tx: Any, fn: Any, args: Sequence[Any]) -> bool:
        """Whether Dynamo's graph cannot compute with a number that is read of a tensor, but Python can when the graph
        has run."""
        if (fn not in _WAITS and fn not in _OPERATORS) or not any(map(is_symbol, args)):
            return False
        read = [is_live(self._number(tx, x, sizes=False)) for x in args]
        return any(read) and (
            fn in _WAITS or (fn in _OPERATORS and all(map(is_symbol, args)) and not all(read))
        )

    def computing_with_functions(self, call_function: Callable[..., Any]) -> Callable[..., Any]:
        """Functions of `math` and of torch."""

        def computed(variable: Any, tx: Any, args: Any, kwargs: Any) -> Any:
            args = [looked_at(x, self._recorder) for x in args]
            live = [x for x in args if isinstance(x, self._class)]
            if not live:
                return call_function(variable, tx, args, kwargs)
            args = [x.realize() for x in args]
            fn = variable.value
            if not kwargs and len(args) == 2 and fn in WITH_TENSORS and any(map(is_tensor, args)):
                return self._with_tensor(tx, WITH_TENSORS[fn], *args)
            if getattr(math, getattr(fn, "__name__", ""), None) is fn:
                return self._of_numbers(tx, fn, args, kwargs)
            live[0].refuse()

        return computed

    def comparing(self, handlers: dict[str, Any]) -> dict[str, Any]:
        """`a < b` and the like."""
        signs = {"==": "eq", "!=": "ne", "<": "lt", "<=": "le", ">": "gt", ">=": "ge"}

        def compared(sign: str, handler: Callable[..., Any]) -> Callable[..., Any]:
            def compare(tx: Any, args: Any, kwargs: Any) -> Any:
                args = [looked_at(x, self._recorder) for x in args]
                live = [x for x in args if isinstance(x, self._class)]
                if not live:
                    return handler(tx, args, kwargs)
                args = [x.realize() for x in args]
                return self._of_numbers(tx, getattr(operator, signs[sign]), args, kwargs)

            return compare

        return {**handlers, **{sign: compared(sign, handlers[sign]) for sign in signs}}

    def containing(self, iter_contains: Callable[..., Any]) -> Callable[..., Any]:
        """A constant among others, which Dynamo compares with constants alone."""

        def contains(items: Any, search: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
            items = list(items)
            if not is_live(looked_at(search, self._recorder)):
                self._refuse_any(items)
            return iter_contains(items, search, tx, *args, **kwargs)

        return contains

    def of_lists(self, call_method: Callable[..., Any]) -> Callable[..., Any]:
        """Methods of lists and tuples."""

        def called(variable: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
            if name in _ASKING and name != "__contains__":  # which is `containing`
                self._refuse_any([variable, *args])
            return call_method(variable, tx, name, args, kwargs)

        return called

    def _refuse_any(self, variables: Sequence[Any]) -> None:
        from torch._dynamo.variables.lists import BaseListVariable

        for variable in variables:
            if is_live(looked_at(variable, self._recorder)):
                looked_at(variable, self._recorder).refuse()
            if isinstance(variable, BaseListVariable):
                self._refuse_any(variable.items)

    def calling(self, call_method: Callable[..., Any]) -> Callable[..., Any]:
        """Methods of tensors."""

        def called(variable: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
            args = [looked_at(x, self._recorder) for x in args]
            if len(args) == 1 and not kwargs and name in _METHODS and isinstance(args[0], self._class):
                return self._with_tensor(tx, _METHODS[name], variable, args[0])
            return call_method(variable, tx, name, args, kwargs)

        return called

    def _of_numbers(self, tx: Any, fn: Any, args: Sequence[Any], kwargs: Any) -> Any:
        from torch._dynamo.variables.constant import ConstantVariable

        if fn is round and list(kwargs) == ["ndigits"]:
            args, kwargs = [*args, kwargs["ndigits"]], {}
        args = [self._number(tx, x) for x in args]
        live = [x for x in args if isinstance(x, self._class)]
        for x in args:
            if is_symbol(x):  # a counter, which is a number of this kind in the next trace
                self._recorder.met_counter = True
                host_numbers.end_graph("SymNodeVariable: a number that changes is an input of the graph")
        if fn in _TEXTS and len(args) == 1 and not kwargs:
            return self._text(_TEXTS[fn], args)
        pure = fn in _ARITHMETIC or fn in _COMPARISONS or fn in _ANSWERS
        pure = pure or getattr(fn, "__module__", None) == "math"
        values = [x.number if isinstance(x, self._class) else constant_of(x) for x in args]
        if not pure or kwargs or any(x is NO_CONSTANT for x in values):
            live[0].refuse()
        number = self._recorder.compute(fn, values)
        if number is None:
            next(x for x in live if self._recorder.is_late(x.number)).refuse()
        if type(self._recorder.value(number)) is bool:
            return ConstantVariable.create(self._recorder.ask(number))
        if type(self._recorder.value(number)) not in (int, float):
            live[0].refuse()
        return self._made(number, live)

    def _made(self, number: Any, live: Sequence[Any]) -> Any:
        read = {name: variable for x in live for name, variable in x.read.items()}
        return self._class(number, self._recorder, read)

    def _number(self, tx: Any, variable: Any, *, sizes: bool = True) -> Any:
        """What is read of a tensor, or the size of one, as a number of this kind; anything else as it is."""
        if not is_symbol(variable) or tx.output.current_tracer is not tx.output.root_tracer:
            return variable
        variable, recorder = variable.realize(), self._recorder
        value, node = variable.sym_num, variable.as_proxy().node
        if isinstance(value, torch.SymInt | torch.SymFloat) and recorder.is_read(node):
            recorder.begin(tx.output)
            name, number = recorder.of_tensor(node, is_float=isinstance(value, torch.SymFloat))
            return self._class(number, recorder, {name: variable})
        if not sizes or not isinstance(value, torch.SymInt):
            return variable
        recorder.begin(tx.output)
        number = self._of_sizes(node)
        return variable if number is None else self._class(number, recorder)

    def _of_sizes(self, node: Any) -> Any:
        """What Dynamo's graph computes of sizes and constants alone; None for anything else."""
        if type(node) is int:
            return node
        value = node.meta.get("example_value") if isinstance(node, torch.fx.Node) else None
        if not isinstance(value, torch.SymInt):
            return None
        if (source := source_of_size(value)) is not None:
            sources_of(self._recorder)[name_of(source)] = source
            return self._recorder.read(name_of(source), value.node.hint)
        if node.op != "call_function" or node.target not in _OPERATORS or node.kwargs:
            return None
        args = [self._of_sizes(x) for x in node.args]
        fn = _IN_PLACE.get(node.target, node.target)
        return None if None in args else self._recorder.compute(fn, args)

    def _with_tensor(self, tx: Any, name: str, left: Any, right: Any) -> Any:
        """An operation of a tensor and a number."""
        first = isinstance(left, self._class)
        live, tensor = (left, right) if first else (right, left)
        if self._recorder.is_late(live.number):
            live.refuse()
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
