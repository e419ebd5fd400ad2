"""Moves batches to the device on a stream of its own, while the device is busy with earlier steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch

from pygraph_train.trees import tensors_in

T = TypeVar("T")


class Transfer:
    """A stream for copies. In the stream of the kernels a copy would wait for all of them.

    Args:
        device: a CUDA device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def __call__(self, move: Callable[[], T]) -> T:
        """Run `move()` on the copy stream; its tensors are ready for what the caller's stream does next."""
        compute = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._stream):
            moved = move()
        compute.wait_stream(self._stream)
        for tensor in tensors_in(moved):
            if tensor.is_cuda:
                tensor.record_stream(compute)  # the memory is free only when the kernels have read it
        return moved
