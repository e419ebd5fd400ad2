"""Lists and arrays that Python and NumPy draw, under Dynamo, and tensors that are made of what is drawn. (2.11, 2.13)

A list or an array that was drawn is a value of a kind of its own. What Python and NumPy make of it is computed for the
trace, and told to a recorder, as it is for numbers. `torch.tensor(...)` of it is a tensor of the graph that somebody
fills before each run. The trace depends on its shape and type. A fraction gets into tensors by sums, differences,
products and quotients: see `numbers_with_tensors`.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from pygraph_train.torch_private.drawn_numbers import (
    NO_VALUE,
    CallResult,
    DrawRecorder,
    drawn_class,
    number_class,
    present,
    value_of,
)
from pygraph_train.torch_private.numbers_with_tensors import WITH_TENSORS, is_tensor, with_tensor

__all__ = ["MAKERS", "DrawnTensors", "as_it_is", "is_drawn_within", "tree_of", "value_class"]


@functools.cache
def value_class() -> type:
    class DrawnValue(drawn_class()):  # type: ignore[misc]
        """A list, a tuple or an array that was drawn, or computed from what was drawn.

        A list may be changed: from then on `opened` stands for it, a list of Dynamo's.
        """

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.opened: Any = None

        def as_proxy(self) -> Any:
            return self.hooks.exact_value(present(), self).as_proxy()

        def call_method(self, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
            if self.opened is not None:
                return self.opened.call_method(tx, name, args, kwargs)
            return self.hooks.method_of_value(tx, self, name, args, kwargs)

        def var_getattr(self, tx: Any, name: str) -> Any:
            if self.opened is not None:
                return self.opened.var_getattr(tx, name)
            found = self.hooks.attribute_of_value(tx, self, name)
            return self.hooks.exact_value(tx, self).var_getattr(tx, name) if found is None else found

        def has_unpack_var_sequence(self, tx: Any) -> bool:
            return True

        def unpack_var_sequence(self, tx: Any) -> list[Any]:
            if self.opened is not None:
                return list(self.opened.items)
            return self.hooks.items_of_value(tx, self)  # type: ignore[no-any-return]

        def force_unpack_var_sequence(self, tx: Any) -> list[Any]:
            return self.unpack_var_sequence(tx)

        def tp_iter_impl(self, tx: Any) -> Any:  # 2.13
            from torch._dynamo.variables.lists import ListVariable

            return ListVariable(self.unpack_var_sequence(tx)).tp_iter_impl(tx)

    return DrawnValue


def as_it_is(variable: Any) -> Any:
    """A list of Dynamo's in the place of one that was changed after it was drawn."""
    opened = variable.opened if isinstance(variable, value_class()) else None  # type: ignore[attr-defined]
    return variable if opened is None else opened


def _is_drawn(variable: Any) -> bool:
    """Whether a variable of Dynamo's was drawn, or follows from what was."""
    return isinstance(variable, (number_class(), value_class()))


def is_drawn_within(variable: Any) -> bool:
    """Whether that is so of a variable, or of one in a list or tuple."""
    from torch._dynamo.variables.lists import BaseListVariable

    if not variable.is_realized():  # it is given, and a look at it would name a tensor by this place
        return False
    variable = as_it_is(variable)
    if isinstance(variable, BaseListVariable):
        return any(map(is_drawn_within, variable.items))
    return _is_drawn(variable)


def tree_of(variable: Any) -> Any:
    """A constant, a slot, or a list or tuple of these; `NO_VALUE` for anything else."""
    from torch._dynamo.variables.lists import ListVariable, TupleVariable

    variable = as_it_is(variable)
    if isinstance(variable, value_class()):
        return variable.slot  # type: ignore[attr-defined]
    if type(variable) in (ListVariable, TupleVariable) and is_drawn_within(variable):
        items = [tree_of(x) for x in variable.items]
        if any(x is NO_VALUE for x in items):
            return NO_VALUE
        return items if type(variable) is ListVariable else tuple(items)
    return value_of(variable)


