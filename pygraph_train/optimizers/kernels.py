"""Which kernels of `torch.optim` can be captured, and what a parameter group needs to get them.

Pure functions of the optimizer's class and the user's flags, read off torch's sources (2.11 and 2.13).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.optim import (
    ASGD,
    LBFGS,
    SGD,
    Adadelta,
    Adafactor,
    Adagrad,
    Adam,
    Adamax,
    AdamW,
    Muon,
    NAdam,
    Optimizer,
    RAdam,
    RMSprop,
    Rprop,
    SparseAdam,
)

from pygraph_train.problems import ONLY_ON_CPU
from pygraph_train.torch_private.optim import step_supports_amp_scaling

CAPTURABLE = frozenset({Adam, AdamW, NAdam, Adamax, ASGD, Adadelta, RMSprop, Rprop})
FUSED = frozenset({Adam, AdamW, SGD, Adagrad})
# Their single-tensor kernels pass lr as `alpha=`, which reads a tensor on the host; foreach does not.
NEEDS_FOREACH = frozenset({Adadelta, RMSprop})

FUSED_NUMBERS: dict[type, tuple[str, ...]] = {
    Adam: ("betas", "eps", "weight_decay"),
    AdamW: ("betas", "eps", "weight_decay"),
    SGD: ("momentum", "dampening", "weight_decay"),
    Adagrad: ("lr_decay", "weight_decay", "eps"),
}
"""Hyperparameters that the fused kernels of a class take as they are. Python code asks only whether one is zero."""

FUSED_KERNELS = ("FusedAdamMathFunctor", "FusedSgdMathFunctor", "FusedAdagradMathFunctor", "aten._fused_")
"""Parts of the names of fused kernels, on CUDA and as the dispatcher names them (2.11 and 2.13)."""

_NEVER: dict[type, str] = {
    LBFGS: "decides on the host how often to run the closure",
    SparseAdam: "works on sparse gradients, whose sizes are known only on the host",
    Adafactor: "reads its step count and learning rate on the host",
    RAdam: "rounds its early steps in another way on the device: the third digit of an update differs",
    Muon: "reads its learning rate on the host",
}


@dataclass(frozen=True)
class GroupPlan:
    """What `prepared()` changes in one parameter group, or why the group cannot be captured."""

    changes: dict[str, bool] = field(default_factory=dict)
    reason: str | None = None


def supported_class(optimizer: Optimizer) -> type[Optimizer] | None:
    """The `torch.optim` class whose kernels `optimizer.step()` runs, None when that is not known.

    A subclass counts as its base as long as it inherits `step` and the state's initialisation.
    """
    for cls in type(optimizer).__mro__:
        if cls in CAPTURABLE or cls in FUSED:
            return cls
        if "step" in vars(cls) or "_init_group" in vars(cls):
            return None
    return None


@functools.cache
def fused_adagrad_on_cuda() -> bool:
    """Whether fused Adagrad runs on CUDA (torch 2.11: no, 2.13: yes)."""
    # The version that brought the CUDA kernel also made Adagrad take GradScaler's tensors.
    return step_supports_amp_scaling(Adagrad([torch.zeros(1, requires_grad=True)], fused=True))


def plan_group(
    optimizer_class: type, flags: Mapping[str, Any], device_type: str, *, float32: bool = False
) -> GroupPlan:
    """Which flags a group needs so that its step can be captured.

    Where the user leaves it to torch, Adam gets fused kernels: one launch in the place of a hundred, and numbers that
    replays read anew. They round once where others round after each operation, so float32 alone gets them.

    Args:
        optimizer_class: a class that `supported_class` returned.
        flags: the user's values of capturable, fused and foreach.
        device_type: device type of the group's parameters; "cpu" means the emulated engine.
        float32: whether these are plain tensors of float32.
    """
    name = optimizer_class.__name__
    fused = bool(flags.get("fused"))
    if device_type == "cpu":
        if optimizer_class in FUSED and fused:
            return GroupPlan()
        reason = f"{name} has no fused CPU kernels, and torch supports capturable only on GPUs"
        if optimizer_class in FUSED:
            read = "learning rate" if optimizer_class is SGD else "step count"
            reason = f"{name}'s CPU kernels read the {read} on the host; pass fused=True to capture them"
        on_gpu = plan_group(optimizer_class, flags, "cuda").reason
        return GroupPlan(reason=f"{reason} ({ONLY_ON_CPU})" if on_gpu is None else reason)
    if device_type != "cuda":
        return GroupPlan(reason=f"{name}'s parameters are on {device_type}, which has no CUDA graphs")
    if optimizer_class in CAPTURABLE:
        if optimizer_class in NEEDS_FOREACH and flags.get("foreach") is False:
            return GroupPlan(
                reason=f"{name} with foreach=False reads the learning rate on the host; leave foreach unset"
            )
        changes = {} if flags.get("capturable") else {"capturable": True}
        if optimizer_class in FUSED and float32 and flags.get("fused") is flags.get("foreach") is None:
            changes["fused"] = True
        return GroupPlan(changes)
    if optimizer_class is Adagrad and not fused_adagrad_on_cuda():
        return GroupPlan(
            reason="Adagrad's CUDA kernels of this torch version read the step count on the host"
        )
    # foreach goes: where both are set, SGD prefers the foreach kernels.
    return GroupPlan({} if fused else {"fused": True, "foreach": False})


def advice_on_numbers(optimizer: Any) -> str:
    """What to do where hyperparameters of this optimizer change again and again, and captures bake them in."""
    other = "OneCycleLR(cycle_momentum=False) changes the learning rate only"
    groups = getattr(optimizer, "param_groups", ())
    if supported_class(optimizer) in FUSED & CAPTURABLE and not all(group.get("fused") for group in groups):
        name = type(optimizer).__name__
        return f"Use {name}(..., fused=True): a graph reads the numbers of fused kernels anew. Or {other}"
    return f"Use a schedule that leaves them as they are: {other}"


def host_state_keys(optimizer_class: type, flags: Mapping[str, Any]) -> tuple[str, ...]:
    """State entries that plain torch creates on the CPU for a group with the user's flags."""
    if flags.get("capturable") or flags.get("fused") or optimizer_class in (SGD, ASGD):
        return ()
    return ("step", "mu_product") if optimizer_class is NAdam else ("step",)


def unsupported(optimizer: Optimizer) -> str:
    """Why an optimizer without a `supported_class` cannot be captured."""
    cls = type(optimizer)
    if cls in _NEVER:
        return f"{cls.__name__} {_NEVER[cls]}"
    name = f"{cls.__module__}.{cls.__qualname__}"
    return f"the step of {name} is not one of torch.optim's, so it cannot be proved capturable"
