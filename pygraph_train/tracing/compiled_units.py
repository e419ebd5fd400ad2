"""A step whose modules are compiled one by one, because what runs around each of them cannot be traced."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from pygraph_train.problems import first_line
from pygraph_train.torch_private.dynamo import compiled_apart, compiled_call, dynamo_restart
from pygraph_train.torch_private.tracing import dynamo_region_config
from pygraph_train.tracing.opened_trace import OpenedTrace
from pygraph_train.tracing.recompute import as_eager, eager_copy, write_in_checkpoint
from pygraph_train.tracing.trace import Compiler
from pygraph_train.tracing.traced_code import held_weakly

__all__ = ["CompiledUnits"]

_MOST_VARIANTS = 64
"""Of one module: it may be called with several shapes in one step."""


class CompiledUnits:
    """A step in which the forwards of some modules are compiled, and everything else runs as it is.

    What cannot be compiled runs with eager kernels: nothing fails for it, since other ranks may be in the same step.

    Args:
        trace: of the step.
        modules: whose forwards are compiled. Modules that the user has compiled stay as they are.
        compiler: compiles a graph of Dynamo's.

    Attributes:
        trace: of the step.
        left: what could not be done.
    """

    def __init__(self, trace: OpenedTrace, modules: Sequence[nn.Module], compiler: Compiler) -> None:
        self.trace = trace
        self.left: list[str] = []
        self._compiler = compiler
        backend = held_weakly(self._compile)
        # code of its own for each module: Dynamo sets few guards on modules of FSDP, so what is compiled for one of
        # them would serve another one
        self._forwards = [
            (m, functools.partial(compiled_apart(_unit, backend), m.forward))
            for m in modules
            if compiled_call(m) is None
        ]

    def __call__(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run `fn(*args, **kwargs)` in Python."""
        self.trace.look(fn, args, kwargs)
        # `torch.compile(dynamic=False)` would change these around each call, in 2.11 for all threads
        sizes: dict[str, Any] = {"automatic_dynamic_shapes": False, "assume_static_by_default": True}
        with self._installed(), dynamo_region_config(recompile_limit=_MOST_VARIANTS, **sizes) as failures:
            result = self.trace.run(fn, args, kwargs)
        self.left += [f"a module runs with eager kernels: {first_line(failure)}" for failure in failures]
        return result

    @contextmanager
    def _installed(self) -> Iterator[None]:
        """Calls of the modules run the compiled forwards, beneath the hooks."""
        before = [vars(module).get("forward") for module, _ in self._forwards]
        try:
            for module, forward in self._forwards:
                module.forward = forward
            yield
        finally:
            for (module, _), own in zip(self._forwards, before, strict=True):
                if own is None:
                    vars(module).pop("forward", None)
                else:
                    module.forward = own

    def _compile(self, graph: torch.fx.GraphModule, example_inputs: list[Any]) -> Callable[..., Any]:
        eager = eager_copy(graph)
        if eager is None or write_in_checkpoint(graph) is not None:
            self.left.append("a module with a checkpoint inside runs with eager kernels")
            return as_eager(graph).forward
        try:
            return self._compiler(graph, example_inputs, self.left)
        except dynamo_restart():  # not a failure: Dynamo traces once more
            raise
        except Exception as error:
            self.left.append(f"a module runs with eager kernels: {first_line(error)}")
            return eager.forward


def _unit(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return forward(*args, **kwargs)
