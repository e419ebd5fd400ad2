"""What stands in for methods of an Accelerator, its optimizers and schedulers while a step is traced."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from pygraph_train.integrations.accelerate.calls import (
    autocast_around,
    listed,
    no_context,
    norm_limits,
    value_limits,
)
from pygraph_train.integrations.accelerate.taken_apart import backward_is_here
from pygraph_train.tracing.traced_code import guard_constants

__all__ = ["AutocastStub", "stubs"]


class _Stub:
    """Stands in for one method while the step is traced: notes the call and does nothing.

    It notes the method's name, the owner's index, Python values, a tensor that is passed or returned (the loss,
    the norm), and the parameters that are to be clipped.
    """

    def __init__(self, put_off: list[tuple[Any, ...]], name: str, index: int) -> None:
        self.put_off = put_off
        self.name = name
        self.index = index


class _BackwardStub(_Stub):
    def __init__(self, put_off: list[tuple[Any, ...]], name: str, device: torch.device) -> None:
        super().__init__(put_off, name, 0)
        self.device = device

    def __call__(self, loss: Tensor) -> None:
        backward_is_here()
        self.put_off.append((self.name, self.index, autocast_around(self.device), loss, []))


class _ClipNormStub(_Stub):
    def __init__(self, put_off: list[tuple[Any, ...]], name: str, device: torch.device) -> None:
        super().__init__(put_off, name, 0)
        self.device = device

    def __call__(self, parameters: Any, *limits: Any, **named: Any) -> Tensor:
        arguments = norm_limits(*limits, **named)
        guard_constants(arguments)
        norm = torch.zeros((), device=self.device)  # filled when gradients are clipped
        self.put_off.append((self.name, self.index, arguments, norm, listed(parameters)))
        return norm


class _ClipValueStub(_Stub):
    def __call__(self, parameters: Any, *limits: Any, **named: Any) -> None:
        arguments = value_limits(*limits, **named)
        guard_constants(arguments)
        self.put_off.append((self.name, self.index, arguments, None, listed(parameters)))


class _CallStub(_Stub):
    def __call__(self, *args: Any, **kwargs: Any) -> None:
        arguments = (*args, *kwargs.values())
        guard_constants(arguments)
        self.put_off.append((self.name, self.index, arguments, None, []))


class AutocastStub:
    """Stands in for `accelerator.autocast`, which Dynamo of torch 2.11 does not follow.

    Args:
        accelerator: whose context it is.
    """

    def __init__(self, accelerator: Any) -> None:
        kind = accelerator.device.type
        with accelerator.autocast():
            enabled, dtype = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
            caches = torch.is_autocast_cache_enabled()
        self.casts = bool(accelerator.native_amp)
        self.arguments = (kind, dtype, enabled, caches)

    def __call__(self, autocast_handler: Any = None) -> AbstractContextManager[Any]:
        if autocast_handler is not None:
            raise NotImplementedError("a graph cannot hold accelerator.autocast(autocast_handler)")
        return torch.autocast(*self.arguments) if self.casts else nullcontext()


def stubs(accelerator: Any, put_off: list[tuple[Any, ...]]) -> list[tuple[Any, str, Any]]:
    found: list[tuple[Any, str, Any]] = [
        (accelerator, "backward", _BackwardStub(put_off, "backward", accelerator.device)),
        (accelerator, "clip_grad_norm_", _ClipNormStub(put_off, "clip_grad_norm_", accelerator.device)),
        (accelerator, "clip_grad_value_", _ClipValueStub(put_off, "clip_grad_value_", 0)),
        (accelerator, "accumulate", no_context),
        (accelerator, "autocast", AutocastStub(accelerator)),
    ]
    for index, optimizer in enumerate(accelerator._optimizers):
        found += [(optimizer, name, _CallStub(put_off, name, index)) for name in ("step", "zero_grad")]
    for index, scheduler in enumerate(accelerator._schedulers):
        found.append((scheduler, "step", _CallStub(put_off, "scheduler.step", index)))
    return found
