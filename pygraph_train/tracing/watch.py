"""The cheap half of a trace's guards: modules and parameters are what they were.

Dynamo guards every module and parameter that a step touches one by one: its type, that nothing shadows its
methods, that it has no hooks. For a model of two hundred modules that is a few thousand checks. Here the same
is seen from fewer facts, each a sweep without Python bytecode.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from pygraph_train.torch_private.guards import guarded_class
from pygraph_train.torch_private.hooks import hook_registrations, module_hook_tables
from pygraph_train.torch_private.memory import tensor_looks
from pygraph_train.torch_private.switches import SWITCHES, settled_switches, switches

__all__ = ["ModuleWatch", "is_asked", "is_watched"]

_MODULE_GUARDS = frozenset({"TYPE_MATCH", "MODULE_MATCH", "NN_MODULE", "NOT_PRESENT_IN_GENERIC_DICT"})
_MODULE_TABLES = ("._modules", "._parameters", "._buffers")
_HOOKS_OF_ALL_MODULES = tuple(
    f"._global_{kind}_hooks" for kind in ("forward", "forward_pre", "backward", "backward_pre")
)
"""Before each step these are looked at themselves: with any of them nothing is replayed."""
_ELSEWHERE = frozenset({"EMPTY_NN_MODULE_HOOKS_DICT", "AUTOGRAD_SAVED_TENSORS_HOOKS"})
"""Hooks of modules are counted here; no step is replayed while hooks get what is saved for a backward."""

_forward = operator.attrgetter("forward")


def is_watched(guard: Any) -> bool:
    """Whether `ModuleWatch` or `StepRunner` stands for one of Dynamo's guards (a `GuardFilterEntry`)."""
    if guard.guard_type in _ELSEWHERE:
        return True
    if not guard.has_value:
        return False
    if guard.guard_type == "TENSOR_MATCH":
        return isinstance(guard.value, nn.Parameter)
    if guard.guard_type == "TYPE_MATCH" and isinstance(guard.value, dict):
        return guard.name.endswith((*_MODULE_TABLES, *_HOOKS_OF_ALL_MODULES))
    return guard.guard_type in _MODULE_GUARDS and isinstance(guard.value, nn.Module)


def is_asked(guard: Any) -> bool:
    """Whether a guard asks an object for an attribute that `ModuleWatch` can answer for.

    The guard runs `__getattribute__` of the object, which is Python for the configurations of transformers. Dynamo has
    traced that Python and guards what it reads, but does not guard which names the object and its classes have.
    """
    kind = guarded_class(guard) if guard.guard_type == "HASATTR" else None
    if kind is None or issubclass(kind, nn.Module) or not kind.__dictoffset__:
        return False
    own = [vars(base) for base in kind.__mro__[:-1]]
    in_python = any(isinstance(names.get("__getattribute__"), FunctionType) for names in own)
    return in_python and not any(names.get("__slots__") or "__getattr__" in names for names in own)


