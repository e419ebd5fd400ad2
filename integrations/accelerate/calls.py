"""The calls of an Accelerate loop that a graphed step puts off, as values.

See `step.py`: while a step is traced, the calls that Accelerate knows only note that they were made.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

__all__ = [
    "CLIPS",
    "Event",
    "Script",
    "after_backward",
    "autocast_around",
    "before_backward",
    "clips",
    "in_words",
    "listed",
    "no_context",
    "norm_limits",
    "under_autocast",
    "value_limits",
]

CLIPS = ("clip_grad_norm_", "clip_grad_value_")


@dataclass(frozen=True)
class Event:
    """One call that was put off.

    Attributes:
        name: of the method.
        index: of the optimizer or scheduler among the Accelerator's.
        arguments: Python values, without the loss and the parameters; of a backward what autocast casts to around it.
    """

    name: str
    index: int = 0
    arguments: tuple[Any, ...] = ()

    def __str__(self) -> str:
        if self.name == "backward":
            return self.name + "".join(f" under autocast to {dtype}" for dtype in self.arguments)
        return self.name


Script = tuple[Event, ...]


def before_backward(script: Script) -> Script:
    return script[: [event.name for event in script].index("backward")]


def after_backward(script: Script) -> Script:
    return script[[event.name for event in script].index("backward") + 1 :]


def clips(script: Script) -> Script:
    return tuple(event for event in script if event.name in CLIPS)


def in_words(script: Script) -> str:
    return ", ".join(map(str, script)) or "nothing"


def autocast_around(device: torch.device) -> tuple[Any, ...]:
    """What autocast casts to on a device here, nothing where it is off."""
    return (torch.get_autocast_dtype(device.type),) if torch.is_autocast_enabled(device.type) else ()


def under_autocast(device: torch.device, dtypes: tuple[Any, ...]) -> AbstractContextManager[Any]:
    """The autocast in which `autocast_around` gave `dtypes`."""
    if autocast_around(device) == dtypes:
        return nullcontext()
    return torch.autocast(device.type, dtypes[0] if dtypes else None, enabled=bool(dtypes))


def listed(parameters: Any) -> list[Tensor]:
    """What is clipped. Inside a trace this reads the model's tables, which are guarded from then on."""
    return [parameters] if isinstance(parameters, Tensor) else list(parameters)


def norm_limits(max_norm: Any, norm_type: Any = 2) -> tuple[Any, ...]:
    return (max_norm, norm_type)


def value_limits(clip_value: Any) -> tuple[Any, ...]:
    return (clip_value,)


def no_context(*models: nn.Module) -> AbstractContextManager[None]:
    return nullcontext()