MAKERS = (torch.tensor, torch.as_tensor, torch.from_numpy)
_SHARING = (torch.as_tensor, torch.from_numpy)
_OPTIONS = {"dtype", "device", "requires_grad"}


class DrawnTensors:
    """Makes tensors of what is drawn.

    Args:
        recorder: of the trace.
    """

    def __init__(self, recorder: DrawRecorder) -> None:
        self._recorder = recorder

    def made(self, tx: Any, fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What `fn` makes of something that was drawn; None where no graph can hold it."""
        if not self._recorder.takes or len(args) != 1 or not set(kwargs) <= _OPTIONS:
            return None
        tree, options = tree_of(args[0]), {name: value_of(x) for name, x in kwargs.items()}
        if tree is NO_VALUE or any(x is NO_VALUE or isinstance(x, CallResult) for x in options.values()):
            return None
        device = options.pop("device", None)
        if options.pop("requires_grad", False):
            return None
        return self.tensor(tx, fn, tree, options, None if device is None else torch.device(device))

    def tensor(self, tx: Any, fn: Any, tree: Any, options: Mapping[str, Any], device: Any) -> Any:
        """A tensor of the graph; None where it has not all of its own memory."""
        recorder = self._recorder
        slot = recorder.make(fn, [tree], options)
        value = recorder.value(slot)
        if recorder.was_read(slot) or not isinstance(value, Tensor) or value.device.type != "cpu":
            return None
        return self.held(tx, slot, device, shared=fn in _SHARING)

    def held(self, tx: Any, slot: CallResult, device: Any, *, shared: bool) -> Any:
        """What is in a slot as a tensor of the graph; None where it has not all of its own memory.

        Args:
            device: of the tensor of the graph.
            shared: whether an array may have the same memory.
        """
        recorder, value = self._recorder, self._recorder.value(slot)
        if type(value) is not Tensor or not value.is_contiguous() or value.requires_grad:
            return None
        recorder.ask(recorder.make(_kind, [slot], {}), None)
        made = self.built(tx, recorder.take(slot, device))
        given = made.as_proxy().node
        made = made.call_method(tx, "clone", [], {})  # the step may change it, or return it
        for node in (given, made.as_proxy().node):
            recorder.hold(node, slot, shared=False)
        recorder.hold(made.as_proxy().node, slot, shared=shared)
        return made

    def built(self, tx: Any, tensor: Tensor) -> Any:
        """A tensor as an input of the graph."""
        from torch._dynamo.source import GlobalSource
        from torch._dynamo.variables.builder import VariableBuilder

        name = tx.output.install_global_by_id("drawn_on_host", tensor)
        return VariableBuilder(tx, GlobalSource(name))(tensor)

    def with_number(self, tx: Any, fn: Any, args: Sequence[Any]) -> Any:
        """An operation of a fraction and a tensor of the device; None where there is none with the same bits."""
        if not self._recorder.takes or len(args) != 2 or fn not in WITH_TENSORS:
            return None
        first = isinstance(args[0], number_class())
        number, tensor = args if first else reversed(args)
        if not is_tensor(tensor) or not isinstance(number, number_class()):
            return None
        slot = number.slot  # type: ignore[attr-defined]
        if type(self._recorder.value(slot)) is not float or self._recorder.was_read(slot):
            return None
        built = functools.partial(self.built, tx)
        return with_tensor(tx, WITH_TENSORS[fn], tensor, slot, _Held(self._recorder), built, first=first)


class _Held:
    """Numbers that are drawn, as `numbers_with_tensors` wants them."""

    def __init__(self, recorder: DrawRecorder) -> None:
        self._recorder = recorder
        self.device = recorder.device

    def value(self, number: CallResult) -> Any:
        return self._recorder.value(number)

    def tensor(self, number: CallResult, dtype: torch.dtype, *, inverse: bool) -> Tensor:
        slot = self._recorder.make_number(number, dtype, inverse=inverse)
        return self._recorder.take(slot, self.device)


def _kind(tensor: Tensor) -> tuple[Any, ...]:
    """What of a tensor a graph depends on."""
    return tuple(tensor.shape), str(tensor.dtype)
