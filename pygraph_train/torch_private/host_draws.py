"""Random numbers of the host under Dynamo: each is drawn for the trace, and conditions are answered. (2.11, 2.13)

Dynamo ends a graph at `if torch.rand([]) < p`, at `random.random()` and at `numpy.random.rand()`. Here the calls are
made, and told to a recorder. A number of Python or NumPy is a value of its own kind, from which Python's arithmetic
makes others; a number of torch is in the graph. A condition asks for an answer, and the trace goes on with it. A whole
number that is used in another way is asked for itself. `drawn_values` says how fractions, lists and arrays get into
tensors. Where they are used in another way, the graph ends.

A recorder may also know what a tensor of the graph holds that was not drawn. A condition asks for that in the same way.
Where more than a decision follows from it, the recorder leaves it to the step, and Dynamo ends the graph as usual.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch

from pygraph_train.torch_private import checks, host_numbers, selections, texts
from pygraph_train.torch_private.changes import Around
from pygraph_train.torch_private.drawn_numbers import (
    DRAWS,
    NO_VALUE,
    CallResult,
    DrawRecorder,
    any_missing,
    as_constant,
    drawing_function_class,
    generator_of,
    graph_of,
    is_plain_list,
    number_class,
    place_in,
    refuse_draw,
    refuse_torch,
    torch_refusal,
    value_of,
)
from pygraph_train.torch_private.drawn_values import as_it_is, is_drawn_within, tree_of, value_class
from pygraph_train.torch_private.jumps import conditional_jumps
from pygraph_train.torch_private.numbers_with_tensors import is_tensor
from pygraph_train.torch_private.value_hooks import ValueHooks

__all__ = ["changes"]


_COMPARISONS = frozenset(getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge"))
_IDENTITIES = frozenset({operator.is_, operator.is_not})
_ANSWERS = frozenset({bool, operator.not_, operator.truth})
_ARITHMETIC = frozenset(
    getattr(operator, name)
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "neg", "pos", "abs")
) | {int, float, abs, round, min, max}
_ITERATING = frozenset({iter, enumerate, zip, reversed})
_OF_TYPES = frozenset({isinstance, type, issubclass, callable, hasattr, id})


def changes(recorder: DrawRecorder) -> tuple[tuple[Any, str, Any], ...]:
    """(owner, attribute, value), on top of those of `host_numbers`, for one trace."""
    from torch._dynamo import symbolic_convert
    from torch._dynamo import utils as dynamo_utils
    from torch._dynamo.variables import lists
    from torch._dynamo.variables.builder import VariableBuilder
    from torch._dynamo.variables.builtin import BuiltinVariable
    from torch._dynamo.variables.misc import NumpyVariable
    from torch._dynamo.variables.tensor import TensorVariable
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

    mended = {(owner, name): value for owner, name, value in host_numbers.mends()}
    hooks = _Hooks(recorder)
    computed = hooks.computing(mended[BuiltinVariable, "call_function"])
    contains = hooks.containing(dynamo_utils.iter_contains)
    signs = {
        "==": "eq",
        "!=": "ne",
        "<": "lt",
        "<=": "le",
        ">": "gt",
        ">=": "ge",
        "is": "is_",
        "is not": "is_not",
    }
    handlers = {
        **mended[symbolic_convert, "compare_op_handlers"],
        **{
            sign: functools.partial(computed, BuiltinVariable(getattr(operator, op)))
            for sign, op in signs.items()
        },
    }
    return (
        (VariableBuilder, "_wrap", Around(hooks.wrapping)),
        (BuiltinVariable, "call_function", computed),
        (symbolic_convert, "compare_op_handlers", handlers),
        (NumpyVariable, "call_function", hooks.drawing_with_numpy(mended[NumpyVariable, "call_function"])),
        (TensorVariable, "method_item", hooks.reading(TensorVariable.method_item)),
        (TensorVariable, "method_tolist", hooks.listing(TensorVariable.method_tolist)),
        (TorchInGraphFunctionVariable, "call_function", Around(hooks.ranging)),
        (dynamo_utils, "iter_contains", contains),  # `1 in numbers`
        (lists, "iter_contains", contains),
        *hooks.comparing_symbols(),
        *conditional_jumps(hooks.truth),
        *selections.changes(hooks.counting),
        *checks.changes(hooks),
    )


class _Hooks(ValueHooks):
    """What Dynamo calls in the place of its own functions."""

    # -- draws ------------------------------------------------------------------------------------------

    def wrapping(self, wrap: Callable[..., Any]) -> Callable[..., Any]:
        """A function that draws from a generator of the process."""
        from torch._dynamo.guards import GuardBuilder

        def wrapped(builder: Any, value: Any) -> Any:
            generator = generator_of(value)
            if generator is None:
                return wrap(builder, value)
            builder.install_guards(GuardBuilder.ID_MATCH)
            return drawing_function_class()(value, generator, self, source=builder.source)

        return wrapped

    def drawing_with_numpy(self, call_function: Callable[..., Any]) -> Callable[..., Any]:
        def called(variable: Any, tx: Any, args: Any, kwargs: Any) -> Any:
            if generator_of(variable.value) == "numpy":
                return self.draw(tx, variable.value, "numpy", args, kwargs)
            made = self.of_numpy(tx, variable.value, args, kwargs)
            return call_function(variable, tx, args, kwargs) if made is None else made

        return called

    def draw(self, tx: Any, fn: Any, generator: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """A call that draws."""
        from torch._dynamo.variables.builtin import BuiltinVariable

        if not self.begins(tx):
            refuse_draw(generator, fn)
        if generator == "python" and fn.__name__ == "choice" and len(args) == 1 and not kwargs:
            count = BuiltinVariable(len).call_function(tx, [args[0]], {})  # draws what `choice` draws
            if not count.is_python_constant() or not count.as_python_constant():
                refuse_draw(generator, fn)
            place = self.recorder.make(fn, [range(count.as_python_constant())], {}, generator)
            index = as_constant(tx, self.recorder.ask(place, place_in(tx)))
            return BuiltinVariable(operator.getitem).call_function(tx, [args[0], index], {})
        if fn.__name__ == "shuffle" and generator == "python" and len(args) == 1 and not kwargs:
            made = self.shuffle(tx, fn, args[0])
            if made is not None:
                return made
        given = [tree_of(x) for x in args]
        named = {name: tree_of(x) for name, x in kwargs.items()}
        if fn.__name__ not in DRAWS[generator] or any_missing((*given, *named.values())):
            refuse_draw(generator, fn)
        slot = self.recorder.make(fn, given, named, generator)
        return self.wrapped(tx, slot, lambda: refuse_draw(generator, fn))

    # -- questions --------------------------------------------------------------------------------------

    def slot_of(self, tx: Any, variable: Any) -> CallResult | None:
        """What the recorder has for a variable of Dynamo's; None for one that is not drawn on the host."""
        from torch._dynamo.variables.tensor import TensorVariable

        if isinstance(variable, (number_class(), value_class())):
            return variable.slot  # type: ignore[attr-defined, no-any-return]
        if type(variable) is TensorVariable and self.begins(tx):
            node = variable.as_proxy().node
            return self.recorder.slot_of(node) if node.graph is graph_of(tx) else None
        return None

    def read(self, tx: Any, variable: Any) -> CallResult | None:
        """What the recorder has for a variable whose value the step reads here."""
        from torch._dynamo.variables.tensor import TensorVariable

        slot = self.slot_of(tx, variable)
        if slot is not None or type(variable) is not TensorVariable or not self.begins(tx):
            return slot
        node = variable.as_proxy().node
        return self.recorder.read(node, place_in(tx)) if node.graph is graph_of(tx) else None

    def _given(self, tx: Any, variable: Any) -> Any:
        """An argument of a function of numbers: its value or its slot, `NO_VALUE` if it has neither."""
        value = value_of(variable)
        slot = self.slot_of(tx, variable) if value is NO_VALUE else None
        return value if slot is None else slot

    def begins(self, tx: Any) -> bool:
        """Tell the recorder which trace this is. False inside of a checkpoint, which may be computed twice."""
        if tx.output.current_tracer is not tx.output.root_tracer:
            return False
        self.recorder.begin(graph_of(tx))
        return True

    def answer(self, tx: Any, slot: CallResult, *, negated: bool = False) -> bool:
        """The answer to a condition."""
        return bool(self._asked(tx, self.recorder.make(operator.not_ if negated else bool, [slot], {})))

    def _asked(self, tx: Any, slot: CallResult) -> int:
        if not self.recorder.may_ask(slot):
            self._refuse_read(slot)
        return self.recorder.ask(slot, place_in(tx))  # type: ignore[no-any-return]

    def exactly(self, tx: Any, number: Any) -> Any:
        """A whole number as a constant of the trace."""
        value = self.recorder.value(number.slot)
        if not isinstance(value, int):
            number.refuse()
        if type(value) is not bool or not self.recorder.may_ask(number.slot):
            self._refuse_read(number.slot)
        return as_constant(tx, self.recorder.ask(number.slot, place_in(tx)))

    def _refuse_read(self, slot: CallResult) -> None:
        """End the graph where something that was read ahead went into a result."""
        if self.recorder.leave(slot):
            host_numbers.end_graph("a value is read on the host, and more than a decision follows from it")

    def _number(self, tx: Any, slot: CallResult, otherwise: Callable[[], NoReturn]) -> Any:
        if self.recorder.is_constant(slot) and type(self.recorder.value(slot)) in (int, float, bool):
            return as_constant(tx, self.recorder.value(slot))
        if not isinstance(self.recorder.value(slot), (int, float)):  # "%d" % number
            self._refuse_read(slot)

        def refuse() -> NoReturn:
            self._refuse_read(slot)
            otherwise()

        return number_class()(slot, self, refuse)

    def computing(self, call_function: Callable[..., Any]) -> Callable[..., Any]:
        """Python's operators and functions of numbers that are drawn."""
        from torch._dynamo.variables.tensor import TensorVariable

        number: Any = number_class()

        def computed(variable: Any, tx: Any, args: Any, kwargs: Any) -> Any:
            fn = variable.fn
            if fn in _ANSWERS or (fn in (int, float) and len(args) == 1 and type(args[0]) is TensorVariable):
                slot = self.read(tx, args[0]) if len(args) == 1 and not kwargs else None
                if slot is not None:
                    if fn in _ANSWERS:
                        return as_constant(tx, self.answer(tx, slot, negated=fn is operator.not_))
                    return self._number(tx, self.recorder.make(fn, [slot], {}), torch_refusal(tx))
            if fn in _OF_TYPES or not any(map(is_drawn_within, args)):
                return call_function(variable, tx, args, kwargs)
            args = [as_it_is(x.realize()) for x in args]
            if fn in (operator.getitem, operator.setitem) and is_tensor(args[0]):
                args = [args[0], self.index_of_tensor(tx, args[1]), *args[2:]]
            if any(isinstance(x, value_class()) for x in args):
                return self._of_values(variable, tx, args, kwargs, call_function)
            drawn = [x for x in args if isinstance(x, number)]
            if not drawn:
                return call_function(variable, tx, args, kwargs)
            values = [self._given(tx, x) for x in args]
            if not any_missing(values) and not kwargs:
                if any(type(x) is TensorVariable for x in args) and fn in _COMPARISONS | _ARITHMETIC:
                    return self._number(tx, self.recorder.make(fn, values, {}), drawn[0].refuse)
                if fn in _COMPARISONS | _IDENTITIES:
                    return as_constant(tx, self.answer(tx, self.recorder.make(fn, values, {})))
                if fn in _ARITHMETIC:
                    return self._number(tx, self.recorder.make(fn, values, {}), drawn[0].refuse)
            if (
                not kwargs
                and self.begins(tx)
                and (made := self.tensors.with_number(tx, fn, args)) is not None
            ):
                return made
            exact = [self.exactly(tx, x) if isinstance(x, number) else x for x in args]
            return call_function(variable, tx, exact, kwargs)

        return computed

    def _of_values(self, variable: Any, tx: Any, args: Any, kwargs: Any, call_function: Any) -> Any:
        """A function of Python of lists and arrays that are drawn."""
        from torch._dynamo.variables.lists import ListVariable

        fn = variable.fn
        if not kwargs and (made := self.value_computed(tx, fn, args)) is not None:
            return made
        if fn in _ITERATING:
            drawn = value_class()
            items = [ListVariable(self.items_of_value(tx, x)) if isinstance(x, drawn) else x for x in args]
            return call_function(variable, tx, items, kwargs)
        exact = [self.exact_value(tx, x) if isinstance(x, value_class()) else x for x in args]
        return call_function(variable, tx, exact, kwargs)

    def compared(self, tx: Any, fn: Any, number: Any, other: Any) -> Any:
        """A comparison in a list or tuple: the answer decides about the answer for all of it."""
        values = [self._given(tx, number), self._given(tx, other)]
        if not any_missing(values):
            return as_constant(tx, self.answer(tx, self.recorder.make(fn, values, {})))
        from torch._dynamo.variables.builtin import BuiltinVariable

        return BuiltinVariable(fn).call_function(tx, [self.exactly(tx, number), other], {})

    def containing(self, iter_contains: Callable[..., Any]) -> Callable[..., Any]:
        """Whether a constant is among numbers: Dynamo compares constants with constants alone."""
        from torch._dynamo.variables.builtin import BuiltinVariable
        from torch._dynamo.variables.tensor import SymNodeVariable

        number: Any = number_class()

        def contains(items: Any, search: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
            items = list(items)
            texts.refuse_questions(operator.contains, items)
            if search.is_python_constant() and any(isinstance(x, SymNodeVariable) for x in items):
                host_numbers.end_graph("a constant is looked for among numbers that Dynamo does not know")
            if not any(isinstance(x, number) for x in items) or not search.is_python_constant():
                return iter_contains(items, search, tx, *args, **kwargs)
            if any(value_of(x) is NO_VALUE for x in items):
                exact = [self.exactly(tx, x) if isinstance(x, number) else x for x in items]
                return iter_contains(exact, search, tx, *args, **kwargs)
            equal = BuiltinVariable(operator.eq)
            found = any(equal.call_function(tx, [x, search], {}).as_python_constant() for x in items)
            return as_constant(tx, found)

        return contains

    def comparing_symbols(self) -> list[tuple[Any, str, Any]]:
        """Sizes that Dynamo does not know: for torch 2.13 they equal nothing but what it knows itself."""
        from torch._dynamo.variables.tensor import SymNodeVariable

        stock = getattr(SymNodeVariable, "richcompare_impl", None)
        if stock is None:
            return []

        def richcompare_impl(variable: Any, tx: Any, other: Any, op: str) -> Any:
            number = isinstance(other, number_class())
            return stock(variable, tx, self.exactly(tx, other) if number else other, op)

        return [(SymNodeVariable, "richcompare_impl", richcompare_impl)]

    def reading(self, method_item: Callable[..., Any]) -> Callable[..., Any]:
        """`tensor.item()`."""

        def item(variable: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
            slot = self.read(tx, variable)
            if slot is None:
                return method_item(variable, tx, *args, **kwargs)
            return self._number(tx, self.recorder.make(torch.Tensor.item, [slot], {}), torch_refusal(tx))

        return item

    def ranging(self, call_function: Callable[..., Any]) -> Callable[..., Any]:
        """`torch.arange(start, end)` of tensors, which it reads on the host: where these are the same in each step."""
        from torch._dynamo.variables.tensor import TensorVariable

        def read(tx: Any, bound: Any) -> Any:
            slot = self.read(tx, bound) if type(bound) is TensorVariable else None
            if slot is None or not self.recorder.is_constant(slot):
                return bound
            return self._number(tx, self.recorder.make(torch.Tensor.item, [slot], {}), torch_refusal(tx))

        def called(variable: Any, tx: Any, args: Any, kwargs: Any) -> Any:
            made = self.making_tensors(tx, variable.value, args, kwargs)
            if made is not None:
                return made
            if variable.value is torch.arange:
                args = [read(tx, bound) for bound in args]
            return call_function(variable, tx, args, kwargs)

        return called

    def counting(self, tx: Any, node: torch.fx.Node, fn: Callable[..., int]) -> int | None:
        """How many elements a selection has, by which the trace goes on; None where the step has to find out."""
        if not self.begins(tx) or node.graph is not graph_of(tx):
            return None
        slot = self.recorder.read(node, place_in(tx), trained=False)
        return None if slot is None else self._asked(tx, self.recorder.make(fn, [slot], {}))

    def listing(self, method_tolist: Callable[..., Any]) -> Callable[..., Any]:
        """`tensor.tolist()` of whole numbers."""

        def tolist(variable: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
            slot = self.slot_of(tx, variable)
            if slot is None:
                return method_tolist(variable, tx, *args, **kwargs)
            listed = self.recorder.make(torch.Tensor.tolist, [slot], {})
            if not is_plain_list(self.recorder.value(listed)):
                refuse_torch()
            return as_constant(tx, self.recorder.ask(listed, place_in(tx)))

        return tolist

    def truth(self, tx: Any, variable: Any) -> bool | None:
        """The answer to a condition that is a number; None for another one."""
        find = self.slot_of if _is_of_assert(tx) else self.read  # Dynamo has an operation that asserts
        slot = find(tx, variable)
        return None if slot is None else self.answer(tx, slot)


def _is_of_assert(tx: Any) -> bool:
    """Whether a jump that is under way belongs to an assert statement."""
    following = tx.instructions[tx.instruction_pointer : tx.instruction_pointer + 1]
    return any(inst.opname in ("LOAD_ASSERTION_ERROR", "LOAD_COMMON_CONSTANT") for inst in following)
