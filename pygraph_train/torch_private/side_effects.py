"""What Dynamo writes to Python after its graph has run, and how it traces objects that are only written to."""

from __future__ import annotations

import functools
import operator
import traceback
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import torch

from pygraph_train.problems import is_user_file
from pygraph_train.torch_private.changes import Around, no_comparisons
from pygraph_train.torch_private.dynamo import placeholder_source
from pygraph_train.torch_private.live_numbers import is_live

__all__ = ["SideEffect", "appends_in_frame", "deferring", "dynamo_side_effects", "hooks_in_frame"]


@dataclass(frozen=True)
class SideEffect:
    """One write to an object that existed before the frame.

    Attributes:
        source: Python expression of the object over the frame's locals `L` and globals `G`.
        attribute: its name; "" for a write to the entries of a container.
        kind: "attribute", "cell" (of a closure), "list", "dict", "set" or "other".
        stack: of the user, where it is known.
        numbers: expressions of integers that are other integers after the frame.
        appended: the list, where the frame does nothing to it but append; None for anything else.
        places: expressions of what is replaced.
        reproducible: whether Dynamo's code makes it as the user's code does, and it can be taken back.
        simple: whether an attribute is written, and its value is a tensor, a number or a text.
        owner: the class of the object, where an attribute is written; None for anything else.
        plain: whether numbers and texts are known to be all that is written.
    """

    source: str
    attribute: str
    kind: str
    stack: traceback.StackSummary | None
    numbers: tuple[str, ...] = ()
    appended: Any = None
    places: tuple[str, ...] = ()
    reproducible: bool = False
    simple: bool = False
    owner: type | None = None
    plain: bool = False


def dynamo_side_effects() -> list[SideEffect]:
    """Python objects that the frame being compiled writes to; call inside a backend (torch 2.11, 2.13)."""
    from torch._dynamo.variables.base import AttributeMutationNew, ValueMutationNew

    output = _output()
    effects = output.side_effects
    found: list[SideEffect] = []
    for variable in effects._get_modified_vars():
        if isinstance(variable.mutation_type, (AttributeMutationNew, ValueMutationNew)):
            continue
        source = _name(variable)
        writes = effects.store_attr_mutations.get(variable, {})
        changed = [name for name, value in writes.items() if not _puts_back(output, source, name, value)]
        if (writes and not changed) or (not writes and _keeps_entries(variable, source)):
            continue
        stacks: Any = effects.mutation_user_stacks.get(variable) or [None]
        value = _value(output, source)
        if changed:
            for name in changed:
                stack = _stack_of(name, stacks)
                found.append(_of_attribute(output, variable, source, value, name, writes[name], stack))
        else:
            found.append(_of_container(output, variable, source, value, stacks[0]))
    return found


def hooks_in_frame() -> bool:
    """Whether the frame being compiled registers hooks of tensors; call inside a backend (torch 2.11, 2.13)."""
    effects = _output().side_effects
    return bool(effects.tensor_hooks or effects.save_for_backward)


def appends_in_frame() -> bool:
    """Whether the frame being compiled appends to lists that `deferring` has taken; call inside a backend."""
    return bool(getattr(_output(), _APPENDED, None))


_APPENDED = "_pygraph_train_appended"


def _output() -> Any:
    from torch._dynamo.symbolic_convert import InstructionTranslator

    return InstructionTranslator.current_tx().output


def _name(variable: Any) -> str:
    if variable.source is None:
        return type(variable).__name__
    name = variable.source.name
    return str(name() if callable(name) else name)  # a method in older versions


class _Unknown:
    """In the place of a value that is not known."""


def _value(output: Any, expression: str) -> Any:
    scope = {**output.global_scope, "L": output.local_scope, "G": output.global_scope}
    try:
        return eval(expression, scope)
    except Exception:  # no expression of Python's alone
        return _Unknown


def _of_attribute(
    output: Any, variable: Any, source: str, owner: Any, name: str, after: Any, stack: Any
) -> SideEffect:
    from torch._dynamo.variables.misc import CellVariable, NewGlobalVariable

    if isinstance(variable, NewGlobalVariable) or type(after).__name__ == "DeletedVariable":
        return SideEffect(source, name, "other", stack)
    if isinstance(variable, CellVariable):
        kind, place, before = "cell", f"{source}.cell_contents", getattr(owner, "cell_contents", _Unknown)
        kept = variable.local_name is None and isinstance(owner, types.CellType)
    else:
        kind, place = "attribute", f"{source}.{name}"
        names = getattr(owner, "__dict__", None)
        kept = type(names) is dict and not _is_descriptor(owner, name)
        before = names.get(name, _Unknown) if type(names) is dict else _Unknown
    numbers = (place,) if _changes_number(before, after) else ()
    simple, plain, owner = _is_simple(after), _is_simple(after, _NUMBERS), type(owner)
    return SideEffect(source, name, kind, stack, numbers, None, (place,), kept, simple, owner, plain)


