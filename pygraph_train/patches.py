"""What is changed for a while: attributes of somebody else's objects, and when Python collects garbage. And what stands
for a call: a copy of its function, or what does not keep its object.
"""

from __future__ import annotations

import gc
import types
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

_MISSING = object()


def nothing(*args: Any, **kwargs: Any) -> None:
    """In the place of a call that is left out."""


@contextmanager
def standing_in(calls: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Put `call` over `owner.name` for each (owner, name, call), and take it away again.

    The owner of a call is an object with a `__dict__`, or a class that defines that name itself.
    """
    undo: list[tuple[Any, str, Any]] = []
    try:
        for owner, name, call in calls:
            undo.append((owner, name, vars(owner).get(name, _MISSING)))
            if isinstance(owner, type):
                setattr(owner, name, call)
            else:  # a module's own __setattr__ is not asked
                vars(owner)[name] = call
        yield
    finally:
        for owner, name, before in reversed(undo):
            if isinstance(owner, type):
                setattr(owner, name, before)
            elif before is _MISSING:
                vars(owner).pop(name, None)
            else:
                vars(owner)[name] = before


@contextmanager
def not_collecting() -> Iterator[None]:
    """Context in which Python collects no garbage by itself.

    While a stream captures, a dead object of another library may free CUDA memory or destroy an event, which is
    forbidden. A trace of Dynamo makes so many objects that all of the process are looked through: a fifth of its time.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def copied_function(fn: Callable[..., Any]) -> Any:
    """A function with code of its own.

    Dynamo never looks again at code that failed in a trace, on a bad batch as well, or that many models have shared.
    """
    if isinstance(fn, types.MethodType):
        return types.MethodType(copied_function(fn.__func__), fn.__self__)
    if not isinstance(fn, types.FunctionType):
        return fn
    code = fn.__code__.replace()
    copy = types.FunctionType(code, fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__)
    copy.__kwdefaults__ = fn.__kwdefaults__
    return copy


def held_weakly(call: Callable[..., Any], otherwise: Any = None) -> Callable[..., Any]:
    """A method or a callable object that the result does not keep; what is returned (`otherwise`) once that is gone."""
    known: Any = (weakref.WeakMethod if isinstance(call, types.MethodType) else weakref.ref)(call)
    return lambda *given: otherwise if (there := known()) is None else there(*given)
