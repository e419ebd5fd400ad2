"""Modules in which nothing has changed since the step before: then nothing in them has to be read again."""

from __future__ import annotations

import operator
import types
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from pygraph_train.dict_versions import Versions, changed, class_dict, versions_are_known
from pygraph_train.identity import identities
from pygraph_train.torch_private.guards import asked_expression, asked_name, guarded_expression, line_of_guard
from pygraph_train.tracing.reading import Read, owner_of, reader

__all__ = ["Setting", "Settings", "Stillness", "lack", "pinned"]


class Setting(NamedTuple):
    """A constant that a module has as an attribute, such as `dropout.p` or `training`, or that it has none of a name.

    Attributes:
        value: what it has to be.
        where: `file:line` of the user's code that depends on it.
        on: expression of the attribute, or of the module that has none.
    """

    value: Any
    where: str | None
    on: str


Settings = dict[str, Setting]
"""By expressions of their values."""

_CONSTANTS = (bool, int, float, str, types.NoneType, torch.dtype)
_TABLES = ("_parameters", "_buffers", "_modules")
_MISSING = object()
_GONE = (AttributeError, IndexError, KeyError)
"""What reading raises where a module is no longer where it was."""
_MOST_WAITED = 1 << 10


def pinned(guards: Sequence[Any]) -> Settings:
    """The constants of modules that guards (`GuardFilterEntry`s) bind a step to. `Stillness` stands for such guards.

    Only where it can see changes. Any guard of such a constant holds as long as it is that constant.
    """
    if not versions_are_known():
        return {}
    modules = {
        guarded_expression(guard): guard.value
        for guard in guards
        if guard.has_value and isinstance(guard.value, nn.Module)
    }
    found: Settings = {}
    for guard in guards:
        if guard.guard_type == "CONSTANT_MATCH" and guard.has_value and _is_constant(guard.value):
            expression = guarded_expression(guard)
            owner, last = owner_of(expression)
            module = modules.get(owner)
            own = module is not None and last.startswith(".") and _is_own(module, last[1:])
            if own and vars(module)[last[1:]] is guard.value:
                found[expression] = Setting(guard.value, line_of_guard(guard), expression)
        elif guard.guard_type == "HASATTR":
            owner, name = asked_expression(guard), asked_name(guard)
            module = modules.get(owner)
            if module is not None and name and _lacks(module, name):
                found[lack(guard)] = Setting(False, line_of_guard(guard), owner)
    return found


def lack(guard: Any) -> str:
    """The expression of what a HASATTR guard asks."""
    return f"hasattr({asked_expression(guard)}, {asked_name(guard)!r})"


class Stillness:
    """What a step reads of its modules, as long as these have not changed.

    A module has not changed where it is the same object of the same class with the same attributes, and its tables of
    modules, parameters and buffers have the same entries. So whatever is reached by way of unchanged modules is the
    same object. What the way begins with (the function, its closure, the batch) is read for each step.

    Args:
        namespace: the globals of the traced function.
        settings: what constants of modules have to be.
    """

    def __init__(self, namespace: dict[str, Any], settings: Settings) -> None:
        self._namespace = namespace
        self._settings = settings
        self._values = tuple(setting.value for setting in settings.values())
        self._read_settings = reader(namespace, settings)
        self._way: _Way | None = None
        self._wait = self._waited = 0

    def tensors(self, frame: dict[str, Any]) -> tuple[Tensor, ...] | None:
        """What `note` was given last, where the step would read the same once more. None where it may not. Hot path."""
        way = self._way
        if way is None:
            return None
        if way.is_as_it_was(frame, self._namespace):
            way.steps += 1
            return way.tensors
        if way.steps > _MOST_WAITED:
            self._wait = 0
        self._way = None
        return None

    def settings_hold(self, frame: dict[str, Any]) -> bool:
        """Whether constants of modules are what they have to be, in modules that are where they were."""
        try:
            now = self._read_settings(frame, self._namespace)[0]
        except _GONE:
            return False
        return identities(now) == identities(self._values) or all(map(_same, now, self._values))

    def changed_settings(self, frame: dict[str, Any]) -> list[tuple[str, str | None]]:
        """Constants that are others now, as `guard_failures` tells of guards. None where a module is gone."""
        try:
            now = self._read_settings(frame, self._namespace)[0]
        except _GONE:
            return []
        pairs = zip(self._settings.items(), now, strict=True)
        return [
            (f"{name} == {was!r}", where) for (name, (was, where, _)), value in pairs if not _same(value, was)
        ]

    def note(self, frame: dict[str, Any], tensors: tuple[Tensor, ...], expressions: Iterable[str]) -> None:
        """All was read for this call, and the trace holds for it. Where modules change often, this waits.

        Args:
            tensors: that the step reads.
            expressions: of these, and of everything else that was read.
        """
        if not versions_are_known() or self._waited < self._wait:
            self._waited += 1
            return
        self._wait, self._waited = min(2 * self._wait + 1, _MOST_WAITED), 0
        on = (setting.on for setting in self._settings.values())
        self._way = _Way.to([*expressions, *on], frame, self._namespace, tensors)


