"""Functions that functions of torch call, and that somebody has replaced: a graph would not call them. (2.11, 2.13)"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterator, Sequence
from types import CodeType, FunctionType
from typing import Any

import torch

from pygraph_train.dict_versions import Versions, class_dict, versions_are_known
from pygraph_train.torch_private.packages import layers_of

__all__ = ["Found", "inside_of_clipping", "inside_of_scalers", "inside_of_steps"]

_FOLLOWED = ("torch.amp.", "torch.nn.utils.", "torch.optim.", "torch.utils._foreach_utils")
"""Modules whose functions are followed into. The code of other functions of torch is not looked at."""
_OF_TORCH = ("torch", "pygraph_train", "typing")
"""Packages of functions that torch's code calls, beside those that are written in C."""
_CACHING = type(functools.cache(len))

_IN_ALL = "__doc__"
"""A name that each module and class has."""

Found = tuple[str, Any]
"""The name of a function that is not torch's own, and what has taken its place."""


class _Inside:
    """The functions that some functions of torch may call: those whose names are in their code.

    Args:
        roots: names of these functions, each with the module or class that has it.
        classes: of torch. Functions may call their methods.
        but: a name that somebody else looks at.

    Attributes:
        methods: the names of such methods.
    """

    def __init__(
        self, roots: Sequence[tuple[Any, str]], classes: Sequence[type] = (), *, but: str = ""
    ) -> None:
        self._roots, self._classes, self._but = roots, classes, but
        self._words, self._values = b"", list[Any]()
        self._look()

    def replaced(self) -> Found | None:
        """One that is not torch's own now. Hot path: where no dict has changed, nothing else is looked at."""
        if self._versions is not None:
            words = self._versions.read()
            if words == self._words:
                return self._replaced
            self._words = words
        if self._present() != self._values:
            self._look()
        return self._replaced

    def _look(self) -> None:
        walk = _Walk(self._roots, self._classes)
        self.methods = frozenset(walk.methods - {self._but})
        names: dict[int, tuple[dict[str, Any], list[str]]] = {}
        self._replaced: Found | None = None
        for own, name, told in walk.places.values():
            names.setdefault(id(own), (own, []))[1].extend([name] if name in own else ())
            if (
                self._replaced is None
                and name != self._but
                and (foreign := _foreign(name, own.get(name))) is not None
            ):
                self._replaced = told, foreign
        dicts = [own for own, _ in names.values()]
        self._readers = [(own, operator.itemgetter(_IN_ALL, *there)) for own, there in names.values()]
        self._versions = Versions((), dicts) if versions_are_known() else None
        self._words = b"" if self._versions is None else self._versions.read()
        self._values = self._present()

    def _present(self) -> list[Any]:
        """What the names stand for, and how many there are: a method that comes may hide another one."""
        try:
            return [(len(own), read(own)) for own, read in self._readers]
        except KeyError:
            return []


class _Walk:
    """Follows the names in the code of functions. See `_Inside`.

    Attributes:
        places: dicts, names in them, and how to tell them.
        methods: which of the names belong to classes.
    """

    def __init__(self, roots: Sequence[tuple[Any, str]], classes: Sequence[type]) -> None:
        self.places: dict[tuple[int, str], tuple[dict[str, Any], str, str]] = {}
        self.methods: set[str] = set()
        self._classes = classes
        self._ahead: list[Any] = []
        self._followed: set[int] = set()
        for owner, name in roots:
            self._note(owner, name)
        while self._ahead:
            for layer, _ in layers_of(self._ahead.pop()):
                if isinstance(layer, FunctionType) and id(layer) not in self._followed:
                    self._followed.add(id(layer))
                    self._follow(layer)

    def _follow(self, function: FunctionType) -> None:
        names, own = set(_names_in(function.__code__)), function.__globals__
        module = str(own.get("__name__"))
        if not module.startswith(_FOLLOWED):
            return
        for name in sorted(names):
            if _is_callable(own.get(name)):
                self._add(own, name, module)
            if any(_is_callable(vars(kind).get(name)) for kind in self._classes):
                self.methods.add(name)
                for kind in self._classes:
                    self._note(kind, name)
            if "torch" in names and _is_callable(vars(torch).get(name)):
                self._note(torch, name)
            if _is_callable(getattr(torch.Tensor, name, None)):
                self._note(torch.Tensor, name)

    def _note(self, owner: Any, name: str) -> None:
        if isinstance(owner, type):
            self._add(class_dict(owner), name, owner.__qualname__)
        else:
            self._add(vars(owner), name, owner.__name__)

    def _add(self, own: dict[str, Any], name: str, owner: str) -> None:
        if (id(own), name) not in self.places:
            self.places[id(own), name] = own, name, f"{owner}.{name}"
            self._ahead.append(own.get(name))


def _names_in(code: CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)


def _is_callable(value: Any) -> bool:
    return callable(getattr(value, "__func__", value)) and not isinstance(value, type)


def _foreign(name: str, value: Any) -> Any:
    """What is not torch's of what stands for a name of torch's, or None. `functools.wraps` does not hide it."""
    if not _is_callable(value):
        return None
    value = getattr(value, "__func__", value)
    for layer, package in layers_of(value):
        in_c = type(layer) is _CACHING or (package == "builtins" and not isinstance(layer, FunctionType))
        if not in_c and package not in _OF_TORCH:
            return layer
    return value if isinstance(value, FunctionType) and value.__name__ != name else None


_clipping = functools.cache(
    lambda: _Inside([(torch.nn.utils, "clip_grad_norm_"), (torch.nn.utils, "clip_grad_value_")])
)


def inside_of_clipping() -> Found | None:
    """What somebody put in the place of a function that clips gradients, or that such a function calls. Hot path."""
    return _clipping().replaced()


@functools.cache
def _steps(kind: Any) -> _Inside:
    classes = [base for base in kind.__mro__ if base.__module__.partition(".")[0] == "torch"]
    return _Inside([(base, "step") for base in classes if "step" in vars(base)], classes, but="step")


def inside_of_steps(optimizer: torch.optim.Optimizer) -> Found | None:
    """What somebody put in the place of a function of torch that `step()` may call. Hot path."""
    kind: Any = type(optimizer)
    inside, own = _steps(kind), vars(optimizer)
    if not inside.methods.isdisjoint(own):
        name = next(name for name in inside.methods if name in own)
        return f"{name} of {kind.__name__}", own[name]
    return inside.replaced()


@functools.cache
def _scalers(kind: Any) -> _Inside:
    classes = [base for base in kind.__mro__ if base.__module__.partition(".")[0] == "torch"]
    roots = [
        (base, name) for base in classes for name in vars(base) if isinstance(vars(base)[name], FunctionType)
    ]
    return _Inside(roots, classes)


def inside_of_scalers(scaler: torch.amp.GradScaler) -> Found | None:
    """What somebody put in the place of a function of torch that the scaler's methods may call. Hot path."""
    kind: Any = type(scaler)
    return _scalers(kind).replaced()
