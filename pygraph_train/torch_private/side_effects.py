"""What Dynamo writes to Python after its graph has run."""

from __future__ import annotations

import operator
import traceback
import types
from collections import OrderedDict, defaultdict, deque
from dataclasses import dataclass
from typing import Any

import torch

from pygraph_train.problems import is_user_file
from pygraph_train.torch_private.dynamo import placeholder_source
from pygraph_train.torch_private.live_variables import is_known_later, is_symbol

__all__ = ["SideEffect", "dynamo_side_effects", "hooks_in_frame"]


@dataclass(frozen=True)
class SideEffect:
    """One write to an object that existed before the frame.

    Attributes:
        source: Python expression of the object over the frame's locals `L` and globals `G`.
        attribute: its name; "" for a write to the entries of a container.
        kind: "attribute", "cell" (of a closure), "list", "dict", "group" (of an optimizer), "set" or "other".
        stack: of the user, where it is known.
        numbers: expressions of integers that are other integers after the frame.
        later: expressions of numbers that are read, and after the frame are numbers that it has read of tensors.
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
    later: tuple[str, ...] = ()


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
        changed = [name for name, value in writes.items() if not _puts_back(output, variable, name, value)]
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


def _output() -> Any:
    from torch._dynamo.symbolic_convert import InstructionTranslator

    return InstructionTranslator.current_tx().output


def _name(variable: Any) -> str:
    if variable.source is None:
        return type(variable).__name__
    return _name_of(variable.source)


def _name_of(source: Any) -> str:
    """Of a source or a guard."""
    return str(source.name() if callable(source.name) else source.name)  # a method in older versions


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
    later = (place,) if _is_number_later(output, place, before, after) else ()
    return SideEffect(source, name, kind, stack, numbers, None, (place,), kept, simple, owner, plain, later)


_NUMBERS = ("ConstantVariable", "SymNodeVariable", "LiveNumber")


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
        numbers, places, later = [], [], []
        entries = _changed_entries(variable)
        plain = bool(entries) and all(_is_simple(after, _NUMBERS) for _, after in entries)
        for name, after in entries:
            place = f"{source}[{name!r}]"
            if _is_changed_in_place(after, place):
                continue
            places.append(place)
            if _changes_number(owner.get(name, _Unknown), after):
                numbers.append(place)
            if _is_number_later(output, place, owner.get(name, _Unknown), after):
                later.append(place)
        of_optimizer = _is_group_of_optimizer(owner)
        given = tuple(numbers), None, tuple(places), not of_optimizer
        kind = "group" if of_optimizer else "dict"
        return SideEffect(source, "", kind, stack, *given, plain=plain, later=tuple(later))
    return SideEffect(source, "", "set", stack, (), None, (), type(owner) is set)


def _is_group_of_optimizer(owner: Any) -> bool:
    """Whether a dict is one of `optimizer.param_groups`: an update reads it before Dynamo's code writes to it."""
    parameters = owner.get("params")
    return type(parameters) is list and {True} == {isinstance(p, torch.Tensor) for p in parameters}


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
    if is_symbol(after) and not is_known_later(after):  # made of sizes
        return True
    try:
        new = after.as_python_constant()
    except Exception:  # Dynamo raises many kinds for values that are no constants
        return False
    return type(new) is int and new != before


def _is_number_later(output: Any, place: str, before: Any, after: Any) -> bool:
    """Whether the frame depends on a number, and leaves one in its place that it has read of a tensor."""
    if type(before) not in (int, float) or not is_known_later(after):
        return False
    return any(guard.name == place for guard in output.guards)


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


def _puts_back(output: Any, variable: Any, attribute: str, value: Any) -> bool:
    """Whether an attribute holds, after the frame, what it held before: a constant, or a tensor. (torch 2.11, 2.13)

    Context variables are set at the start of a forward and reset at its end: nothing remains to be done. A frame may
    write a constant without a look at what is there, and Dynamo sets no guard then: such a write gets one.
    """
    source = _name(variable)
    if _is_changed_in_place(value, f"{source}.{attribute}"):
        return True
    try:
        before = getattr(_value(output, source), attribute)
        after = value.as_python_constant()
    except Exception:  # Dynamo raises many kinds for values that are no constants
        return False
    return type(before) is type(after) and bool(before == after) and _is_guarded(variable, attribute, before)


_GUARDED = (type(None), bool, int, float, str, bytes)


def _is_guarded(variable: Any, attribute: str, value: Any) -> bool:
    """Whether a guard says that an attribute has this value: one that Dynamo has set, or one that is set here."""
    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._dynamo.source import AttrSource
    from torch._guards import TracingContext

    source = AttrSource(variable.source, attribute)
    if type(value) not in _GUARDED:
        name = _name_of(source)
        return any(_name_of(guard) == name for guard in TracingContext.get().guards_context.dynamo_guards)
    install_guard(source.make_guard(GuardBuilder.CONSTANT_MATCH))
    return True


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