class _Way:
    """From the roots, which are read for each step, to all that is reached through modules."""

    def __init__(
        self, tensors: tuple[Tensor, ...], read_roots: Read, roots: tuple[Any, ...], found: _Links
    ) -> None:
        self.tensors = tensors
        self.steps = 0
        self._read_roots = read_roots
        self._kept = roots  # no other object gets the identity of one of them
        self._roots = identities(roots)
        self._modules = list(found.modules)
        self._dicts = [*found.entries.values()]
        self._versions = Versions(self._modules, [d for d, _ in self._dicts])
        self._words = self._versions.read()
        self._classes = list(map(type, self._modules))
        self._attributes = list(map(vars, self._modules))
        self._names = [tuple(own) for own, _ in self._dicts]
        self._restless = 0  # the word that changed last

    @classmethod
    def to(
        cls,
        expressions: Iterable[str],
        frame: dict[str, Any],
        namespace: dict[str, Any],
        tensors: tuple[Tensor, ...],
    ) -> _Way | None:
        """The way to these; None where modules keep their attributes in a way of their own."""
        found = _Links({**namespace, "L": frame, "G": namespace})
        for expression in expressions:
            found.reach(expression)
        roots = reader(namespace, found.roots)
        try:
            return cls(tensors, roots, roots(frame, namespace)[0], found)
        except ValueError:
            return None

    def is_as_it_was(self, frame: dict[str, Any], namespace: dict[str, Any]) -> bool:
        """Hot path."""
        try:
            roots = self._read_roots(frame, namespace)[0]
        except _GONE:
            return False
        if identities(roots) != self._roots:
            return False
        now = self._versions.read()
        return now == self._words or self._nothing_else(now)

    def _nothing_else(self, now: bytes) -> bool:
        """Whether what has changed is nothing that the step reads. A new attribute might shadow a method.

        Trainers write to the module that they train in each step, and to no other one: where that is so, this is a part
        of the hot path.
        """
        before, begin = self._words, 8 * self._restless
        end = begin + 8
        alone = now[:begin] == before[:begin] and now[end:] == before[end:]
        for place in (self._restless,) if alone else changed(before, now):
            if place >= len(self._dicts):
                which = (place - len(self._dicts)) // 2
                module = self._modules[which]
                if type(module) is not self._classes[which] or vars(module) is not self._attributes[which]:
                    return False
            else:
                own, entries = self._dicts[place]
                if tuple(own) != self._names[place]:
                    return False
                found = map(own.__getitem__, entries)
                if not all(map(operator.is_, found, entries.values())) and not all(
                    _is(own[key], value) for key, value in entries.items()
                ):
                    return False
            self._restless = place
        self._words = now
        return True


