"""What keeps the step of an optimizer out of a graph. Runs nothing, and changes nothing of the optimizer."""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from torch.optim import Optimizer

from pygraph_train.optimizers.kernels import plan_group, supported_class, unsupported
from pygraph_train.optimizers.preparation import OptimizerPreparation
from pygraph_train.problems import Problem, defined_at
from pygraph_train.torch_private.optim import (
    optimizer_step_function,
    optimizer_step_hook_tables,
    optimizer_step_override,
    runs_step_hooks,
)

__all__ = ["look_at_optimizer"]

_OUTSIDE = "the optimizer runs outside of the graph"


def look_at_optimizer(optimizer: Optimizer, device: torch.device) -> tuple[list[Problem], list[str]]:
    """Reasons against a graph of `optimizer.step()`, and notes.

    Args:
        optimizer: any, also one that is none of torch's.
        device: where the model is. For a model on the CPU it is told what holds on a GPU.
    """
    name = type(optimizer).__name__
    step = _defined(optimizer)
    if not runs_step_hooks(optimizer):
        return [Problem(f"{_OUTSIDE}: {name} is a wrapper, whose step a replay would not run", step)], []
    found: list[Problem] = []
    if optimizer_step_override(optimizer) is not None:
        found.append(
            Problem(
                f"{_OUTSIDE}: {name}.step was replaced on the object, and a replay would not run it", step
            )
        )
    for hook in chain.from_iterable(table.values() for table in optimizer_step_hook_tables(optimizer)):
        if isinstance(getattr(hook, "__self__", None), OptimizerPreparation):
            continue  # of this library, where the optimizer is in a GraphedStep
        found.append(
            Problem(
                f"{_OUTSIDE}: the step hook {getattr(hook, '__qualname__', hook)} of {name} would not run in a replay",
                defined_at(hook),
                "Call it in the loop, after the step",
            )
        )
    cls = supported_class(optimizer)
    if cls is None:
        why = unsupported(optimizer)
        return [*found, Problem(f"{_OUTSIDE}: {why}", step, "Take AdamW, Adam or SGD")], []
    reasons = [plan_group(cls, group, _as_on_gpu(device)).reason for group in optimizer.param_groups]
    if any(group.get("differentiable") for group in optimizer.param_groups):
        reasons.append(f"{name} was made with differentiable=True")
    if any(
        p.grad is not None and p.grad.is_sparse for group in optimizer.param_groups for p in group["params"]
    ):
        reasons.append(f"{name} gets sparse gradients, whose sizes are known only on the host")
    found += [Problem(f"{_OUTSIDE}: {reason}") for reason in dict.fromkeys(reasons) if reason is not None]
    return found, []


def _as_on_gpu(device: torch.device) -> str:
    return "cuda" if device.type in ("cpu", "meta") else device.type


def _defined(optimizer: Any) -> str | None:
    if type(optimizer).__module__.startswith("torch."):
        return None
    return defined_at(optimizer_step_function(optimizer))
