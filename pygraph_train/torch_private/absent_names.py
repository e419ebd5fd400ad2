"""Guards for keys and attributes that a step asked for, mostly for what was not there. (2.11, 2.13)

`try: scale = options["scale"]` and `except KeyError: scale = 1.0` depends on a key that is absent. Dynamo sets a guard
for an absent key where `in` and `get` ask for it, and for an absent attribute where `hasattr` and `getattr` with a
default do. Where the answer is an exception it sets none, and a trace would hold after the key has come. Of functions
(`getattr(function, "scale", 1.0)`) it sets none either way.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import torch

from pygraph_train.torch_private.changes import Around

__all__ = ["mends"]


@functools.cache
def mends() -> tuple[tuple[Any, str, Any], ...]:
    """(owner, attribute, value): changes of Dynamo while the library traces."""
    from torch._dynamo.variables import SkipFunctionVariable, UserFunctionVariable
    from torch._dynamo.variables.dicts import ConstDictVariable
    from torch._dynamo.variables.misc import PythonModuleVariable
    from torch._dynamo.variables.user_defined import UserDefinedClassVariable, UserDefinedObjectVariable

    functions = UserFunctionVariable, SkipFunctionVariable
    owners = (UserDefinedObjectVariable, UserDefinedClassVariable, PythonModuleVariable, *functions)
    return (
        (ConstDictVariable, "getitem_const_raise_exception_if_absent", Around(_guarding_keys)),
        *((owner, "var_getattr", Around(_guarding_names)) for owner in owners),
        *((owner, "call_obj_hasattr", Around(_guarding_questions)) for owner in functions),
    )


def _guarding_keys(getitem: Callable[..., Any]) -> Callable[..., Any]:
    def guarded(self: Any, tx: Any, key: Any) -> Any:
        if key not in self:
            self.install_dict_contains_guard(tx, [key])
        return getitem(self, tx, key)

    return guarded


def _guard(source: Any, name: str) -> None:
    """Whether what is there has a name is to stay as it is."""
    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._dynamo.source import AttrSource

    if torch.__version__ >= "2.13":  # compares versions, not text
        install_guard(source.make_guard(functools.partial(GuardBuilder.HASATTR, attr=name)))
    else:
        install_guard(AttrSource(source, name).make_guard(GuardBuilder.HASATTR))


def _guarding_questions(call_obj_hasattr: Callable[..., Any]) -> Callable[..., Any]:
    def asked(self: Any, tx: Any, name: str) -> Any:
        if self.source is not None and not hasattr(types.FunctionType, name):
            _guard(self.source, name)
        return call_obj_hasattr(self, tx, name)

    return asked


def _guarding_names(var_getattr: Callable[..., Any]) -> Callable[..., Any]:
    from torch._dynamo.exc import ObservedAttributeError

    def guarded(self: Any, tx: Any, name: str) -> Any:
        try:
            return var_getattr(self, tx, name)
        except ObservedAttributeError:
            if self.source is not None:
                _guard(self.source, name)
            raise

    return guarded
