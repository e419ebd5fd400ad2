"""Private APIs of optimizers, schedulers and the GradScaler."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch


def optimizer_step_hook_tables(optimizer: torch.optim.Optimizer) -> tuple[Mapping[int, Any], ...]:
    """The live tables of step hooks that `step()` runs: global and own (torch 2.11, 2.13)."""
    from torch.optim import optimizer as module

    return (
        module._global_optimizer_pre_hooks,
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
        module._global_optimizer_post_hooks,
    )


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
    return any(package != "torch" for package in _packages_of(called))


def _packages_of(function: Any) -> Iterator[str]:
    """The packages of the code of a function and of those that it wraps.

    `torch.no_grad()` around a function is code of torch, with the function in it.
    """
    function = getattr(function, "__func__", function)
    seen: set[int] = set()
    while function is not None and id(function) not in seen:
        seen.add(id(function))
        module = getattr(function, "__globals__", {}).get("__name__") or type(function).__module__
        yield str(module).partition(".")[0]
        function = getattr(function, "__wrapped__", None) or getattr(
            function, "_torchdynamo_orig_callable", None
        )


def count_optimizer_step(optimizer: Any) -> None:
    """Note a `step()` that did not run, as schedulers have it do: they warn where it never did (torch 2.11, 2.13)."""
    step = vars(optimizer).get("step")
    if step is not None and getattr(step, "_wrapped_by_lr_sched", False):
        optimizer._opt_called = True


def private_attributes_of(optimizer: torch.optim.Optimizer) -> Callable[[], None]:
    """Note the optimizer's attributes that fused steps set or need. Each call puts them back (torch 2.11, 2.13)."""
    names = {"_step_supports_amp_scaling", "_need_device_dtype_check_for_fused"}
    saved = {name: vars(optimizer)[name] for name in names if name in vars(optimizer)}

    def put_back() -> None:
        for name in names - saved.keys():
            vars(optimizer).pop(name, None)
        vars(optimizer).update(saved)

    return put_back


def step_supports_amp_scaling(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `step()` takes grad_scale and found_inf from a GradScaler (torch 2.11, 2.13)."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def let_scaler_in(optimizer: torch.optim.Optimizer) -> None:
    """Tell GradScaler that `step()` takes grad_scale and found_inf (torch 2.11, 2.13)."""
    optimizer._step_supports_amp_scaling = True  # type: ignore[attr-defined]


@functools.cache
def fused_adagrad_on_cuda() -> bool:
    """Whether fused Adagrad runs on CUDA (torch 2.11: no, 2.13: yes)."""
    # The version that brought the CUDA kernel also made Adagrad take GradScaler's tensors.
    optimizer = torch.optim.Adagrad([torch.zeros(1, requires_grad=True)], fused=True)
    return step_supports_amp_scaling(optimizer)


def scaler_notes(scaler: torch.amp.GradScaler) -> Callable[[], None]:
    """Note what a scaler that is enabled knows of each optimizer. The call puts that back (torch 2.11, 2.13)."""
    notes = {
        owner: {name: dict(value) if isinstance(value, dict) else value for name, value in state.items()}
        for owner, state in scaler._per_optimizer_states.items()
    }

    def put_back() -> None:
        scaler._per_optimizer_states.clear()
        scaler._per_optimizer_states.update(notes)

    return put_back


def scaler_tensors(scaler: torch.amp.GradScaler) -> list[torch.Tensor]:
    """Scale and growth counter of one that is enabled on the device, once they exist (torch 2.11, 2.13)."""
    return [t for t in (scaler._scale, scaler._growth_tracker) if t is not None]


def scaler_unscaled(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> bool:
    """Whether one that is enabled has unscaled this optimizer's gradients in the present step. (2.11, 2.13)"""
    state = scaler._per_optimizer_states.get(id(optimizer))
    return bool(state and state["found_inf_per_device"])
