"""Private APIs of optimizers, schedulers and the GradScaler."""

from __future__ import annotations

import functools
import inspect
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.optim import optimizer as of_all


def optimizer_step_hook_tables(optimizer: torch.optim.Optimizer) -> tuple[Mapping[int, Any], ...]:
    """The live tables of step hooks that `step()` runs: global and own (torch 2.11, 2.13)."""
    before = of_all._global_optimizer_pre_hooks, optimizer._optimizer_step_pre_hooks
    return *before, optimizer._optimizer_step_post_hooks, of_all._global_optimizer_post_hooks


def optimizer_step_override(optimizer: torch.optim.Optimizer) -> Any:
    """What someone put over `optimizer.step`, but for the schedulers' call counter (torch 2.11, 2.13).

    On the object, or on its class where that is one of torch's. Hot path.
    """
    step = vars(optimizer).get("step")
    kind: Any = type(optimizer)
    called = of_class = kind.step
    if step is not None:
        if not getattr(step, "_wrapped_by_lr_sched", False):
            return step
        called = step.__wrapped__  # what a later change of the class does not reach
    return called if _is_put_over(kind, of_class, called) else None


@functools.cache
def _is_put_over(kind: Any, of_class: Any, called: Any) -> bool:
    """Whether the optimizer calls another step than that of its class, or torch's is somebody else's."""
    owner = next(cls for cls in kind.__mro__ if "step" in vars(cls))
    if owner.__module__.partition(".")[0] != "torch":  # an optimizer of somebody else has a step of its own
        return called is not of_class
    # `torch.no_grad()` around a function is code of torch, with the function in it
    called = getattr(called, "__func__", called)
    return not _is_of_torch(inspect.unwrap(called, stop=lambda function: not _is_of_torch(function)))


def _is_of_torch(function: Any) -> bool:
    """Whether the code of a function is of torch."""
    module = getattr(function, "__globals__", {}).get("__name__") or type(function).__module__
    return str(module).partition(".")[0] == "torch"


def count_optimizer_step(optimizer: Any) -> None:
    """Note a `step()` that did not run, as schedulers have it do: they warn where it never did (torch 2.11, 2.13)."""
    if getattr(vars(optimizer).get("step"), "_wrapped_by_lr_sched", False):
        optimizer._opt_called = True


def attributes_of_fused_steps(optimizer: torch.optim.Optimizer) -> tuple[dict[str, Any], tuple[str, ...]]:
    """A table, and the names in it that fused steps set or need (torch 2.11, 2.13)."""
    return vars(optimizer), ("_step_supports_amp_scaling", "_need_device_dtype_check_for_fused")


def step_supports_amp_scaling(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `step()` takes grad_scale and found_inf from a GradScaler (torch 2.11, 2.13)."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def let_scaler_in(optimizer: torch.optim.Optimizer) -> None:
    """Tell GradScaler that `step()` takes grad_scale and found_inf (torch 2.11, 2.13)."""
    optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]


states_of_scaler: Callable[..., dict[int, dict[str, Any]]] = operator.attrgetter("_per_optimizer_states")
"""What a scaler that is enabled knows of each optimizer in the present step, by id. (2.11, 2.13)"""

tensors_of_scaler: Callable[..., tuple[Any, ...]] = operator.attrgetter("_scale", "_growth_tracker")
"""Scale and growth counter of one that is enabled on the device, None before they exist. (2.11, 2.13)"""
