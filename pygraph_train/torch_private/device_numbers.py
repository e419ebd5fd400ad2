"""Whole numbers that a step reads of its own tensors, under Dynamo, where nothing but the shift of a roll follows.

No graph can hold `int(delays[i])`, because the host waits for the device there. `x.roll(-int(delays[i]), 1)` needs
no number on the host: `rolled` takes it where it is, as `selected` does for a column. So it is a value of its own kind,
which stands for a copy of the tensor. Signs, sums, differences, products and remainders with small constants make
others of that kind.

Where anything else is done with such a number, the trace is given up, and the next one has what Dynamo has.

(2.11, 2.13)
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

from pygraph_train.torch_private import host_numbers
from pygraph_train.torch_private.changes import Around, before_examples
from pygraph_train.torch_private.drawn_numbers import DrawRecorder, graph_of, place_in
from pygraph_train.torch_private.jumps import conditional_jumps
from pygraph_train.torch_private.numbers_with_tensors import is_tensor
from pygraph_train.torch_private.rolled import can_be_rolled, rolled
from pygraph_train.torch_private.selected import let_select

__all__ = ["ASKING", "NumberReader", "changes", "is_device_number"]


class NumberReader(DrawRecorder, Protocol):
    """Who knows where such numbers are read."""

    def holds_number(self, where: str) -> bool:
        """Whether a number that is read there is held in a tensor: the function reads it, and the graph does not."""

    def leave_number(self, where: str) -> None:
        """A number that is read there is left to the step from now on."""


_WITH_NUMBERS = {
    **{getattr(operator, name): getattr(operator, name) for name in ("add", "sub", "mul", "mod")},
    **{getattr(operator, f"i{name}"): getattr(operator, name) for name in ("add", "sub", "mul", "mod")},
}
_OF_TYPES = frozenset({isinstance, type, issubclass})
_OF_LISTS = frozenset({max, min, sum, sorted, any, all, set, frozenset, operator.contains})
ASKING = frozenset(
    {"__contains__", "index", "count", "remove", "sort", "__eq__", "__ne__", "__lt__", "__gt__"}
)
"""Methods of lists and tuples: Dynamo compares constants with constants alone."""
_WHOLE = frozenset({torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8})
_SMALL = 2**20
"""Constants of this size lead no number that is a place in a tensor out of 64 bits."""


def changes(reader: NumberReader) -> tuple[tuple[Any, str, Any], ...]:
    """(owner, attribute, value), on top of those of `host_draws`, for one trace."""
    from torch._dynamo import symbolic_convert
    from torch._dynamo import utils as dynamo_utils
    from torch._dynamo.variables import lists
    from torch._dynamo.variables.builtin import BuiltinVariable
    from torch._dynamo.variables.lists import BaseListVariable
    from torch._dynamo.variables.misc import StringFormatVariable
    from torch._dynamo.variables.tensor import TensorVariable
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

    hooks = _Hooks(reader)
    return (
        (TensorVariable, "method_item", Around(hooks.reading)),
        (TensorVariable, "call_method", Around(hooks.calling)),
        (BuiltinVariable, "call_function", Around(hooks.computing)),
        (TorchInGraphFunctionVariable, "call_function", Around(hooks.calling_functions)),
        (symbolic_convert, "compare_op_handlers", Around(hooks.comparing)),
        (StringFormatVariable, "create", Around(hooks.formatting)),
        *before_examples(hooks.selecting),
        (dynamo_utils, "iter_contains", Around(hooks.containing)),
        (lists, "iter_contains", Around(hooks.containing)),
        (BaseListVariable, "call_method", Around(hooks.of_lists)),
        *hooks.comparing_symbols(),
        *conditional_jumps(hooks.truth),
    )


def is_device_number(variable: Any) -> bool:
    """Whether a variable of Dynamo's is such a number."""
    return isinstance(variable, _number_class())


