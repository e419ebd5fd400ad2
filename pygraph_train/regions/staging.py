"""What the code transformation owes the caller of a region: inputs on the device, outputs on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pygraph_train.graphs.memory import span
from pygraph_train.regions.transform import Transformed

__all__ = ["Staged"]


class Staged:
    """A region whose graph takes CPU inputs on the device.

    Args:
        region: the transformed region, in the boxed convention.
        transformed: which inputs are staged, and which outputs come from elsewhere.
        device: where the region runs.
    """

    def __init__(
        self, region: Callable[[list[Any]], Any], transformed: Transformed, device: torch.device
    ) -> None:
        self._boxed_call = True
        self._region = region
        self._staged = transformed.staged
        self._late = transformed.late
        self._passthrough = tuple(transformed.passthrough.items())
        self._device = device
        self._buffers: dict[int, _Buffer] = {}

    def __call__(self, inputs: list[Any]) -> list[Any]:
        """Run the region once; the list is emptied."""
        own = [(index, inputs[source]) for index, source in self._passthrough]
        for i in self._staged:
            inputs[i] = self._on_device(i, inputs[i])
        outputs = list(self._region(inputs))
        for index in self._late:
            outputs[index] = outputs[index].cpu()
        for index, tensor in own:
            outputs[index] = tensor
        return outputs

    def _on_device(self, index: int, tensor: torch.Tensor) -> torch.Tensor:
        buffer = self._buffers.get(index)
        if buffer is None or not buffer.fits(tensor):
            buffer = self._buffers[index] = _Buffer(tensor, self._device)
        return buffer.fill(tensor)


class _Buffer:
    """Fixed memory on the device for one CPU tensor, so that graphs find it where it was."""

    def __init__(self, like: torch.Tensor, device: torch.device) -> None:
        self._like = (like.size(), like.stride(), like.dtype)
        whole = torch.empty_like(span(like), device=device)
        self._whole = whole
        self._tensor = whole.as_strided(like.size(), like.stride(), 0)
        self._scalar: Any = None

    def fits(self, tensor: torch.Tensor) -> bool:
        return (tensor.size(), tensor.stride(), tensor.dtype) == self._like

    def fill(self, tensor: torch.Tensor) -> torch.Tensor:
        """Bring the values over, ordered with the current stream, without waiting for the device."""
        if tensor.dim() == 0:
            value = tensor.item()
            if value != self._scalar or not value:  # NaN is written each time, and zeros: they have a sign
                self._tensor.fill_(value)
                self._scalar = value
            return self._tensor
        source = span(tensor)
        if self._whole.device.type == "cuda" and not source.is_pinned():
            source = source.pin_memory()  # its allocator reuses the memory after the copy, not before
        self._whole.copy_(source, non_blocking=True)
        return self._tensor
