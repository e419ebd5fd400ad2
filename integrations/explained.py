"""`explain`: everything that keeps a training step from being one graph, before training."""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from pygraph_train.diagnosis.explanation import Explanation
from pygraph_train.diagnosis.subject import Subject, explained
from pygraph_train.optimizers.several import OptimizerSet
from pygraph_train.step.function_by_hand import FunctionByHand
from pygraph_train.step.loss_program import LossSteps
from pygraph_train.tracing.signature import flattened

__all__ = ["explain"]


def explain(
    step_fn: Any,
    *args: Any,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    manual_optimization: bool = False,
    **kwargs: Any,
) -> Explanation:
    """List everything that keeps a training step from being one CUDA graph.

    ```python
    print(explain(step_fn, batch, model=model, optimizer=optimizer))  # the arguments of a GraphedStep
    print(explain(lightning_module, batch))
    print(explain(train_step, batch))  # made by accelerator.graphed_step, or a GraphedStep
    ```

    The step is traced by Dynamo and not executed: parameters, buffers, gradients, the optimizer, random states and
    Python objects stay as they are. If there is no obstacle, forward and backward then run a few times on a CUDA device
    to measure how long the GPU waits for the host. They write no gradients, and all that they change is put back.

    Args:
        step_fn: a function that computes the loss from its arguments, as `GraphedStep` takes it; a
            GraphedStep; a step made by `accelerator.graphed_step`; or a LightningModule. Of a LightningModule,
            `training_step` and the optimizer of `configure_optimizers` are examined.
        *args: the arguments of the step, usually one batch. Tensors on the CPU are copied to the model's device.
        model: the trained module. Without it, the modules that `step_fn` refers to are examined.
        optimizer: one, or a list of several, examined as well. Their `step` is not called.
        manual_optimization: `step_fn` makes the whole step itself, as `GraphedStep` takes it with this option.
        **kwargs: further arguments of the step.

    Returns:
        An `Explanation`: print it, or read `.obstacles` (a tuple of `Problem`), `.notes` and `.to_dict()`.

    Raises:
        TypeError: `step_fn` cannot be called and is no LightningModule.
    """
    subject = _lightning(step_fn, args, kwargs) or _graphed(step_fn, args, kwargs, model, optimizer)
    if subject is None:
        if isinstance(step_fn, nn.Module) or not callable(step_fn):
            raise TypeError(
                "explain takes a function that computes the loss, a GraphedStep, a step of "
                f"accelerator.graphed_step or a LightningModule; got a {type(step_fn).__name__}"
            )
        subject = _of_function(step_fn, args, kwargs, model, optimizer, manual_optimization)
    return explained(subject)


def _of_function(
    fn: Callable[..., Any],
    args: Any,
    kwargs: Any,
    model: nn.Module | None,
    optimizer: Any,
    manual: bool,
) -> Subject:
    if model is None:
        found = list(_modules_of(fn))
        model = found[0] if len(found) == 1 else nn.ModuleList(found) if found else None
    given = optimizer if isinstance(optimizer, (list, tuple)) else [] if optimizer is None else [optimizer]
    optimizers = list(map(_unwrapped, given))
    device = _device(model, args, kwargs)
    subject = Subject(_name(fn), fn, args, kwargs, model, optimizers, device)
    if not manual:
        return subject
    program = FunctionByHand(fn, model or nn.Module(), OptimizerSet(optimizers), device)
    note = "Stand-ins took the place of backward(), of the optimizers, of zero_grad() and of clipping."
    return replace(subject, context=program.seen_by_dynamo, notes=[note], takes_loss_from="", by_hand=True)


def _lightning(module: Any, args: Any, kwargs: Any) -> Subject | None:
    if not any(cls.__name__ == "LightningModule" for cls in type(module).__mro__):
        return None
    from pygraph_train.integrations.lightning.explained import subject_of

    return subject_of(module, args, kwargs)


def _graphed(step: Any, args: Any, kwargs: Any, model: Any, optimizer: Any) -> Subject | None:
    """A step that this library made."""
    if isinstance(step, LossSteps):
        program = step.program
        known: Any = program.optimizer
        held = known.members if isinstance(known, OptimizerSet) else known
        return _of_function(
            program.function(), args, kwargs, model or program.model, optimizer or held, program.by_hand
        )
    adapter = sys.modules.get("pygraph_train.integrations.accelerate.step")
    if adapter is None or not isinstance(step, adapter.GraphedStepFunction):
        return None
    from pygraph_train.integrations.accelerate.explained import subject_of

    return subject_of(step, args, kwargs)


def _unwrapped(optimizer: Any) -> Any:
    """The user's optimizer inside of those of Accelerate and Fabric."""
    inner = getattr(optimizer, "optimizer", None)
    return inner if isinstance(inner, torch.optim.Optimizer) else optimizer


def _modules_of(fn: Any) -> Iterator[nn.Module]:
    """The modules that a function refers to, each once."""
    fn = inspect.unwrap(fn)
    seen: set[int] = set()
    for value in _values_of(fn):
        if isinstance(value, nn.Module) and id(value) not in seen:
            seen.add(id(value))
            yield value


def _values_of(fn: Any) -> Iterator[Any]:
    yield getattr(fn, "__self__", None)
    code = getattr(fn, "__code__", None)
    if not isinstance(code, types.CodeType):
        return
    for cell in getattr(fn, "__closure__", None) or ():
        try:
            yield cell.cell_contents
        except ValueError:  # not assigned yet
            continue
    namespace = getattr(fn, "__globals__", {})
    yield from (namespace[name] for name in code.co_names if name in namespace)


def _device(model: nn.Module | None, args: Any, kwargs: Any) -> torch.device:
    places = [] if model is None else [p.device for p in model.parameters()]
    places += [leaf.device for leaf in flattened((args, kwargs))[1] if isinstance(leaf, Tensor)]
    return places[0] if places else torch.device("cpu")


def _name(fn: Any) -> str:
    name = getattr(fn, "__qualname__", type(fn).__qualname__)
    return str(name).rpartition("<locals>.")[2]
