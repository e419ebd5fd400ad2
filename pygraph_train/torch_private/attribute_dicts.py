"""Guards for what a step asks of an object's `__dict__`: whether a name is in it, how many are, which. (2.11, 2.13)

Dynamo sets guards for the attributes that it reads there, and none for the names. `"scale" in vars(options)` would stay
false in a trace after the attribute has come.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from pygraph_train.torch_private.changes import Around

__all__ = ["mends"]


@functools.cache
def mends() -> tuple[tuple[Any, str, Any], ...]:
    """(owner, attribute, value): changes of Dynamo while the library traces."""
    from torch._dynamo.variables.builtin import BuiltinVariable

    names = (BuiltinVariable, "call_dir", Around(_refusing_names))
    if torch.__version__ < "2.13":  # compares versions, not text
        from torch._dynamo.variables.misc import GetAttrVariable

        return (
            (GetAttrVariable, "call_method", Around(_guarding_questions)),
            (GetAttrVariable, "as_python_constant", Around(_no_constants)),
            names,
        )
    from torch._dynamo.variables.dicts import ConstDictVariable, DunderDictVariable

    return (
        (DunderDictVariable, "install_dict_contains_guard", _guard_name),
        (DunderDictVariable, "install_dict_keys_match_guard", _guard_names),
        (DunderDictVariable, "call_method", Around(_guarding_copies)),
        (ConstDictVariable, "mp_ass_subscript_impl", Around(_guarding_no_writes)),
        names,
    )


def _guard_name(self: Any, tx: Any, args: Any) -> None:
    """In the place of a method that sets no guard for whether a name is there."""
    from torch._dynamo.guards import GuardBuilder, install_guard

    if self.source is None or _is_replaced(self):
        return
    if not args[0].is_python_constant():
        self.install_dict_keys_match_guard()
        return
    name = args[0].as_python_constant()
    if not tx.output.side_effects.has_pending_mutation_of_attr(self.items.item, name):
        kind = GuardBuilder.DICT_CONTAINS if name in self.items.item_dict else GuardBuilder.DICT_NOT_CONTAINS
        install_guard(self.source.make_guard(functools.partial(kind, key=name)))


def _guard_names(self: Any) -> None:
    """In the place of a method that sets no guard for which names are there."""
    from torch._dynamo.guards import GuardBuilder, install_guard

    if self.source is not None and not _is_replaced(self) and not getattr(self, "is_written", False):
        install_guard(self.source.make_guard(GuardBuilder.DICT_KEYS_MATCH))


def _is_replaced(attributes: Any) -> bool:
    """Whether the step itself gave the object another `__dict__`."""
    side_effects = attributes.items.side_effects
    return bool(side_effects.has_pending_mutation_of_attr(attributes.items.item, "__dict__"))


def _guarding_copies(call_method: Callable[..., Any]) -> Callable[..., Any]:
    def called(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        if name == "copy":
            self.install_dict_keys_match_guard()
        return call_method(self, tx, name, args, kwargs)

    return called


def _guarding_no_writes(write: Callable[..., Any]) -> Callable[..., Any]:
    """`vars(options)["scale"] = 1.0` does the same, whatever other names there are."""
    from torch._dynamo.variables.dicts import DunderDictVariable  # type: ignore[attr-defined]

    def written(self: Any, tx: Any, key: Any, value: Any) -> Any:
        if not isinstance(self, DunderDictVariable):
            return write(self, tx, key, value)
        if value is None:  # `del`
            self.install_dict_contains_guard(tx, [key])
        self.is_written = True  # type: ignore[attr-defined]
        try:
            return write(self, tx, key, value)
        finally:
            self.is_written = False  # type: ignore[attr-defined]

    return written


def _guarding_questions(call_method: Callable[..., Any]) -> Callable[..., Any]:
    def called(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        asks = self.name == "__dict__" and name in ("__contains__", "get", "__getitem__")
        if asks and args and args[0].is_python_constant():
            _guard_question(self, tx, args[0].as_python_constant())
        return call_method(self, tx, name, args, kwargs)

    return called


def _refusing_names(call_dir: Callable[..., Any]) -> Callable[..., Any]:
    """No guard can stand for all names of a class and its bases, of a function, or of a module of Python."""
    from torch._dynamo.variables import (  # type: ignore[attr-defined]
        PythonModuleVariable,
        UserDefinedClassVariable,
        UserFunctionVariable,
    )

    def called(self: Any, tx: Any, arg: Any) -> Any:
        if isinstance(arg.realize(), (PythonModuleVariable, UserDefinedClassVariable, UserFunctionVariable)):
            _refuse("The step asks for all names of a class, a function or a module.")
        return call_dir(self, tx, arg)

    return called


def _guard_question(self: Any, tx: Any, name: str) -> None:
    from torch._dynamo.guards import GuardBuilder, install_guard

    owner = getattr(self.obj, "value", None)
    is_known = not hasattr(self.obj, "has_key_in_generic_dict")
    if is_known or self.source is None or tx.output.side_effects.has_pending_mutation_of_attr(self.obj, name):
        return
    absent = not self.obj.has_key_in_generic_dict(tx, name)
    if isinstance(owner, type):
        _refuse("The step asks the __dict__ of a class.")
    question = functools.partial(GuardBuilder.DICT_CONTAINS, key=name, invert=absent)
    install_guard(self.source.make_guard(question))


def _refuse(why: str) -> None:
    from torch._dynamo.exc import unimplemented

    unimplemented(gb_type=why, context="", explanation=why, hints=[])


def _no_constants(as_python_constant: Callable[..., Any]) -> Callable[..., Any]:
    """The `__dict__` of a function that is a constant is none itself."""

    def constant(self: Any) -> Any:
        if self.name == "__dict__":
            raise NotImplementedError
        return as_python_constant(self)

    return constant
