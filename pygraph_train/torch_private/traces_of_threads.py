"""Whose settings a trace of Dynamo has, where several threads train: Dynamo has one set for the whole process.

A thread says how its traces are made while it calls compiled code. The settings are in place during the trace alone,
and Dynamo makes one trace at a time.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Generic, TypeVar

from pygraph_train.torch_private.cudnn_dropout import generators_apart

__all__ = ["PerThread", "Trace", "TracedBy", "around_traces", "no_other_trace"]

T = TypeVar("T")

Trace = Callable[..., Any]
"""Traces a frame of Python: what Dynamo calls for a frame without compiled code, and its arguments."""


class PerThread(threading.local, Generic[T]):
    """Values that contexts hold for their own thread.

    Threads of autograd run parts of a step for another thread. They find what any thread holds, the last one first.

    Args:
        everywhere: a list that all threads share.
    """

    def __init__(self, everywhere: list[T]) -> None:
        self._own: list[T] = []
        self._everywhere = everywhere

    def push(self, value: T) -> None:
        self._own.append(value)
        self._everywhere.append(value)

    def pop(self) -> None:
        value, everywhere = self._own.pop(), self._everywhere
        with _changes:
            if everywhere[-1] is value:
                everywhere.pop()
            else:
                del everywhere[max(i for i, one in enumerate(everywhere) if one is value)]

    @property
    def own(self) -> list[T]:
        """Of this thread, the innermost one last."""
        return self._own

    @property
    def everywhere(self) -> list[T]:
        """Of all threads, what came last in the last place."""
        return self._everywhere

    @property
    def innermost(self) -> T | None:
        """None where there is none."""
        if self._own:
            return self._own[-1]
        # Python has a dummy for each thread that it has not started: those of autograd
        if not isinstance(threading.current_thread(), threading._DummyThread):
            return None
        with _changes:
            return self._everywhere[-1] if self._everywhere else None


class _Inside(threading.local):
    """What this thread does.

    Attributes:
        now: it makes a trace.
        around: contexts around its traces.
    """

    now = False

    def __init__(self) -> None:
        self.around: list[Callable[[], AbstractContextManager[Any]]] = []


_changes = threading.RLock()  # the garbage collector may run anything inside
_ways: PerThread[Trace] = PerThread([])
_inside = _Inside()


class TracedBy:
    """Context: what this thread calls inside is traced by `way(trace, *args)`. `trace` is Dynamo's. (2.11, 2.13)"""

    __slots__ = ("_way",)

    def __init__(self, way: Trace) -> None:
        self._way = way

    def __enter__(self) -> None:
        with _changes:
            _ways.push(self._way)
            if len(_ways.everywhere) == 1:
                owner, name, _, ours = _tracer()
                setattr(owner, name, ours)

    def __exit__(self, *error: object) -> None:
        with _changes:
            _ways.pop()
            if not _ways.everywhere:
                owner, name, stock, _ = _tracer()
                setattr(owner, name, stock)


@contextmanager
def around_traces(context: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    """Such a context is around each trace that this thread makes inside, if `TracedBy` says how."""
    _inside.around.append(context)
    try:
        yield
    finally:
        _inside.around.pop()


def no_other_trace() -> AbstractContextManager[Any]:
    """Context: no other thread traces meanwhile. Nothing that may wait for another thread belongs inside."""
    from torch._dynamo.convert_frame import compile_lock

    return compile_lock


@functools.cache
def _tracer() -> tuple[type, str, Trace, Trace]:
    """Where Dynamo has what it calls for a frame without compiled code; that function, and ours."""
    from torch._dynamo.convert_frame import CatchErrorsWrapper, compile_lock

    stock = CatchErrorsWrapper.__call__

    def trace(*args: Any) -> Any:
        # Dynamo sets random states to what they are
        with generators_apart():
            return stock(*args)

    def ours(*args: Any) -> Any:
        if _inside.now:
            return trace(*args)
        way = _ways.innermost
        if way is None:  # this thread has none, or the last one has ended meanwhile
            return stock(*args)
        with compile_lock, ExitStack() as stack:
            _inside.now = True
            try:
                for context in _inside.around:
                    stack.enter_context(context())
                return way(trace, *args)
            finally:
                _inside.now = False

    return CatchErrorsWrapper, "__call__", stock, ours
