"""Calls functions through `torch.compile`, and has Dynamo trace them with the settings that the library needs."""

from __future__ import annotations

import functools
import threading
import types
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, TypeVar

import torch

from pygraph_train.boundary import quietly
from pygraph_train.torch_private.growing import Growing

__all__ = ["CompiledFunction", "untraced"]

F = TypeVar("F", bound=Callable[..., Any])

_SETTINGS: dict[str, Any] = {
    "suppress_errors": True,  # what Dynamo itself fails at runs as it is written
    "skip_nnmodule_hook_guards": False,  # hooks that are added later are noticed
    "specialize_float": False,
    "allow_unspec_int_on_nn_module": True,
    "allow_rnn": True,
    "trace_numpy": False,  # NumPy computes in other types than its imitation in torch
    "enable_dynamo_decompositions": False,  # `a.add_(b, alpha=c)` is rounded once, not twice
}


def untraced(fn: F) -> F:
    """`fn`, so that Dynamo traces neither it nor what it calls: autograd calls it from frames that are traced.

    `torch.compiler.disable` does the same, and takes the host longer. (2.11 to 2.15)
    """

    @functools.wraps(fn)
    def outside(*args: Any) -> Any:
        before = torch._C._dynamo.eval_frame.set_eval_frame(None)
        try:
            return fn(*args)
        finally:
            torch._C._dynamo.eval_frame.set_eval_frame(before)

    _outside.add(outside.__code__)
    return outside  # type: ignore[return-value]


_outside: set[types.CodeType] = set()


@functools.cache
def _skip_outside() -> None:
    """Have Dynamo leave the wrappers of `untraced` to Python; they have their code in common."""
    from torch._dynamo.eval_frame import skip_code

    for code in _outside:
        skip_code(code)


_MOST_ANEW = 8
"""So often a function whose step raised while it was traced is traced as if it were another one."""


def _copied(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A function with code of its own: Dynamo never looks again at code that failed in a trace, on a bad batch as well."""
    if isinstance(fn, types.MethodType):
        return types.MethodType(_copied(fn.__func__), fn.__self__)
    if not isinstance(fn, types.FunctionType):
        return fn
    copy = types.FunctionType(
        fn.__code__.replace(), fn.__globals__, fn.__name__, fn.__defaults__, fn.__closure__
    )
    copy.__kwdefaults__ = fn.__kwdefaults__
    return copy


class _Here(threading.local):
    """Of this thread: the functions of ours that are called, and what a trace in the present call has set."""

    def __init__(self) -> None:
        self.called: list[CompiledFunction] = []
        self.settings: ExitStack | None = None


_here = _Here()


def _trace_begins(*_: Any) -> None:
    """A trace begins in this thread: if a function of ours is called, it gets our settings until the call ends."""
    if _here.called and _here.settings is None:
        import torch._dynamo.config as config

        known = {name: value for name, value in _SETTINGS.items() if hasattr(config, name)}
        _here.settings = settings = ExitStack()
        settings.enter_context(config.patch(known))
        quietly(lambda: settings.enter_context(_here.called[-1].growing.left_to_python()))


def _listen() -> None:
    """Have Dynamo tell us of traces. `torch.compiler.reset` makes it forget. Hot path."""
    from torch._dynamo.callback import callback_handler

    if _trace_begins not in callback_handler.start_callbacks:
        callback_handler.register_start_callback(_trace_begins)


class CompiledFunction:
    """A function that `torch.compile` has prepared.

    Args:
        fn: the user's.
        backend: gets each graph.
    """

    def __init__(self, fn: Callable[..., Any], backend: Callable[..., Any]) -> None:
        self.fn = fn
        self.growing = Growing()
        self._backend, self._anew = backend, 0
        _skip_outside()
        self._compiled = torch.compile(fn, backend=backend)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it. Hot path."""
        _listen()
        here = _here
        here.called.append(self)
        try:
            return self._compiled(*args, **kwargs)
        except BaseException:
            if here.settings is not None and self._anew < _MOST_ANEW:
                self._anew += 1
                self._compiled = torch.compile(_copied(self.fn), backend=self._backend)
            raise
        finally:
            here.called.pop()
            if here.settings is not None and not here.called:
                settings, here.settings = here.settings, None
                settings.close()
