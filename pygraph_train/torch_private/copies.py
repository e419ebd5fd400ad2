"""`copy.deepcopy` of plain objects in a traced step, which Dynamo of torch 2.11 ends the graph for.

transformers copies the configuration of its older encoder-decoder models (T5, Whisper) when it makes a cache. Dynamo of
2.13 follows `copy.deepcopy` itself. Here the copy is made of what Dynamo knows of the object: each value that is copied
has a guard, each step has a copy of its own, and writes to the copy do not reach the object. (2.11, 2.13)
"""

from __future__ import annotations

import copy
import copyreg
import functools
import inspect
import types
from collections.abc import Callable
from typing import Any

import torch

from pygraph_train.torch_private.changes import Around

__all__ = ["copying", "kept_copies", "mends"]

_COPIES = "_pygraph_train_copies"
_CLASSES = "_pygraph_train_copied_classes"
_ABSENT = object()


def mends() -> tuple[tuple[Any, str, Any], ...]:
    """(owner, attribute, value): what Dynamo gets while we trace. None are needed from 2.13 on."""
    return (
        () if torch.__version__ >= "2.13" else (copying(), _methods(), _classes())
    )  # compares versions, not text


@functools.cache
def copying() -> tuple[Any, str, Any]:
    """Let Dynamo trace `copy.deepcopy(x)` of plain objects, also where it can trace it otherwise."""
    from torch._dynamo.guards import GuardBuilder
    from torch._dynamo.variables.base import VariableTracker
    from torch._dynamo.variables.builder import VariableBuilder
    from torch._dynamo.variables.builtin import BuiltinVariable

    class DeepCopy(VariableTracker):
        """The function `copy.deepcopy`."""

        def python_type(self) -> type:
            return type(copy.deepcopy)

        def call_function(self, tx: Any, args: Any, kwargs: Any) -> Any:
            made = _Copy(tx).of(args[0]) if len(args) == 1 and not kwargs else None
            if made is not None:
                return made
            stock = BuiltinVariable(copy.deepcopy, source=self.source)
            return stock.call_function(tx, args, kwargs)  # says that it cannot be traced

    def around(stock: Callable[..., Any]) -> Callable[..., Any]:
        def wrap(self: Any, value: Any) -> Any:
            if value is not copy.deepcopy:
                return stock(self, value)
            self.install_guards(GuardBuilder.ID_MATCH)
            return DeepCopy(source=self.source)

        return wrap

    return VariableBuilder, "_wrap", Around(around)


