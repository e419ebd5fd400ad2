"""A step of an Accelerate loop as `explain` looks at it."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from pygraph_train.diagnosis.subject import Subject, subject_of
from pygraph_train.integrations.accelerate.plugin import GraphedStepFunction
from pygraph_train.patches import nothing

_CALLS = (
    "Calls that Accelerate knows (clipping, optimizer.step, zero_grad, schedulers) were not made, and the backward was "
    "made behind the function."
)


def subject_of_step(step: GraphedStepFunction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Subject:
    """A step made by `accelerator.graphed_step`, with the models and optimizers of its Accelerator."""
    accelerator = step.accelerator
    losses: list[Tensor] = []

    def backward(loss: Tensor, **_: Any) -> None:
        losses.append(loss)

    def no_norm(*_: Any, **__: Any) -> Tensor:
        return torch.zeros((), device=accelerator.device)

    def loss_of(*args: Any, **kwargs: Any) -> Any:
        step.fn(*args, **kwargs)
        return losses.pop() if losses else None

    models = list(accelerator._models)
    model = models[0] if len(models) == 1 else nn.ModuleList(models)
    optimizers = [optimizer.optimizer for optimizer in accelerator._optimizers]
    subject = subject_of(step.name, loss_of, args, kwargs, model, optimizers, accelerator.scaler)
    subject.context, subject.notes = step.loop.paused, [_CALLS]
    subject.left_out = [
        (accelerator, "backward", backward),
        (accelerator, "clip_grad_norm_", no_norm),
        (accelerator, "clip_grad_value_", nothing),
        (accelerator, "accumulate", lambda *models: nullcontext()),
        *(
            (optimizer, name, nothing)
            for optimizer in accelerator._optimizers
            for name in ("step", "zero_grad")
        ),
        *((scheduler, "step", nothing) for scheduler in accelerator._schedulers),
    ]
    return subject
