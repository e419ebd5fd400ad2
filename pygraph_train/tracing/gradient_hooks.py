"""Hooks of gradients: autograd calls them in Python, and a replay would not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

from torch import Tensor, nn

from pygraph_train.problems import Problem, defined_at
from pygraph_train.torch_private.hooks import (
    accumulation_hooks,
    backward_hook_tables,
    gradient_hooks,
    hooks_on_accumulation,
)

__all__ = ["backward_hook", "backward_hooks", "hooked"]


def hooked(tensors: Sequence[Any]) -> bool:
    """Whether one of these leaves has a gradient hook. To be asked when hooks were registered: not a hot path.

    Args:
        tensors: leaves, or other owners of gradients, which have no hooks.
    """
    tensors = [t for t in tensors if isinstance(t, Tensor)]
    return (
        any(map(gradient_hooks, tensors))
        or any(map(accumulation_hooks, tensors))
        or any(map(hooks_on_accumulation, tensors))
    )


def backward_hook(model: nn.Module) -> Problem | None:
    """The first of `backward_hooks`."""
    return next(backward_hooks(model), None)


def backward_hooks(model: nn.Module) -> Iterator[Problem]:
    """Hooks that autograd runs in Python during backward: replay would not run them."""
    for name, parameter in model.named_parameters():
        hooks = list((gradient_hooks(parameter) or {}).values())
        hooks += list((accumulation_hooks(parameter) or {}).values())
        hooks += hooks_on_accumulation(parameter)
        for hook in hooks:
            yield Problem(f"parameter {name} has the gradient hook {_name(hook)}", _defined_at(hook))
    for name, module in model.named_modules():
        for hook in chain.from_iterable(map(dict.values, backward_hook_tables(module))):
            yield Problem(
                f"module {name or type(module).__name__} has the backward hook {_name(hook)}",
                _defined_at(hook),
            )


def _name(fn: Any) -> str:
    return getattr(fn, "__qualname__", type(fn).__qualname__)


def _defined_at(fn: Any) -> str | None:
    return defined_at(fn) or defined_at(type(fn).__call__)
