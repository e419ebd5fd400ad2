"""`explain`: how a training step will run, and what stands in the way, before training."""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from pygraph_train.diagnosis.explanation import Explanation
from pygraph_train.diagnosis.look import explained
from pygraph_train.diagnosis.subject import Subject, subject_of
from pygraph_train.optimizers.several import OptimizerSet
from pygraph_train.patches import nothing
from pygraph_train.step.graphed import GraphedStep


def explain(
    step_fn: Any,
    *args: Any,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    manual_optimization: bool = False,
    **kwargs: Any,
) -> Explanation:
    """Say which phases of a training step will run from CUDA graphs, and list what stands in the way.

    ```python
    print(explain(step_fn, batch, model=model, optimizer=optimizer))  # the arguments of a GraphedStep
    print(explain(lightning_module, batch))
    print(explain(train_step, batch))  # made by accelerator.graphed_step, or a GraphedStep
    ```

    Forward and backward of the step run as in a training, two to six times, and on a CUDA device a dozen times more
    to measure what graphs save. Parameters, buffers, gradients, the batch and random states are put back, and the
    optimizer's `step` is not called. The Python of the step runs each time: what it prints is printed, and what it
    changes of your Python objects stays changed.

    Args:
        step_fn: a function that computes the loss from its arguments, as `GraphedStep` takes it; a
            GraphedStep; a step made by `accelerator.graphed_step`; or a LightningModule. Of a LightningModule,
            `training_step` and the optimizer of `configure_optimizers` are examined.
        *args: the arguments of the step, usually one batch. Tensors on the CPU are copied to the model's device.
        model: the trained module. Without it, the modules that `step_fn` refers to are examined.
        optimizer: one, or a list of several, examined as well.
        manual_optimization: `step_fn` makes the whole step itself, as `GraphedStep` takes it with this option.
        **kwargs: further arguments of the step.

    Returns:
        An `Explanation`: print it, or read `.obstacles` (a tuple of `Problem`), `.plan`, `.notes` and `.to_dict()`.

    Raises:
        TypeError: `step_fn` cannot be called and is no LightningModule.
    """
    return explained(_subject(step_fn, args, kwargs, model, optimizer, manual_optimization))


def _subject(step: Any, args: Any, kwargs: Any, model: Any, optimizer: Any, manual: bool) -> Subject:
    if any(cls.__name__ == "LightningModule" for cls in type(step).__mro__):
        from pygraph_train.integrations.lightning.explained import subject_of_module

        return subject_of_module(step, args, kwargs)
    accelerate = sys.modules.get("pygraph_train.integrations.accelerate.plugin")
    if accelerate is not None and isinstance(step, accelerate.GraphedStepFunction):
        from pygraph_train.integrations.accelerate.explained import subject_of_step

        return subject_of_step(step, args, kwargs)
    fabric = sys.modules.get("pygraph_train.integrations.fabric.step")
    if fabric is not None and isinstance(step, fabric.FabricStep):
        optimizers = list(map(_unwrapped, _listed(step.optimizer)))
        models = nn.ModuleList(step.model) if isinstance(step.model, (list, tuple)) else step.model
        subject = _subject(step.fn, args, kwargs, models, optimizers, step.manual)
        subject.context = step.looked_at
        return subject
    if isinstance(step, GraphedStep) and step.manual and (parts := step.parts) is not None:
        subject = _subject(parts.fn, args, kwargs, parts.model, list(parts.optimizers), manual=True)
        subject.context = parts.loop.paused
        return subject
    if isinstance(step, GraphedStep):
        program = copy.copy(step.program)  # to which it may tell what it is asked here
        subject = Subject(_name(program.step_fn), program, args, kwargs)
    elif isinstance(step, nn.Module) or not callable(step):
        raise TypeError(
            "explain takes a function that computes the loss, a GraphedStep, a step of "
            f"accelerator.graphed_step or a LightningModule; got a {type(step).__name__}"
        )
    else:
        modules = list(_modules_of(step))
        given = modules[0] if len(modules) == 1 else nn.ModuleList(modules)
        optimizers = list(map(_unwrapped, _listed(optimizer)))
        subject = subject_of(_name(step), step, args, kwargs, model or given, optimizers)
        subject.modules = modules
        if model is None and not modules:
            subject.notes.append("No model was given and none was found. Pass model=.")
        subject.program.by_hand = manual
    if subject.program.by_hand:
        stepped = _listed(subject.program.optimizer)
        subject.left_out = [(o, name, nothing) for o in stepped for name in ("step", "zero_grad")]
    return subject


def _listed(optimizer: Any) -> list[Any]:
    if isinstance(optimizer, OptimizerSet):
        return list(optimizer.members)
    return (
        list(optimizer) if isinstance(optimizer, (list, tuple)) else [] if optimizer is None else [optimizer]
    )


def _unwrapped(optimizer: Any) -> Any:
    """The user's optimizer inside of those of Accelerate and Fabric."""
    inner = getattr(optimizer, "optimizer", None)
    return inner if isinstance(inner, torch.optim.Optimizer) else optimizer


def _modules_of(fn: Callable[..., Any]) -> Iterator[nn.Module]:
    """The modules that a function refers to, each once."""
    fn = inspect.unwrap(fn)
    found = [getattr(fn, "__self__", None)]
    try:
        names = inspect.getclosurevars(fn)
        found += [*names.nonlocals.values(), *names.globals.values()]
    except (TypeError, ValueError):  # no function of Python, or a variable that has no value yet
        pass
    yield from {id(m): m for m in found if isinstance(m, nn.Module)}.values()


def _name(fn: Any) -> str:
    name = getattr(fn, "__qualname__", type(fn).__qualname__)
    return str(name).rpartition("<locals>.")[2]