_NUMBERS = ("ConstantVariable", "SymNodeVariable")


def _is_simple(value: Any, classes: tuple[str, ...] = (*_NUMBERS, "TensorVariable")) -> bool:
    """Whether what is written is a tensor, a number or a text. (2.11, 2.13)"""
    kinds = {base.__name__ for base in type(value).__mro__}
    if "LazyVariableTracker" in kinds:
        return bool(value.is_realized()) and _is_simple(value.realize(), classes)
    return not kinds.isdisjoint(classes)


def _is_descriptor(owner: Any, name: str) -> bool:
    """Whether the class of an object decides what becomes of an attribute that is set."""
    found = next((vars(base)[name] for base in type(owner).__mro__ if name in vars(base)), None)
    return hasattr(type(found), "__set__")


def _of_container(output: Any, variable: Any, source: str, owner: Any, stack: Any) -> SideEffect:
    if type(owner) is list or type(owner) is deque:
        appended = owner if _only_appends(variable, source, owner) else None
        return SideEffect(source, "", "list", stack, (), appended, (), type(owner) is list)
    if type(owner) in (dict, OrderedDict, defaultdict):
        numbers, places = [], []
        entries = _changed_entries(variable)
        plain = bool(entries) and all(_is_simple(after, _NUMBERS) for _, after in entries)
        for name, after in entries:
            place = f"{source}[{name!r}]"
            if _is_changed_in_place(after, place):
                continue
            places.append(place)
            if _changes_number(owner.get(name, _Unknown), after):
                numbers.append(place)
        return SideEffect(source, "", "dict", stack, tuple(numbers), None, tuple(places), True, plain=plain)
    return SideEffect(source, "", "set", stack, (), None, (), type(owner) is set)


def _changed_entries(variable: Any) -> list[tuple[Any, Any]]:
    before, after = getattr(variable, "original_items", None), getattr(variable, "items", None)
    if not isinstance(before, dict) or not isinstance(after, dict):
        return []
    found = []
    for key, value in after.items():
        try:
            name = _constant(key)
        except Exception:  # a key that is no constant
            continue
        if before.get(key) is not value:
            found.append((name, value))
    return found


def _changes_number(before: Any, after: Any) -> bool:
    if type(before) is not int:
        return False
    try:
        new = after.as_python_constant()
    except Exception:  # Dynamo raises many kinds for values that are no constants
        return False
    return type(new) is int and new != before


def _only_appends(variable: Any, source: str, owner: Any) -> bool:
    """Whether a list begins with what it held before: the items are those that were read from it."""
    items = getattr(variable, "items", None)
    if not isinstance(items, list) or len(items) <= len(owner):
        full = isinstance(owner, deque) and owner.maxlen is not None and len(owner) == owner.maxlen
        return full and isinstance(items, list)
    return all(_is_read_from(item, f"{source}[{k}]") for k, item in enumerate(items[: len(owner)]))


def _is_read_from(item: Any, expression: str) -> bool:
    source = getattr(item, "source", None)
    if source is None:
        try:
            item.as_python_constant()
        except Exception:  # a value that was put there
            return False
        return True
    name = source.name
    return (name() if callable(name) else name) == expression


def _stack_of(attribute: str, stacks: list[Any]) -> Any:
    """Dynamo keeps the writes to one object together: the stack of the first one whose line names the attribute.

    Modules write their attributes in a function of torch.
    """
    named = (s for s in stacks if s and any(f".{attribute}" in (f.line or "") for f in _innermost(s)))
    return next(named, stacks[0]) if attribute else stacks[0]


def _innermost(stack: Any) -> list[Any]:
    """The innermost frame, and that of the user."""
    return [stack[-1], *[frame for frame in stack if is_user_file(frame.filename)][-1:]]


def _puts_back(output: Any, source: str, attribute: str, value: Any) -> bool:
    """Whether an attribute holds, after the frame, what it held before: a constant, or a tensor. (torch 2.11, 2.13)

    Context variables are set at the start of a forward and reset at its end: nothing remains to be done.
    """
    if _is_changed_in_place(value, f"{source}.{attribute}"):
        return True
    try:
        before = getattr(_value(output, source), attribute)
        after = value.as_python_constant()
    except Exception:  # Dynamo raises many kinds for values that are no constants
        return False
    return type(before) is type(after) and bool(before == after)


def _keeps_entries(variable: Any, source: str) -> bool:
    """Whether a dict has, after the frame, the entries that it had before, as `self.count += 1` leaves buffers. (2.11,
    2.13)"""
    before, after = getattr(variable, "original_items", None), getattr(variable, "items", None)
    if not isinstance(before, dict) or not isinstance(after, dict):
        return False
    try:
        names = list(map(_constant, before))
        if names != list(map(_constant, after)):
            return False
        values = zip(names, before.values(), after.values(), strict=True)
        return all(
            new is old or _is_changed_in_place(new, f"{source}[{name!r}]") for name, old, new in values
        )
    except Exception:  # keys that are no constants
        return False


