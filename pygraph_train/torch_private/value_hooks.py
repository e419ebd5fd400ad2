"""What Dynamo does with lists and arrays that Python and NumPy draw: see `drawn_values`. (2.11, 2.13)"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import torch

from pygraph_train.torch_private.drawn_numbers import (
    CallResult,
    DrawRecorder,
    any_missing,
    as_constant,
    is_plain_list,
    number_class,
    place_in,
    refuse_draw,
)
from pygraph_train.torch_private.drawn_values import (
    MAKERS,
    DrawnTensors,
    as_it_is,
    is_drawn_within,
    tree_of,
    value_class,
)

__all__ = ["ValueHooks"]

_PURE_METHODS = frozenset(
    {
        "astype",
        "tolist",
        "copy",
        "reshape",
        "ravel",
        "flatten",
        "item",
        "argsort",
        "sum",
        "min",
        "max",
        "mean",
        "any",
    }
    | {"all", "transpose", "repeat", "cumsum", "round", "clip", "squeeze", "nonzero", "index", "count"}
)
"""Methods of arrays and lists that change nothing."""

_PURE_FUNCTIONS = frozenset(
    getattr(np, name)
    for name in (
        *(
            "array",
            "asarray",
            "sort",
            "argsort",
            "concatenate",
            "stack",
            "unique",
            "where",
            "clip",
            "round",
            "floor",
        ),
        *(
            "ceil",
            "sqrt",
            "exp",
            "log",
            "maximum",
            "minimum",
            "sum",
            "max",
            "min",
            "mean",
            "abs",
            "cumsum",
            "repeat",
        ),
        *(
            "tile",
            "reshape",
            "expand_dims",
            "squeeze",
            "isin",
            "float32",
            "float64",
            "int64",
            "int32",
            "int_",
        ),
    )
    if hasattr(np, name)
)
"""Functions of NumPy that draw nothing and change nothing."""


def _method(value: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    """Call a method."""
    return getattr(value, name)(*args, **kwargs)


def _shuffled(shuffle: Callable[[list[Any]], None], items: Sequence[Any]) -> list[Any]:
    """What a function that shuffles makes of these items."""
    made = list(items)
    shuffle(made)
    return made


_COMPARISONS = frozenset(getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge"))
_ARITHMETIC = frozenset(
    getattr(operator, name)
    for name in (
        "add",
        "sub",
        "mul",
        "truediv",
        "floordiv",
        "mod",
        "pow",
        "neg",
        "pos",
        "abs",
        "invert",
        "and_",
        "or_",
    )
)

_OF_LISTS = frozenset({sum, max, min, sorted, list, tuple, abs, round})


class ValueHooks:
    """What Dynamo does with lists and arrays that were drawn. Part of the hooks of `host_draws`."""

    def __init__(self, recorder: DrawRecorder) -> None:
        self.recorder = recorder
        self.tensors = DrawnTensors(recorder)

    def begins(self, tx: Any) -> bool:
        """Tell the recorder which trace this is. False inside of a checkpoint, which may be computed twice."""
        raise NotImplementedError

    def answer(self, tx: Any, slot: CallResult, *, negated: bool = False) -> bool:
        """The answer to a condition."""
        raise NotImplementedError

    def wrapped(self, tx: Any, slot: CallResult, refuse: Callable[[], NoReturn]) -> Any:
        """A variable for what a call has returned."""
        value = self.recorder.value(slot)
        if isinstance(value, (int, float)) and not isinstance(value, np.generic):
            return number_class()(slot, self, refuse)
        if self.recorder.takes and isinstance(value, (list, tuple, np.ndarray, np.number, np.bool_)):
            return value_class()(slot, self, refuse)
        if isinstance(value, (str, np.number, np.bool_)) or is_plain_list(value):
            return as_constant(tx, self.recorder.ask(slot, place_in(tx)))
        refuse()

    def exact_value(self, tx: Any, variable: Any) -> Any:
        """What a number, a text or a tuple is, as a constant of the trace. A list that may be changed is opened."""
        from torch._dynamo.variables.base import ValueMutationNew
        from torch._dynamo.variables.lists import ListVariable

        value = self.recorder.value(variable.slot)
        if isinstance(value, list):
            if variable.opened is None:
                items = self.items_of_value(tx, variable)
                variable.opened = ListVariable(items, mutation_type=ValueMutationNew())
            return variable.opened
        if not isinstance(value, (np.number, np.bool_)) and not is_plain_list(value):
            variable.refuse()
        return as_constant(tx, self.recorder.ask(variable.slot, place_in(tx)))

    def method_of_value(self, tx: Any, variable: Any, name: str, args: Any, kwargs: Any) -> Any:
        """A method of a list or an array."""
        given = [tree_of(x) for x in args]
        named = {key: tree_of(x) for key, x in kwargs.items()}
        if name == "__getitem__":
            return self.value_computed(tx, operator.getitem, [variable, *args])
        if name in _PURE_METHODS and not any_missing((*given, *named.values())):
            slot = self.recorder.make(_method, [variable.slot, name, *given], named)
            return self.wrapped(tx, slot, variable.refuse)
        return self.exact_value(tx, variable).call_method(tx, name, args, kwargs)

    def attribute_of_value(self, tx: Any, variable: Any, name: str) -> Any:
        """An attribute of an array, or a method; None for another one. The trace depends on the shape of an array."""
        value = self.recorder.value(variable.slot)
        if isinstance(value, np.ndarray) and name in ("shape", "size", "ndim"):
            slot = self.recorder.make(getattr, [variable.slot, name], {})
            return as_constant(tx, self.recorder.ask(slot, place_in(tx)))
        if isinstance(value, np.ndarray) and name == "T":
            slot = self.recorder.make(getattr, [variable.slot, name], {})
            return self.wrapped(tx, slot, variable.refuse)
        if hasattr(value, name) and (name in _PURE_METHODS or isinstance(value, list)):
            from torch._dynamo.variables.misc import GetAttrVariable

            return GetAttrVariable(variable, name)
        return None

    def items_of_value(self, tx: Any, variable: Any) -> list[Any]:
        """The items, of which there have to be as many in each step."""
        count = self.recorder.ask(self.recorder.make(len, [variable.slot], {}), place_in(tx))
        slots = [self.recorder.make(operator.getitem, [variable.slot, i], {}) for i in range(count)]
        return [self.wrapped(tx, slot, variable.refuse) for slot in slots]

    def value_computed(self, tx: Any, fn: Any, args: Sequence[Any]) -> Any:
        """What an operator or a function of Python makes of a list or array; None where the list has to be known."""
        value = next(x for x in args if isinstance(x, value_class()))
        given = [tree_of(x) for x in args]
        if any_missing(given):
            return None
        make, refuse = self.recorder.make, value.refuse  # type: ignore[attr-defined]
        if fn is getattr and len(args) == 2:
            return self.attribute_of_value(tx, value, given[1])
        if fn is len and len(args) == 1:
            return as_constant(tx, self.recorder.ask(make(len, given, {}), place_in(tx)))
        if fn in (bool, operator.not_, operator.truth) and len(args) == 1:
            return as_constant(tx, self.answer(tx, make(bool, given, {}), negated=fn is operator.not_))
        if fn in (int, float) and len(args) == 1:
            return self.wrapped(tx, make(fn, given, {}), refuse)
        if fn in _COMPARISONS:
            slot = make(fn, given, {})
            if isinstance(self.recorder.value(slot), (bool, np.bool_)):
                return as_constant(tx, self.answer(tx, slot))
            return self.wrapped(tx, slot, refuse)
        if fn is operator.getitem or fn in _ARITHMETIC or (fn in _OF_LISTS and len(args) == 1):
            return self.wrapped(tx, make(fn, given, {}), refuse)
        return None

    def index_of_tensor(self, tx: Any, index: Any) -> Any:
        """An index with tensors in the place of lists and arrays of whole numbers: torch makes such of them."""
        from torch._dynamo.variables.lists import TupleVariable

        index = as_it_is(index)
        if type(index) is TupleVariable:
            return TupleVariable([self.index_of_tensor(tx, x) for x in index.items])
        if not isinstance(index, value_class()):
            return index
        value = self.recorder.value(index.slot)  # type: ignore[attr-defined]
        whole = type(value) is list and value and all(type(x) is int for x in value)
        whole = whole or (isinstance(value, np.ndarray) and value.dtype == np.int64 and value.ndim > 0)
        made = None
        if whole and self.begins(tx):
            made = self.tensors.tensor(tx, torch.tensor, index.slot, {}, self.recorder.device)  # type: ignore[attr-defined]
        return index if made is None else made

    def making_tensors(self, tx: Any, fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """`torch.tensor(...)` and the like of what was drawn; None for anything else."""
        if fn not in MAKERS or not args or not is_drawn_within(args[0]):
            return None
        return self.tensors.made(tx, fn, args, kwargs) if self.begins(tx) else None

    def of_numpy(self, tx: Any, fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """A function of NumPy of arrays that were drawn; None for another one."""
        if not any(map(is_drawn_within, (*args, *kwargs.values()))):
            return None
        given = [tree_of(x) for x in args]
        named = {key: tree_of(x) for key, x in kwargs.items()}
        if not self.recorder.takes or fn not in _PURE_FUNCTIONS or any_missing((*given, *named.values())):
            refuse_draw("numpy", fn)
        return self.wrapped(tx, self.recorder.make(fn, given, named), lambda: refuse_draw("numpy", fn))

    def shuffle(self, tx: Any, fn: Any, items: Any) -> Any:
        """`random.shuffle` of a list that the step has made; None for another one."""
        from torch._dynamo.variables.constant import ConstantVariable
        from torch._dynamo.variables.lists import ListVariable

        if type(items) is not ListVariable or items.source is not None or not self.recorder.takes:
            return None
        given = [tree_of(x) for x in items.items]
        if any_missing(given):
            return None
        slot = self.recorder.make(_shuffled, [fn, given], {}, "python")
        slots = [self.recorder.make(operator.getitem, [slot, i], {}) for i in range(len(given))]
        tx.output.side_effects.mutation(items)
        items.items[:] = [self.wrapped(tx, x, lambda: refuse_draw("python", fn)) for x in slots]
        return ConstantVariable.create(None)
