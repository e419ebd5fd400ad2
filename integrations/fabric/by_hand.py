"""A function of a Fabric loop that makes its backwards and updates itself, as one graph."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from lightning.fabric import Fabric
from torch import Tensor, nn

from pygraph_train.optimizers.several import OptimizerSet
from pygraph_train.patches import standing_in
from pygraph_train.problems import Problem
from pygraph_train.step.function_by_hand import (
    FunctionByHand,
    stand_ins_of,
    traced_backward,
    traced_clip_grad_norm,
    traced_clip_grad_value,
)
from pygraph_train.step.program import Call

__all__ = ["FabricByHand", "why_not_by_hand"]


def why_not_by_hand(fabric: Fabric, optimizers: Sequence[Any]) -> Problem | None:
    """Why no graph can hold such a function of this Fabric."""
    if getattr(fabric.strategy.precision, "scaler", None) is not None:
        return Problem(
            "a GradScaler is used, and a step that makes its backwards itself has no graph with it",
            fix='Train with precision="bf16-mixed"',
        )
    callbacks = {id(c): c for optimizer in optimizers for c in optimizer._callbacks}.values()
    for callback in callbacks:
        if callable(getattr(callback, "on_after_optimizer_step", None)):
            return Problem(
                f"{type(callback).__name__}.on_after_optimizer_step runs in Python in the middle of the step"
            )
    return None


class FabricByHand(FunctionByHand):
    """`StepProgram` over a function that makes a whole step of a Fabric loop.

    Args:
        fn: the step.
        fabric: whose `backward` and `clip_gradients` `fn` uses.
        models, optimizers: of the step, as Fabric returned them.
        all_models: all that Fabric returned.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        fabric: Fabric,
        models: Sequence[nn.Module],
        optimizers: Sequence[Any],
        all_models: Sequence[nn.Module],
    ) -> None:
        held = OptimizerSet([optimizer.optimizer for optimizer in optimizers])
        super().__init__(fn, nn.ModuleList(models), held, fabric.device)
        self._all_models = all_models
        self._stand_ins += [
            (fabric, "backward", _backward),
            (fabric, "clip_gradients", _clip_gradients),
            *stand_ins_of(optimizers),
        ]

    def context(self) -> Any:
        return standing_in([*self._stand_ins, *self._unhooked()])

    @contextmanager
    def seen_by_dynamo(self) -> Iterator[None]:
        with super().seen_by_dynamo(), standing_in(self._unhooked()):
            yield

    def run(self, call: Call, args: Any, kwargs: Any, position: Any, update: Any) -> Any:
        with standing_in(self._unhooked()):
            return super().run(call, args, kwargs, position, update)

    def forward(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Any]:
        with standing_in(self._unhooked()):
            return super().forward(call, args, kwargs)

    def _unhooked(self) -> list[tuple[Any, str, Any]]:
        """Fabric hooks every result of a model, to see that backward is its own: here it is."""
        return [(model, "_register_backward_hook", _as_it_is) for model in self._all_models]


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def _backward(tensor: Tensor, *args: Any, model: Any = None, **kwargs: Any) -> None:
    """In the place of `fabric.backward`."""
    traced_backward(tensor, *args, **kwargs)


def _clip_gradients(
    module: Any,
    optimizer: Any,
    clip_val: Any = None,
    max_norm: Any = None,
    norm_type: Any = 2.0,
    error_if_nonfinite: bool = True,
) -> Any:
    """In the place of `fabric.clip_gradients`."""
    if clip_val is not None:
        return traced_clip_grad_value(module.parameters(), clip_val)
    if error_if_nonfinite:
        raise NotImplementedError("a graph cannot hold clip_gradients(error_if_nonfinite=True)")
    return traced_clip_grad_norm(module.parameters(), max_norm, norm_type)
