"""A function with several backwards or updates of an Accelerate loop, as one graph.

`step.py` puts off the calls that Accelerate knows, and a graph makes one backward and one update in their place. Where
a function makes more of them, or uses parameters after them, the graph holds the function as it is written. Only
schedulers at its end are put off: they run in Python.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

from torch import Tensor, nn

from pygraph_train.integrations.accelerate.calls import Script
from pygraph_train.integrations.accelerate.stubs import AutocastStub
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
from pygraph_train.step.plan import PositionInAccumulation
from pygraph_train.step.program import Call
from pygraph_train.torch_private.optim import count_optimizer_step

__all__ = ["AccelerateByHand", "why_not_by_hand"]


def why_not_by_hand(accelerator: Any, *, shared: bool) -> Problem | None:
    """Why no graph can hold a function of this Accelerator as it is written.

    Args:
        shared: whether models are wrapped for several processes.
    """
    several = "a step with several backwards or updates has no graph of its own"
    if shared:
        return Problem(f"several processes train: {several}")
    if accelerator.scaler is not None:
        return Problem(f"a GradScaler is used: {several}", fix='Train with mixed_precision="bf16"')
    if accelerator.gradient_accumulation_steps > 1:
        return Problem(f"gradients are accumulated: {several}")
    return None


class AccelerateByHand(FunctionByHand):
    """`StepProgram` over a function of an Accelerate loop that is captured as it is written.

    Args:
        fn: the step.
        accelerator: whose `backward`, optimizers and schedulers `fn` uses.
        used: the optimizers of the Accelerator that the step has used.
    """

    def __init__(self, fn: Callable[..., Any], accelerator: Any, used: list[Any]) -> None:
        models = accelerator._models
        super().__init__(
            fn,
            models[0] if len(models) == 1 else nn.ModuleList(models),
            OptimizerSet([accelerated.optimizer for accelerated in used]),
            accelerator.device,
        )
        self.accelerated = used
        self.problem: Problem | None = None
        self._accelerator = accelerator
        self._made: list[tuple[str, int]] = []
        self._stand_ins += [
            (accelerator, "autocast", AutocastStub(accelerator)),
            (accelerator, "backward", traced_backward),
            (accelerator, "clip_grad_norm_", traced_clip_grad_norm),
            (accelerator, "clip_grad_value_", traced_clip_grad_value),
            *stand_ins_of(used),
            *((scheduler, "step", _Schedule(scheduler)) for scheduler in accelerator._schedulers),
        ]

    def at(self, script: Script, *, sync: bool) -> PositionInAccumulation:
        """Where the present step stands."""
        return self.position()

    def optimizers_used(self) -> list[Any]:
        """What the step updates."""
        return list(self._optimizers)

    def forward(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Tensor, Any]:
        """The whole step but for its schedulers."""
        self._made.clear()
        with standing_in(self._noting()):
            loss, result = super().forward(call, args, kwargs)
        return loss, (result, tuple(self._made))

    def finish(
        self, result: Any, made: tuple[tuple[str, int], ...], update: Callable[..., None], *, updated: bool
    ) -> Any:
        """What remains to be done in Python after a replay."""
        for name, index in made:
            if name == "step":
                count_optimizer_step(self._accelerator._optimizers[index])
            else:
                with nullcontext() if self._preparation is None else self._preparation.suspended():
                    self._accelerator._schedulers[index].step()
        return result

    def _noting(self) -> Iterator[tuple[Any, str, Any]]:
        """Optimizers that note their steps, and schedulers that note them and do nothing."""
        for index, optimizer in enumerate(self._accelerator._optimizers):
            yield optimizer, "step", self._noted("step", index, optimizer.step)
        for index, scheduler in enumerate(self._accelerator._schedulers):
            yield scheduler, "step", self._noted("scheduler.step", index, _do_nothing)

    def _noted(self, name: str, index: int, call: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            self._made.append((name, index))
            return call(*args, **kwargs)

        return noted


class _Schedule:
    """In the place of a scheduler's step while Dynamo looks at it."""

    def __init__(self, scheduler: Any) -> None:
        self.scheduler = scheduler

    def __call__(self, *args: Any) -> None:
        if args:
            raise NotImplementedError("a graph cannot hold scheduler.step(metric)")


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    """In the place of a scheduler's step, which is made after the replay."""
