"""When regions run with eager kernels: in steps with late gradients of inputs, and under hooks on saved tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from pygraph_train.problems import NotLegal, Problem, user_location
from pygraph_train.torch_private.autocast import breaks_inside
from pygraph_train.torch_private.hooks import user_hooks_on_saved_tensors
from pygraph_train.tracing.recompute import has_checkpoint

__all__ = ["LATE_LEAVES", "RegionKernels", "is_leaf", "refuse_open_autocast", "refuse_watched_checkpoint"]

LATE_LEAVES = (
    "a step asks for the gradient of an input, and the first steps did not: the rest of such a step runs "
    "with eager kernels"
)

_WATCHED_SAVES = (
    "a forward under saved_tensors_hooks runs with eager kernels, because compiled kernels would give the hooks other "
    "tensors"
)


def refuse_watched_checkpoint(graph: torch.fx.GraphModule) -> None:
    """Leave a forward to Python that holds a checkpoint, and whose saved tensors a hook of the user sees.

    A checkpoint saves its arguments, and in a graph all that it reads is an argument.

    Raises:
        NotLegal: it is such a forward.
    """
    if user_hooks_on_saved_tensors() and has_checkpoint(graph):
        why = (
            "forward and backward get no graphs of their own: a checkpoint runs under hooks on saved tensors"
        )
        raise NotLegal(
            Problem(why, user_location(), "Enter saved_tensors_hooks around a part without checkpoints")
        )


def refuse_open_autocast(graph: torch.fx.GraphModule) -> None:
    """Leave a part to Python that may end in the middle of an autocast block whose casts later parts use.

    Raises:
        NotLegal: it may.
    """
    if breaks_inside(graph):
        why = (
            "forward and backward get no graphs of their own: a block of autocast is broken into parts, and shares "
            "casts of weights, which parts would make anew"
        )
        raise NotLegal(Problem(why, user_location(), "Enter autocast around what can be one graph"))


class RegionKernels:
    """Which kernels the regions of a step run with.

    A step that asks for the gradient of an input, when the first steps did not, is most often a step with a gradient
    penalty, which differentiates that gradient. Compiled kernels cannot do that, so the rest of that step is eager.

    Compiled kernels save other tensors for the backward than eager ones. Hooks on saved tensors may change what they
    get, so a region under such hooks runs with eager kernels, unless the user asked for compiled ones.

    Args:
        note: tells the user once that such hooks were met.
        compile: whether the user asked for compiled kernels.

    Attributes:
        eager: whether the rest of the present step runs with eager kernels.
    """

    def __init__(self, note: Callable[[str], None], *, compile: bool) -> None:
        self.eager = False
        self._note: Callable[[str], None] | None = note
        self._compile = compile

    def either(self, compiled: Callable[..., Any], eager: Callable[..., Any]) -> Callable[..., Any]:
        """A region of every step."""
        if self._compile:
            return lambda *args: (eager if self.eager else compiled)(*args)
        return lambda *args: (eager if self.eager or self._are_saves_watched() else compiled)(*args)

    def _are_saves_watched(self) -> bool:
        if not user_hooks_on_saved_tensors():
            return False
        if self._note is not None:
            self._note(str(Problem(_WATCHED_SAVES, user_location())))
            self._note = None
        return True

    def eager_from_here(self, eager: Callable[..., Any]) -> Callable[..., Any]:
        """A region whose inputs make the step such a step."""

        def run(*args: Any) -> Any:
            self.eager = True
            return eager(*args)

        return run


def is_leaf(value: object) -> bool:
    """Whether somebody may ask for the gradient of an input that is no parameter."""
    wanted = isinstance(value, Tensor) and value.requires_grad and value.is_leaf
    return wanted and not isinstance(value, nn.Parameter)