@functools.cache
def _methods() -> tuple[Any, str, Any]:
    """Let Dynamo find what the class of a copy has, where that has a `__getattribute__`. (2.11)"""
    from torch._dynamo.variables import (
        GetAttrVariable,
        SuperVariable,
        UserFunctionVariable,
        UserMethodVariable,
    )
    from torch._dynamo.variables.base import VariableTracker

    def around(stock: Callable[..., Any]) -> Callable[..., Any]:
        def call_method(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
            owner = self.objvar
            made = any(owner is copied for copied in getattr(tx.output, _COPIES, ()))
            if name == "__getattribute__" and made and len(args) == 1 and args[0].is_python_constant():
                wanted = args[0].as_python_constant()
                found = inspect.getattr_static(type(owner.value), wanted, _ABSENT)
                written = tx.output.side_effects.has_pending_mutation_of_attr(owner, wanted)
                stock_lookup = self._resolved_getattr_and_source(tx, name)[0] is object.__getattribute__
                if (
                    stock_lookup and wanted == "__dict__"
                ):  # that of the object that stands for the copy is empty
                    return GetAttrVariable(owner, "__dict__")
                if stock_lookup and not written and isinstance(found, types.FunctionType):
                    return UserMethodVariable(found, owner)
                if stock_lookup and type(found) is property and isinstance(found.fget, types.FunctionType):
                    return UserFunctionVariable(found.fget).call_function(tx, [owner], {})
                of_class = found is not _ABSENT and not hasattr(type(found), "__get__")
                if stock_lookup and not written and of_class and owner.cls_source is not None:
                    # without a source Dynamo knows neither a guard nor what functions hold
                    return VariableTracker.build(tx, found, owner.get_source_by_walking_mro(wanted))
            return stock(self, tx, name, args, kwargs)

        return call_method

    return SuperVariable, "call_method", Around(around)


@functools.cache
def _classes() -> tuple[Any, str, Any]:
    """Let Dynamo look for an attribute in the class of a copy, with the guard of the object's class. (2.11)"""
    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._dynamo.source import AttrSource
    from torch._dynamo.variables import ConstantVariable, UserDefinedClassVariable

    def around(stock: Callable[..., Any]) -> Callable[..., Any]:
        def call_obj_hasattr(self: Any, tx: Any, name: str) -> Any:
            source = getattr(tx.output, _CLASSES, {}).get(self.value) if self.source is None else None
            if source is None:
                return stock(self, tx, name)
            install_guard(AttrSource(source, name).make_guard(GuardBuilder.HASATTR))
            return ConstantVariable.create(hasattr(self.value, name))

        return call_obj_hasattr

    return UserDefinedClassVariable, "call_obj_hasattr", Around(around)


def kept_copies() -> list[str]:
    """Classes of copied objects that live on after the frame being compiled; call inside a backend.

    Dynamo would set their attributes by the methods of the class, and `copy.deepcopy` does not.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator

    output = InstructionTranslator.current_tx().output
    alive = set(map(id, output.side_effects.id_to_variable.values()))
    return [type(x.value).__name__ for x in getattr(output, _COPIES, ()) if id(x) in alive]


class _Copy:
    """One call of `copy.deepcopy`.

    Args:
        tx: of Dynamo, where the call is.
    """

    def __init__(self, tx: Any) -> None:
        self._tx = tx
        self._made: dict[int, Any] = {}
        self._held: list[Any] = []  # so that their ids stay theirs

    def of(self, original: Any) -> Any:
        """A copy of what a variable of Dynamo's stands for. None for what is not plain."""
        from torch._dynamo.variables.base import ValueMutationNew
        from torch._dynamo.variables.dicts import ConstDictVariable
        from torch._dynamo.variables.lists import ListVariable, TupleVariable
        from torch._dynamo.variables.user_defined import UserDefinedObjectVariable

        original = original.realize()
        if _is_atomic(original):
            return original
        if id(original) in self._made:
            return self._made[id(original)]
        self._held.append(original)
        made: Any = None
        if type(original) is ListVariable:
            made = ListVariable([], mutation_type=ValueMutationNew())
            self._made[id(original)] = made  # it may hold itself
            items = [self.of(item) for item in original.items]
            if any(item is None for item in items):
                return None
            made.items.extend(items)
        elif type(original) is TupleVariable:
            items = [self.of(item) for item in original.items]
            made = None if any(item is None for item in items) else TupleVariable(items)
        elif type(original) is ConstDictVariable and original.user_cls is dict:
            made = self._table(_entries(original))
        elif (owner := _owner_of_dict(original)) is not None:
            if type(owner) is UserDefinedObjectVariable:
                made = self._table(self._attributes(owner))
        elif type(original) is UserDefinedObjectVariable and _is_plain(original):
            return self._object(original)
        if made is not None:
            self._made[id(original)] = made
        return made

    def _table(self, entries: dict[Any, Any] | None) -> Any:
        from torch._dynamo.variables.base import ValueMutationNew
        from torch._dynamo.variables.constant import ConstantVariable
        from torch._dynamo.variables.dicts import ConstDictVariable

        if entries is None:
            return None
        items = {ConstantVariable.create(key): self.of(value) for key, value in entries.items()}
        if any(item is None for item in items.values()):
            return None
        return ConstDictVariable(items, mutation_type=ValueMutationNew())

    def _object(self, original: Any) -> Any:
        from torch._dynamo.source import TypeSource
        from torch._dynamo.variables.builtin import BuiltinVariable
        from torch._dynamo.variables.user_defined import UserDefinedClassVariable, UserDefinedObjectVariable

        attributes = self._attributes(original)
        if attributes is None:
            return None
        effects = self._tx.output.side_effects
        source = original.cls_source or (original.source and TypeSource(original.source))
        kind = UserDefinedClassVariable(type(original.value), source=source)
        made = effects.track_new_user_defined_object(BuiltinVariable(object), kind, [])
        if type(made) is not UserDefinedObjectVariable:
            return None
        self._made[id(original)] = made
        for name, value in attributes.items():
            copied = self.of(value)
            if copied is None:
                return None
            _put(effects, made, name, copied)
        self._tx.output.__dict__.setdefault(_COPIES, []).append(made)
        self._tx.output.__dict__.setdefault(_CLASSES, {})[type(original.value)] = source
        return made

    def _attributes(self, owner: Any) -> dict[str, Any] | None:
        """What the `__dict__` of an object holds, with guards for all of it."""
        from torch._dynamo.source import AttrSource
        from torch._dynamo.variables.base import VariableTracker
        from torch._dynamo.variables.misc import DeletedVariable

        stored = self._tx.output.side_effects.store_attr_mutations.get(owner, {})
        if owner.source is None:  # made in this frame
            if vars(owner.value):
                return None
            return {name: x for name, x in stored.items() if not isinstance(x, DeletedVariable)}
        if stored:
            return None
        source = AttrSource(owner.source, "__dict__")
        return _entries(VariableTracker.build(self._tx, vars(owner.value), source))


def _put(effects: Any, owner: Any, name: str, value: Any) -> None:
    """Write to the `__dict__` of a new object, which asks no method of its class."""
    import torch._dynamo.variables.base as base

    kinds = getattr(base, "AttrMutationKind", None)
    if kinds is not None:  # 2.13
        effects.store_attr(owner, name, value, kinds.INSTANCE_DICT)
    else:
        owner.attrs_directly_modifed_on_dict.add(name)
        effects.store_attr(owner, name, value)


def _entries(table: Any) -> dict[Any, Any] | None:
    """The entries of a dict, by its keys. None where a key is no text, number or the like."""
    from torch._dynamo.variables.dicts import ConstDictVariable

    table = table.realize()
    if type(table) is not ConstDictVariable:
        return None
    if not all(key.vt.is_python_constant() and _is_atomic(key.vt) for key in table.items):
        return None
    if table.source is not None:
        table.install_dict_keys_match_guard()
    return {key.vt.as_python_constant(): value for key, value in table.items.items()}


def _owner_of_dict(variable: Any) -> Any:
    """The object whose `__dict__` a variable of Dynamo's stands for; None for anything else."""
    if type(variable).__name__ == "DunderDictVariable":  # 2.13
        return variable.items.item
    return variable.obj if getattr(variable, "name", "") == "__dict__" and hasattr(variable, "obj") else None


def _is_atomic(variable: Any) -> bool:
    """Whether `copy.deepcopy` returns the object itself."""
    return type(variable).__name__ in _ATOMIC


_ATOMIC = frozenset(
    {
        "BuiltinVariable",
        "ConstantVariable",
        "EnumVariable",
        "NumPyScalar",
        "SymNodeVariable",
        "UserDefinedClassVariable",
        "UserFunctionVariable",
    }
)
"""Names of Dynamo's classes, which are in other modules in other versions."""


def _is_plain(variable: Any) -> bool:
    """Whether a copy of an object is a new object of its class with a copy of its `__dict__`."""
    kind = type(variable.value)
    own = [vars(base) for base in kind.__mro__[:-1]]
    return (
        kind not in copyreg.dispatch_table
        and type(getattr(variable.value, "__dict__", None)) is dict
        and "__deepcopy__" not in vars(variable.value)
        and not any(name in names for names in own for name in _SAYS_HOW)
        and not any(names.get("__slots__") for names in own)
        and getattr(kind, "__new__", None) is getattr(object, "__new__", None)
    )


_SAYS_HOW = (
    *("__deepcopy__", "__reduce__", "__reduce_ex__", "__getstate__", "__setstate__"),
    *("__getnewargs__", "__getnewargs_ex__", "__new__", "__getattr__"),
)
"""Names by which a class says how it is copied."""
