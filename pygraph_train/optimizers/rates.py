"""Learning rates in device tensors, which replays read."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from pygraph_train.torch_private.memory import tensor_version


class LearningRate:
    """The device tensors that stand for one group's learning rate.

    Attributes:
        tensor: for a Python number.
        stand_in: for a tensor of the user's that was replaced by another one since: its value is copied there before
            each replay. None as long as it is the same tensor, which schedulers fill in place and kernels read.
    """

    __slots__ = ("_copied", "_stood_in", "seen", "stand_in", "tensor", "value", "version")

    def __init__(self, device: torch.device) -> None:
        # Fused CUDA kernels read float32. CPU kernels read a double, as they would the Python float.
        dtype = torch.float64 if device.type == "cpu" else torch.float32
        self.tensor = torch.zeros((), dtype=dtype, device=device)
        self.value = math.nan  # differs from everything: the first `set` always fills
        self.seen: object = None
        self.version = tensor_version(self.tensor)
        self.stand_in: Tensor | None = None
        self._copied: tuple[Any, ...] = ()
        self._stood_in = 0

    def set(self, lr: Any) -> None:
        if isinstance(lr, Tensor):
            return self._set_tensor(lr)
        if lr == self.value:
            self.seen = lr
            return
        if self.tensor.is_cuda and torch.cuda.is_current_stream_capturing():
            # The copy would become part of the graph and undo every later change of the learning rate.
            raise RuntimeError(
                "the learning rate changed inside a capture; enter prepared() before capturing"
            )
        self.seen, self.value = lr, float(lr)
        self.tensor.fill_(self.value)
        self.version = tensor_version(self.tensor)

    def _set_tensor(self, lr: Tensor) -> None:
        replaced = isinstance(self.seen, Tensor) and self.seen is not lr
        self.seen = lr
        if self.stand_in is None and not replaced:
            return
        if type(lr) is not Tensor or lr.requires_grad or lr.is_inference():
            self.stand_in = None
            return
        if self.stand_in is None or _looks(self.stand_in) != _looks(lr):
            self.stand_in = torch.empty_like(lr)
            self._copied = ()
        now = (lr, tensor_version(lr))
        if self._copied and self._copied[0] is lr and self._copied[1] == now[1]:
            return  # inside a capture nothing may be copied
        self._copied = now
        self.copy()

    def copy(self) -> None:
        """Read the user's tensor anew: `.data` of it may have been written, which no version tells."""
        if self.stand_in is not None and isinstance(self.seen, Tensor):
            with torch.no_grad():
                self.stand_in.copy_(self.seen)
            self._stood_in = tensor_version(self.stand_in)

    def of(self, lr: Any) -> Tensor:
        """What kernels read in the place of `lr`."""
        if not isinstance(lr, Tensor):
            return self.tensor
        return lr if self.stand_in is None else self.stand_in

    def baked(self, lr: Tensor) -> Any:
        """What a capture bakes in of `lr`."""
        return id(lr) if self.stand_in is None else _looks(lr)

    def user_value(self, found: Any, value: Any) -> Any:
        """The user's learning rate at the end of `prepared()`.

        Args:
            found: what is in the group now.
            value: what was there before.
        """
        if found is self.tensor:
            version = tensor_version(self.tensor)
            if version != self.version:  # a scheduler stepped inside and filled the tensor
                value = self.value = self.tensor.item()
                self.version = version
        elif tensor_version(found) != self._stood_in:
            with torch.no_grad():
                value.copy_(found)
            self._stood_in = tensor_version(found)
        return value


def _looks(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.dtype, tensor.shape, tensor.device
