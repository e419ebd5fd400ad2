"""What of a step goes through Dynamo, where its forward and backward have graphs of their own."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import nn

from pygraph_train.boundary import STEP, executing
from pygraph_train.step.program import Call, plain_call
from pygraph_train.torch_private.dynamo import (
    compiled_apart,
    compiled_call,
    set_compiled_call,
    uncompiled_call,
)

__all__ = ["Backend", "Level", "Modules", "WholeFunction"]

R = TypeVar("R")

Backend = Callable[[torch.fx.GraphModule, list[Any]], Callable[..., Any]]
"""Of `torch.compile`."""


class Level:
    """What of the step goes through Dynamo. This one: nothing."""

    def __init__(self, backend: Backend) -> None:
        self.called = False
        self._backend = backend

    def run(self, run: Callable[[Call], R]) -> R:
        return run(plain_call)


class WholeFunction(Level):
    """The step's function."""

    @functools.cached_property
    def _call(self) -> Call:
        return compiled_apart(_region, self._backend)  # imports what takes seconds on a cold disk

    def run(self, run: Callable[[Call], R]) -> R:
        return run(executing(self._call, STEP))


class Modules(Level):
    """The model and its children, where they hold parameters; those that are called first.

    `Module.compile()` works the same way: `_compiled_call_impl` is what a call of the module runs. Here it is
    there only during the step.
    """

    def __init__(self, backend: Backend, model: nn.Module) -> None:
        super().__init__(backend)
        found = [model, *model.children()]
        self._modules = [m for m in found if any(True for _ in m.parameters())]
        self._calls = [
            functools.partial(_call_module, compiled_apart(_region, backend), m) for m in self._modules
        ]

    def run(self, run: Callable[[Call], R]) -> R:
        with self._installed():
            return run(plain_call)

    @contextmanager
    def _installed(self) -> Iterator[None]:
        mine = [
            (m, call) for m, call in zip(self._modules, self._calls, strict=True) if compiled_call(m) is None
        ]
        try:
            for module, call in mine:
                set_compiled_call(module, call)
            yield
        finally:
            for module, _ in mine:
                set_compiled_call(module, None)


def _call_module(call: Call, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return call(uncompiled_call(module), args, kwargs)


def _region(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return fn(*args, **kwargs)
