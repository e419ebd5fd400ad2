"""Changes of Dynamo: what goes around a function of it, and what it does not look at."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

__all__ = [
    "Around",
    "SharedChange",
    "around_examples",
    "before_examples",
    "changed",
    "no_bounded_deques",
    "no_comparisons",
]


@dataclass(frozen=True)
class Around:
    """The value of a change that goes around what is there before it, changed or not."""

    make: Callable[[Any], Any]


@contextmanager
def changed(changes: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Context: (owner, attribute, value), as many as there are.

    The `patch` of torch's config modules leaves a variable in the thread's context each time that it is called,
    and this is for every step.
    """
    before = []
    try:
        for owner, name, value in changes:
            # of a class what it holds itself: a static method is not the function that it gives
            old = vars(owner)[name] if isinstance(owner, type) else getattr(owner, name)
            before.append((owner, name, old))
            setattr(owner, name, value.make(old) if isinstance(value, Around) else value)
        yield
    finally:
        for owner, name, value in reversed(before):
            setattr(owner, name, value)


class SharedChange:
    """A change of the process that several threads may want at a time. The first one makes it, the last one undoes it.

    Args:
        make: a context in which the change holds.
    """

    def __init__(self, make: Callable[[], AbstractContextManager[Any]]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._wanted = 0
        self._undo = ExitStack()

    @contextmanager
    def __call__(self) -> Iterator[None]:
        """Context in which the change holds."""
        with self._lock:
            if not self._wanted:
                self._undo.enter_context(self._make())
            self._wanted += 1
        try:
            yield
        finally:
            with self._lock:
                self._wanted -= 1
                if not self._wanted:
                    self._undo.close()


def around_examples(around: Callable[[Any], Any]) -> tuple[tuple[Any, str, Any], ...]:
    """What goes around the function by which Dynamo computes what a new node of its graph is like. (2.11, 2.13)

    Args:
        around: makes it of the function that is there, which takes the node and Dynamo's translator.
    """
    from torch._dynamo.variables import builder, tensor

    return (builder, "get_fake_value", Around(around)), (tensor, "get_fake_value", Around(around))


def before_examples(see: Callable[[Any, Any], None]) -> tuple[tuple[Any, str, Any], ...]:
    """Before Dynamo computes what a new node is like, `see` gets it with the translator, and may rewrite it."""

    def around(get_fake_value: Callable[..., Any]) -> Callable[..., Any]:
        def found(node: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
            see(node, tx)
            return get_fake_value(node, tx, *args, **kwargs)

        return found

    return around_examples(around)


def no_bounded_deques() -> tuple[Any, str, Any]:
    """Dynamo looks at no deque with a `maxlen`: of a full one it drops nothing in time. (2.13; 2.11 not tried)"""
    from torch._dynamo.exc import unimplemented
    from torch._dynamo.variables.builder import VariableBuilder

    def around(stock: Callable[..., Any]) -> Callable[..., Any]:
        def wrap(self: Any, value: Any) -> Any:
            if isinstance(value, deque) and value.maxlen is not None:
                unimplemented(
                    gb_type="deque with a maxlen",
                    context="",
                    explanation="The step looks at a deque with a maxlen.",
                    hints=[],
                )
            return stock(self, value)

        return wrap

    return VariableBuilder, "_wrap", Around(around)


def no_comparisons(unseen: type) -> tuple[Any, str, Any]:
    """Dynamo compares no list with a variable of this class: that of 2.11 takes them for different. (2.11, 2.13)

    Args:
        unseen: of variables. Its `refuse()` ends the trace.
    """
    from torch._dynamo.variables.lists import BaseListVariable

    def around(stock: Callable[..., Any]) -> Callable[..., Any]:
        def call_method(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
            if name in _COMPARISONS and args and isinstance(args[0].realize(), unseen):
                args[0].realize().refuse()  # type: ignore[attr-defined]
            return stock(self, tx, name, args, kwargs)

        return call_method

    return BaseListVariable, "call_method", Around(around)


_COMPARISONS = {"__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"}