class _Links:
    """The dicts on the way to what a step reads, with the entries that are on it.

    Args:
        scope: of expressions.

    Attributes:
        modules: which are on the way, each once.
        entries: by the identity of a dict.
        roots: expressions of what cannot be reached through modules alone.
    """

    def __init__(self, scope: dict[str, Any]) -> None:
        self.modules: dict[nn.Module, None] = {}
        self.entries: dict[int, tuple[dict[Any, Any], dict[Any, Any]]] = {}
        self.roots: dict[str, None] = {}
        self._scope = scope
        self._reached: set[str] = set()
        self._values: dict[str, Any] = {}

    def reach(self, expression: str) -> None:
        """Note how to get to what the expression means."""
        if expression in self._reached:
            return
        self._reached.add(expression)
        if not self._is_linked(expression):
            self.roots[expression] = None
        value = self._value(expression)
        if isinstance(value, nn.Module):
            self._add(value)

    def _is_linked(self, expression: str) -> bool:
        """Whether it is an entry of a module on the way, or of one of the module's tables. Then that is noted."""
        owner, last = owner_of(expression)
        if not owner:
            return False
        holder = self._value(owner)
        if isinstance(holder, nn.Module) and last.startswith("."):
            self.reach(owner)
            for own in (vars(holder), *(vars(holder).get(name) for name in _TABLES)):
                if type(own) is dict and _is_own(holder, last[1:], own):
                    self._entry(own, last[1:])
                    return True
        elif type(holder) is dict and last.startswith("['") and self._is_of_module(owner):
            self.reach(owner)
            if id(holder) in self.entries:
                self._entry(holder, last[2:-2])
                return True
        return False

    def _is_of_module(self, expression: str) -> bool:
        owner, last = owner_of(expression)
        return last[1:] in _TABLES and isinstance(self._value(owner), nn.Module)

    def _value(self, expression: str) -> Any:
        if expression not in self._values:
            self._values[expression] = eval(expression, self._scope)
        return self._values[expression]

    def _add(self, module: nn.Module) -> None:
        if module in self.modules:
            return
        self.modules[module] = None
        own = vars(module)
        self._entries(own)
        for name in _TABLES:
            if type(own.get(name)) is dict:
                self._entries(own[name])
                self._entry(own, name)
        for base in type(module).__mro__[:-1]:
            self._entries(class_dict(base))

    def _entries(self, own: dict[Any, Any]) -> dict[Any, Any]:
        return self.entries.setdefault(id(own), (own, {}))[1]

    def _entry(self, own: dict[Any, Any], key: Any) -> None:
        self._entries(own)[key] = own[key]


def _is_own(module: nn.Module, name: str, table: Mapping[str, Any] | None = None) -> bool:
    """Whether `module.name` is what the module's own dict says, or this table of it: no class has that name."""
    table = vars(module) if table is None else table
    return name in table and not any(name in vars(base) for base in type(module).__mro__)


def _lacks(module: nn.Module, name: str) -> bool:
    """Whether a module has no attribute of this name, and asks nothing but its class, its own dict and its tables."""
    kind, own = type(module), vars(module)
    if kind.__getattribute__ is not object.__getattribute__ or kind.__getattr__ is not nn.Module.__getattr__:
        return False
    places = [own, *(own.get(table, {}) for table in _TABLES), *(vars(base) for base in kind.__mro__)]
    return all(type(own.get(table)) is dict for table in _TABLES) and not any(
        name in place for place in places
    )


def _is(now: Any, was: Any) -> bool:
    return now is was or (_is_constant(was) and _same(now, was))


def _is_constant(value: Any) -> bool:
    if type(value) is tuple:
        return all(map(_is_constant, value))
    return type(value) in _CONSTANTS


def _same(now: Any, was: Any) -> bool:
    """Whether two constants are equal, and of the same type."""
    if now is was:
        return True
    if type(now) is not type(was):
        return False
    if type(now) is tuple:
        return len(now) == len(was) and all(map(_same, now, was))
    return bool(now == was)