class ModuleWatch:
    """What modules and tensors looked like when a step was traced.

    A module is unchanged when it is the same object, of the same class, whose forward is the same function, with the
    same forward of its own if it has one, as many attributes as before (a new one could shadow a method) and the same
    number of hooks. A tensor is unchanged when it looks as before (shape, strides, dtype, requires_grad); that it is
    the same object is known by its address, which captures check. The global switches that decide which kernels run
    are as before.

    Args:
        tensors: what the step reads.
        modules: what the step calls.
        asked: objects that the step asks for attributes: see `is_asked`.
    """

    def __init__(
        self, tensors: Sequence[Tensor], modules: Sequence[nn.Module], asked: Sequence[Any] = ()
    ) -> None:
        self._asked = tuple(asked)
        self._named = _tables_of_names(asked)
        self._names = list(map(list, self._named))
        self._modules = tuple(modules)
        self._classes = list(map(type, modules))
        self._kinds = tuple(dict.fromkeys(self._classes))
        self._forwards = list(map(_forward, self._kinds))
        self._attributes: list[dict[str, Any]] = list(map(vars, modules))
        self._attribute_counts = list(map(len, self._attributes))
        self._own_forwards = [(names, names["forward"]) for names in self._attributes if "forward" in names]
        self._look_the_same = tensor_looks(tensors)
        self._seen = [_look(t) for t in tensors]
        self._switches = settled_switches()
        self._hook_tables = [table for m in modules for table in module_hook_tables(m)]
        self._hook_counts = list(map(len, self._hook_tables))
        self._registrations = hook_registrations()

    def unchanged(
        self, tensors: Sequence[Tensor], modules: tuple[nn.Module, ...], asked: Sequence[Any] = ()
    ) -> bool:
        """Compare what is read now, in the same order. Hot path."""
        return (
            modules == self._modules  # modules are equal when they are the same object
            and list(map(type, modules)) == self._classes
            and list(map(len, self._attributes)) == self._attribute_counts
            and all(map(operator.is_, asked, self._asked))
            and self.unchanged_in_still_modules(tensors)
        )

    def unchanged_in_still_modules(self, tensors: Sequence[Tensor]) -> bool:
        """The same, where `Stillness` knows that modules and objects are the same ones. Hot path."""
        return (
            list(map(_forward, self._kinds)) == self._forwards
            and (not self._own_forwards or self._have_their_own_forwards())
            and self._look_the_same(*tensors)
            and (hook_registrations() == self._registrations or self._no_new_hooks())
            and switches() == self._switches
            and (not self._named or list(map(list, self._named)) == self._names)
        )

    def _have_their_own_forwards(self) -> bool:
        """Torch 2.11 has no guard of a method that is an attribute."""
        return all(names.get("forward") == forward for names, forward in self._own_forwards)

    def _no_new_hooks(self) -> bool:
        registrations = hook_registrations()
        if list(map(len, self._hook_tables)) != self._hook_counts:
            return False
        self._registrations = registrations
        return True

    def what_changed(
        self,
        tensors: Sequence[Tensor],
        modules: Sequence[nn.Module],
        asked: Sequence[Any],
        expressions: Sequence[str],
    ) -> tuple[str, str]:
        """Expression and verb for a sentence: ("L['fn'].net", "was replaced").

        Args:
            tensors, modules, asked: as they are now.
            expressions: of tensors, modules and objects that are asked for attributes, in this order.
        """
        for name, look, seen in zip(expressions, map(_look, tensors), self._seen, strict=False):
            for what, value in look.items():
                if value != seen[what]:
                    return name, f"has {what} {value} now"
        for switch, setting, was in zip(SWITCHES, switches(), self._switches, strict=True):
            if setting != was:
                return f"the switch {switch} of torch", f"is {setting} now"
        names = expressions[len(self._seen) :]
        for name, now, before, kind in zip(names, modules, self._modules, self._classes, strict=False):
            if now is not before:
                return name, "was replaced"
            if type(now) is not kind:
                return name, "has another class now"
            if _forward(kind) != self._forwards[self._kinds.index(kind)]:
                return name, "has another forward now"
        for name, attributes, count in zip(names, self._attributes, self._attribute_counts, strict=False):
            if len(attributes) != count:
                return name, "gained or lost an attribute"
        for name, thing, before in zip(names[len(modules) :], asked, self._asked, strict=False):
            if thing is not before:
                return name, "was replaced"
        if not self._have_their_own_forwards():
            return "a module", "has another forward now"
        if list(map(list, self._named)) != self._names:
            return names[len(modules)], "gained or lost an attribute, or its class did"
        return "the model", "has other hooks now"


def _tables_of_names(objects: Sequence[Any]) -> list[Mapping[str, Any]]:
    """The attributes of objects and of their classes, as views that follow every change."""
    classes = dict.fromkeys(base for thing in objects for base in type(thing).__mro__)
    return [*map(vars, objects), *map(vars, classes)]


def _look(tensor: Tensor) -> dict[str, Any]:
    strides = tensor.stride() if tensor.layout is torch.strided else ()
    return {
        "requires_grad": tensor.requires_grad,
        "shape": tuple(tensor.shape),
        "strides": strides,
        "dtype": tensor.dtype,
        "type": type(tensor).__name__,
    }