@functools.cache
def _number_class() -> Any:
    from torch._dynamo.variables.base import VariableTracker

    class DeviceNumber(VariableTracker):
        """A whole number of Python, of which the graph has a tensor."""

        def __init__(self, tensor: Any, where: frozenset[str], reader: NumberReader, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.tensor = tensor
            self.where = where
            self.reader = reader

        def python_type(self) -> type:
            return int

        def refuse(self, *_: Any, **__: Any) -> NoReturn:
            for where in self.where:
                self.reader.leave_number(where)
            host_numbers.end_graph("a value is read on the host, and more than the shift of a roll follows")

        as_proxy = call_method = call_function = var_getattr = reconstruct = refuse
        unpack_var_sequence = force_unpack_var_sequence = refuse
        # as a key of a dict or in a set
        is_hashable = is_python_hashable = hash_impl = get_python_hash = refuse
        richcompare_impl = refuse

    return DeviceNumber


class _Hooks:
    """What Dynamo calls around its own functions."""

    def __init__(self, reader: NumberReader) -> None:
        self._reader = reader
        self._class = _number_class()

    # -- where numbers come from ------------------------------------------------------------------------

    def reading(self, method_item: Callable[..., Any]) -> Callable[..., Any]:
        """`tensor.item()`."""

        def item(variable: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
            number = self._read(tx, variable)
            return method_item(variable, tx, *args, **kwargs) if number is None else number

        return item

    def _read(self, tx: Any, variable: Any) -> Any:
        """A number in the place of what is read; None for one that is drawn or read ahead, or left to the step."""
        if not is_tensor(variable) or tx.output.current_tracer is not tx.output.root_tracer:
            return None
        node, where = variable.as_proxy().node, place_in(tx)
        example = node.meta.get("example_value")
        if node.graph is not graph_of(tx) or where is None or not isinstance(example, Tensor):
            return None
        if example.dim() or example.dtype not in _WHOLE or example.device.type != self._reader.device.type:
            return None
        reader = self._reader
        reader.begin(node.graph)
        known = reader.slot_of(node) is not None or reader.read(node, where) is not None
        if known or not reader.holds_number(where):
            return None
        return self._number(self._copied(tx, variable), frozenset({where}))

    def _copied(self, tx: Any, variable: Any) -> Any:
        """The tensor as it is now, with 64 bits."""
        from torch._dynamo.variables.constant import ConstantVariable

        whole, copy = ConstantVariable.create(torch.int64), ConstantVariable.create(True)
        return variable.call_method(tx, "to", [whole], {"copy": copy})

    def _number(self, tensor: Any, where: frozenset[str]) -> Any:
        return self._class(tensor, where, self._reader)

    def selecting(self, node: Any, tx: Any) -> None:
        """Before Dynamo computes what a node is like: `x[:, places[i]]` reads a place."""

        def allowed() -> str | None:
            inside = tx.output.current_tracer is not tx.output.root_tracer
            where = None if inside or node.graph is not graph_of(tx) else place_in(tx)
            if where is None:
                return None
            self._reader.begin(node.graph)
            return where if self._reader.holds_number(where) else None

        let_select(node, allowed)

    # -- what is done with them ---------------------------------------------------------------------------

    def computing(self, call_function: Callable[..., Any]) -> Callable[..., Any]:
        """Python's operators and functions."""

        def computed(variable: Any, tx: Any, args: Any, kwargs: Any) -> Any:
            fn = variable.fn
            if fn is int and len(args) == 1 and not kwargs and (read := self._read(tx, args[0])) is not None:
                return read
            if fn in _OF_LISTS:
                self._refuse_any(args)
            if fn in _OF_TYPES or not any(isinstance(x, self._class) for x in args):
                return call_function(variable, tx, args, kwargs)
            return self._computed(tx, fn, args, kwargs)

        return computed

    def _computed(self, tx: Any, fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        from torch._dynamo.variables.builtin import BuiltinVariable

        numbers = [x for x in args if isinstance(x, self._class)]
        where = frozenset().union(*(x.where for x in numbers))
        if not kwargs and len(args) == 1 and fn in (int, operator.index, operator.pos):
            return args[0]
        if not kwargs and len(args) == 1 and fn is operator.neg:
            return self._number(BuiltinVariable(fn).call_function(tx, [args[0].tensor], {}), where)
        fn = _WITH_NUMBERS.get(fn)
        others = [_constant(x) for x in args if not isinstance(x, self._class)]
        if (
            kwargs
            or fn is None
            or len(args) != 2
            or None in others
            or not _is_safe(fn, args, others, self._class)
        ):
            self._number(None, where).refuse()
        given = [x.tensor if isinstance(x, self._class) else x for x in args]
        return self._number(BuiltinVariable(fn).call_function(tx, given, {}), where)

    def calling(self, call_method: Callable[..., Any]) -> Callable[..., Any]:
        """`x.roll(shifts, dims)`"""

        def called(variable: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
            made = self._rolled(tx, [variable, *args], kwargs) if name == "roll" else None
            return call_method(variable, tx, name, args, kwargs) if made is None else made

        return called

    def calling_functions(self, call_function: Callable[..., Any]) -> Callable[..., Any]:
        """`torch.roll(x, shifts, dims)`"""

        def called(variable: Any, tx: Any, args: Any, kwargs: Any) -> Any:
            made = self._rolled(tx, args, kwargs) if variable.value is torch.roll else None
            return call_function(variable, tx, args, kwargs) if made is None else made

        return called

    def _rolled(self, tx: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """A roll by one of these numbers; None for another one."""
        from torch._dynamo.variables.builder import wrap_fx_proxy

        given = dict(zip(("input", "shifts", "dims"), args, strict=False)) | dict(kwargs)
        x, shift, dim = given.get("input"), _only(given.get("shifts")), _constant(_only(given.get("dims")))
        if not isinstance(shift, self._class):
            return None
        example: Any = x.as_proxy().node.meta.get("example_value") if x is not None and is_tensor(x) else None
        if not isinstance(example, Tensor) or dim is None or len(given) != 3 or not can_be_rolled(example):
            shift.refuse()
        elsewhere = example.device != shift.tensor.as_proxy().node.meta["example_value"].device
        if elsewhere or not -example.dim() <= dim < example.dim():
            shift.refuse()
        operands = (x.as_proxy(), shift.tensor.as_proxy(), dim % example.dim())  # type: ignore[union-attr]
        return wrap_fx_proxy(tx=tx, proxy=tx.output.create_proxy("call_function", rolled, operands, {}))

    # -- what ends a trace ----------------------------------------------------------------------------------

    def comparing(self, handlers: dict[str, Any]) -> dict[str, Any]:
        """`a < b` and the like."""

        def around(handler: Callable[..., Any]) -> Callable[..., Any]:
            def compare(tx: Any, args: Any, kwargs: Any) -> Any:
                self._refuse_any(args)
                return handler(tx, args, kwargs)

            return compare

        return {sign: around(handler) for sign, handler in handlers.items()}

    def containing(self, iter_contains: Callable[..., Any]) -> Callable[..., Any]:
        """Whether something is among others."""

        def contains(items: Any, search: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
            items = list(items)
            self._refuse_any([*items, search])
            return iter_contains(items, search, tx, *args, **kwargs)

        return contains

    def of_lists(self, call_method: Callable[..., Any]) -> Callable[..., Any]:
        """Methods of lists and tuples."""

        def called(variable: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
            if name in ASKING:
                self._refuse_any([variable, *args])
            return call_method(variable, tx, name, args, kwargs)

        return called

    def comparing_symbols(self) -> list[tuple[Any, str, Any]]:
        """Numbers that Dynamo does not know: for torch 2.13 they equal nothing but what it knows itself."""
        from torch._dynamo.variables.tensor import SymNodeVariable

        def around(stock: Callable[..., Any]) -> Callable[..., Any]:
            def richcompare_impl(variable: Any, tx: Any, other: Any, op: str) -> Any:
                self._refuse_any([other])
                return stock(variable, tx, other, op)

            return richcompare_impl

        known = hasattr(SymNodeVariable, "richcompare_impl")
        return [(SymNodeVariable, "richcompare_impl", Around(around))] if known else []

    def formatting(self, create: Any) -> Any:
        """A text with a number."""

        def created(text: str, args: Any, kwargs: Any) -> Any:
            self._refuse_any([*args, *kwargs.values()])
            return create.__func__(text, args, kwargs)

        return staticmethod(created)

    def truth(self, tx: Any, variable: Any) -> bool | None:
        """A condition that is a number."""
        self._refuse_any([variable])
        return None

    def _refuse_any(self, variables: Sequence[Any]) -> None:
        from torch._dynamo.variables.lists import BaseListVariable

        for variable in variables:
            if isinstance(variable, self._class):
                variable.refuse()
            if isinstance(variable, BaseListVariable):
                self._refuse_any(variable.items)


def _only(variable: Any) -> Any:
    """The item of a list or tuple of one; anything else as it is."""
    from torch._dynamo.variables.lists import BaseListVariable

    if isinstance(variable, BaseListVariable) and len(variable.items) == 1:
        return variable.items[0]
    return variable


def _constant(variable: Any) -> int | None:
    """A whole number that is the same in each step."""
    try:
        value = (
            variable.as_python_constant() if variable is not None and variable.is_python_constant() else None
        )
    except NotImplementedError:
        return None
    return value if type(value) is int else None


def _is_safe(fn: Any, args: Sequence[Any], constants: Sequence[Any], numbers: type) -> bool:
    """Whether tensors give what Python gives."""
    if any(abs(x) > _SMALL for x in constants) or (fn is operator.mul and not constants):
        return False
    return fn is not operator.mod or (isinstance(args[0], numbers) and bool(constants) and constants[0] > 0)
