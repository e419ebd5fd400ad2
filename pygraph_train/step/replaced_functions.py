"""Functions of torch that the user's loop would call in each step, and that somebody has replaced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pygraph_train.problems import Problem, defined_at
from pygraph_train.step.program import StepProgram
from pygraph_train.torch_private.optim import SCALER_METHODS
from pygraph_train.torch_private.packages import layers_of

__all__ = ["ReplacedFunctions"]

_OURS = ("torch", "pygraph_train")
_WRAPPERS = ("accelerate", "lightning", "lightning_fabric", "pytorch_lightning", "transformers")
"""Packages whose optimizers pass `zero_grad` on to that of torch."""
_FUSED = ("apex.optimizers.", "deepspeed.ops.", "transformer_engine.pytorch.optimizers.")
"""Modules of optimizers whose own `zero_grad` does what torch's does, where they are made with their defaults."""


class ReplacedFunctions:
    """Looks for replacements: in the place of these functions a replay runs kernels.

    Args:
        program: the step. It calls `zero_grad` of its optimizer, and clips gradients where it says so.
    """

    def __init__(self, program: StepProgram) -> None:
        self._program = program
        self._seen: tuple[Any, ...] = ()
        self._problem: Problem | None = None
        self._seen_of_optimizers: list[Any] = []
        self._problem_of_optimizers: Problem | None = None

    def problem(self) -> Problem | None:
        """Which one is replaced now, `zero_grad` apart. Hot path."""
        methods = self._program.scaling.methods
        clipping = torch.nn.utils.clip_grad_norm_, torch.nn.utils.clip_grad_value_
        present = torch.Tensor.backward, torch.autograd.backward, *clipping, *methods
        if present != self._seen:
            self._seen = present
            self._problem = self._look(*present)
        return self._problem

    def problem_of_optimizers(self) -> Problem | None:
        """Whether `zero_grad` is replaced, which steps with regions call. Hot path."""
        optimizer = None if self._program.by_hand else self._program.optimizer
        if optimizer is None:
            return None
        present = [one.zero_grad for one in getattr(optimizer, "members", (optimizer,))]
        if present != self._seen_of_optimizers:
            self._seen_of_optimizers = present
            self._problem_of_optimizers = self._look_at_optimizers(present)
        found = self._problem_of_optimizers
        return found if found is None or self._program.empties_gradients else None

    def _look(
        self, of_tensors: Any, of_autograd: Any, clip_norm: Any, clip_value: Any, *of_scaler: Any
    ) -> Problem | None:
        found = {"torch.Tensor.backward": of_tensors, "torch.autograd.backward": of_autograd}
        if self._program.clips or self._program.by_hand:
            found |= {
                "torch.nn.utils.clip_grad_norm_": clip_norm,
                "torch.nn.utils.clip_grad_value_": clip_value,
            }
        found |= {
            f"{name} of the GradScaler": one for name, one in zip(SCALER_METHODS, of_scaler, strict=False)
        }
        for name, function in found.items():
            if (foreign := _foreign(function)) is not None:
                return _told(name, foreign)
        return None

    def _look_at_optimizers(self, zero_grads: list[Any]) -> Problem | None:
        optimizer = self._program.optimizer
        for one, zero_grad in zip(getattr(optimizer, "members", (optimizer,)), zero_grads, strict=False):
            if _does_as_torch(one, zero_grad):
                continue
            of_model = isinstance(getattr(zero_grad, "__self__", None), torch.nn.Module)
            foreign = zero_grad if of_model else _foreign(zero_grad, _WRAPPERS)
            if foreign is not None:
                return _told(f"zero_grad of {type(one).__name__}", foreign)
        return None


def _does_as_torch(optimizer: Any, zero_grad: Any) -> bool:
    """Whether gradients become None, which a replay does: not with `set_grad_none=False` or other gradients."""
    module = getattr(getattr(zero_grad, "__func__", None), "__globals__", {}).get("__name__") or ""
    changed = getattr(optimizer, "set_grad_none", None) is False or getattr(
        optimizer, "use_decoupled_grad", False
    )
    return module.startswith(_FUSED) and not changed


def _told(name: str, function: Callable[..., Any]) -> Problem:
    called = getattr(function, "__code__", function)
    own = getattr(called, "co_name", None) or getattr(type(function), "__name__", "something")
    where = defined_at(function) or "of somebody else"
    return Problem(
        f"in the place of torch's, {name} is {own} ({where}), which a replay would not call",
        fix="Leave it as it is in torch, or do its work outside of the step",
    )


def _foreign(function: Any, known: tuple[str, ...] = ()) -> Any:
    """The code of a function that is neither torch's nor pygraph-train's, None where there is none.

    Neither `functools.wraps` hides it, nor do decorators of torch.

    Args:
        known: further packages that it may be of.
    """
    ours = (*_OURS, *known)
    return next((layer for layer, package in layers_of(function) if package not in ours), None)
