"""A step of an Accelerate loop as `explain` looks at it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from pygraph_train.diagnosis.subject import Subject
from pygraph_train.integrations.accelerate.step import GraphedStepFunction
from pygraph_train.integrations.accelerate.stubs import stubs
from pygraph_train.parallel.replication import RECORDER
from pygraph_train.patches import standing_in

__all__ = ["subject_of"]

_CALLS = (
    "Calls that Accelerate knows (backward, clipping, optimizer.step, zero_grad) were not made. Only the "
    "first real call of the step shows their order, and how the step uses gradients after backward."
)


def subject_of(step: GraphedStepFunction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Subject:
    """A step made by `accelerator.graphed_step`, with the models and optimizers of its Accelerator."""
    fn, accelerator, loop = step.parts()
    models = list(accelerator._models)
    model = models[0] if len(models) == 1 else nn.ModuleList(models)
    put_off: list[Any] = []
    made = stubs(accelerator, put_off)

    @contextmanager
    def putting_off() -> Iterator[None]:
        with loop.paused(), standing_in(made):
            yield

    return Subject(
        step.name,
        fn,
        args,
        kwargs,
        model,
        [optimizer.optimizer for optimizer in accelerator._optimizers],
        accelerator.device,
        recorder=(".put_off", RECORDER),
        context=putting_off,
        notes=[_CALLS],
        takes_loss_from="",
    )
