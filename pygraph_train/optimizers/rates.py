"""Learning rates in device tensors, which replays read."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


class LearningRate:
    """The device tensor that stands for one group's learning rate, where that is a Python number.

    A tensor of the user's stays where it is: schedulers fill it in place, and kernels read it.

    Attributes:
        tensor: which kernels read.
        seen: what `set` was called with last.
    """

    __slots__ = ("_value", "seen", "tensor")

    def __init__(self, device: torch.device) -> None:
        # Fused CUDA kernels read float32. CPU kernels read a double, as they would the Python float.
        dtype = torch.float64 if device.type == "cpu" else torch.float32
        self.tensor = torch.zeros((), dtype=dtype, device=device)
        self.seen: object = None
        self._value = math.nan  # differs from everything: the first `set` always fills

    def set(self, lr: Any) -> None:
        """Read the user's learning rate."""
        self.seen = lr
        if isinstance(lr, Tensor) or lr == self._value:
            return
        self._value = float(lr)
        self.tensor.fill_(self._value)
