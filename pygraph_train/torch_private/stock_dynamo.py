"""Calls functions through `torch.compile`, and has Dynamo trace them with the settings that the library needs."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch

from pygraph_train.boundary import quietly
from pygraph_train.torch_private.growing import Growing

__all__ = ["CompiledFunction"]

_SETTINGS: dict[str, Any] = {
    "suppress_errors": True,  # what Dynamo itself fails at runs as it is written
    "skip_nnmodule_hook_guards": False,  # hooks that are added later are noticed
    "specialize_float": False,
    "allow_unspec_int_on_nn_module": True,
    "allow_rnn": True,
    "trace_numpy": False,  # NumPy computes in other types than its imitation in torch
    "enable_dynamo_decompositions": False,  # `a.add_(b, alpha=c)` is rounded once, not twice
}


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
        self._compiled = torch.compile(fn, backend=backend)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it. Hot path."""
        _listen()
        here = _here
        here.called.append(self)
        try:
            return self._compiled(*args, **kwargs)
        finally:
            here.called.pop()
            if here.settings is not None and not here.called:
                settings, here.settings = here.settings, None
                settings.close()