def _constant(key: Any) -> Any:
    """The key of a dict: Dynamo wraps it where it hashes variables. (2.11, 2.13)"""
    return getattr(key, "vt", key).as_python_constant()


def _is_changed_in_place(value: Any, expression: str) -> bool:
    """Whether a value is the tensor that was read from this expression, after changes in place. (2.11, 2.13)"""
    node = getattr(getattr(value, "proxy", None), "node", None)
    while isinstance(node, torch.fx.Node) and node.op != "placeholder":
        name = str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")
        in_place = node.target in _AUGMENTED or (name.endswith("_") and not name.endswith("__"))
        # an operation returns the tensor that it was given as `out`
        node = node.kwargs.get("out") or (node.args[0] if in_place and node.args else None)
    return node is not None and placeholder_source(node) == expression


_AUGMENTED = {
    getattr(operator, f"i{name}")
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "matmul")
}


def deferring(
    appended: Callable[[Any], bool], collect: Callable[..., Any], settle: Callable[..., Any]
) -> tuple[tuple[Any, str, Any], ...]:
    """Changes of Dynamo: some lists are not looked at, and what the frame appends to them is a result. (2.11, 2.13)

    Args:
        appended: whether a list is one of these. The frame may do nothing to it but append.
        collect: a function without arguments that the frame calls at its end: it returns (list, item) pairs then.
        settle: a function that the frame calls with a number, of which a guard shall keep the value.
    """
    from torch._dynamo.variables.builder import VariableBuilder

    listed, collector, settler = _variables()

    def around(stock: Callable[..., Any]) -> Callable[..., Any]:
        def wrap(self: Any, value: Any) -> Any:
            if value is collect:
                return collector(source=self.source)
            if value is settle:
                return settler(source=self.source)
            if type(value) in (list, deque) and appended(value):
                return listed(value, source=self.source, guard=self)
            return stock(self, value)

        return wrap

    return (VariableBuilder, "_wrap", Around(around)), no_comparisons(listed)


def _is_settled(number: Any) -> bool:
    """Whether no guard may stand for a number, because it is on the device, or need stand for it. (2.11, 2.13)

    Each capture is for its sizes of tensors, so no guard is needed for a number that follows from sizes alone.
    """
    from torch._dynamo.source import TensorPropertySource

    symbols = getattr(number.node.expr, "free_symbols", ())
    known = number.node.shape_env.var_to_sources
    if not all(known.get(symbol) for symbol in symbols):  # read from a tensor
        return True
    return bool(symbols) and all(
        any(isinstance(source, TensorPropertySource) for source in known[symbol]) for symbol in symbols
    )


@functools.cache
def _variables() -> tuple[Any, Any, Any]:
    from torch._dynamo.exc import unimplemented
    from torch._dynamo.guards import GuardBuilder
    from torch._dynamo.variables.base import VariableTracker
    from torch._dynamo.variables.constant import ConstantVariable
    from torch._dynamo.variables.lists import TupleVariable
    from torch._dynamo.variables.misc import GetAttrVariable
    from torch._dynamo.variables.tensor import SymNodeVariable

    def kept(tx: Any) -> list[Any]:
        """What was appended in the trace that is under way."""
        found: list[Any] = tx.output.__dict__.setdefault(_APPENDED, [])
        return found

    class Appended(VariableTracker):
        """A list that the frame only appends to."""

        def __init__(self, value: Any, guard: Any = None, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.value = value
            if guard is not None:
                guard.install_guards(GuardBuilder.TYPE_MATCH)

        def python_type(self) -> type:
            # whoever asks for the type goes on to ask for a length or a truth value, and no guard stands for these
            self.refuse()

        def refuse(self) -> NoReturn:
            unimplemented(
                gb_type="List that is only appended to",
                context="",
                explanation="The step looks at a list that grows.",
                hints=[],
            )

        def var_getattr(self, tx: Any, name: str) -> Any:
            return GetAttrVariable(self, name)

        def call_method(self, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
            at_top = tx.output.current_tracer is tx.output.root_tracer
            if name != "append" or len(args) != 1 or kwargs or not at_top:
                self.refuse()  # Dynamo of 2.11 takes lists for different that it does not look at
            kept(tx).append(TupleVariable([self, args[0]]))
            return ConstantVariable.create(None)

    class Collector(VariableTracker):
        """A function that returns what was appended."""

        def call_function(self, tx: Any, args: Any, kwargs: Any) -> Any:
            return TupleVariable(list(kept(tx)))

    class Settler(VariableTracker):
        """A function that sets a guard for a number."""

        def call_function(self, tx: Any, args: Any, kwargs: Any) -> Any:
            number = args[0].realize()
            if is_live(number):
                number.refuse()
            if isinstance(number, SymNodeVariable) and not _is_settled(number.sym_num):
                number.evaluate_expr(tx.output)
            return ConstantVariable.create(None)

    return Appended, Collector, Settler
