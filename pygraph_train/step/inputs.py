"""Static inputs: fixed addresses that a captured step reads, filled before each replay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pygraph_train.step.signature import map_leaves

__all__ = ["StaticInputs"]


class StaticInputs:
    """Buffers for the tensor leaves of one signature.

    A leaf on the step's device is copied on the device, in the caller's stream. A leaf on the host
    travels on a stream of its own into one of two staging buffers, while the device may still be busy
    with the previous step; only the short copy from there waits for that step.

    Args:
        device: where the step runs.
        leaves: example leaves; tensors give shape, dtype and strides.
        used: which leaves the step reads; the others are neither allocated nor copied.
    """

    def __init__(self, device: torch.device, leaves: Sequence[Any], used: Sequence[bool]) -> None:
        self._device = device
        self._index = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and used[i]]
        self.tensors: list[Tensor] = [_buffer_like(leaves[i], device) for i in self._index]
        on_host = [leaves[i].device.type != device.type for i in self._index]
        self._direct = [(k, i) for k, i in enumerate(self._index) if not on_host[k]]
        self._staged = [(k, i) for k, i in enumerate(self._index) if on_host[k]]
        self._stager = _Stager(device, [self.tensors[k] for k, _ in self._staged]) if any(on_host) else None
        self._direct_buffers = [self.tensors[k] for k, _ in self._direct]

    def tree(self, args: Any) -> Any:
        """`args` with every used tensor leaf replaced by its buffer."""
        by_position = dict(zip(self._index, self.tensors, strict=True))
        position = iter(range(1 << 62))
        return map_leaves(lambda leaf: by_position.get(next(position), leaf), args)

    def load(self, leaves: Sequence[Any]) -> None:
        """Copy the leaves of a call into the buffers, ordered before what the caller's stream does next."""
        if self._stager is not None:
            self._stager.load([leaves[i] for _, i in self._staged])
        if self._direct_buffers:
            torch._foreach_copy_(
                self._direct_buffers, [leaves[i] for _, i in self._direct], non_blocking=True
            )


class _Stager:
    """Two sets of staging buffers on the device, filled in turn on a copy stream."""

    def __init__(self, device: torch.device, targets: list[Tensor]) -> None:
        self._targets = targets
        self._device = device
        self._stream = torch.cuda.Stream(device)
        # allocated in the stream that uses them last, so that their release is ordered after it
        self._sets = [[torch.empty_like(t) for t in targets] for _ in range(2)]
        self._consumed = [torch.cuda.Event(), torch.cuda.Event()]
        self._turn = 0

    def load(self, sources: list[Tensor]) -> None:
        compute = torch.cuda.current_stream(self._device)
        staging, consumed = self._sets[self._turn], self._consumed[self._turn]
        self._turn ^= 1
        self._stream.wait_event(consumed)  # never recorded: passes at once
        with torch.cuda.stream(self._stream):
            for buffer, source in zip(staging, sources, strict=True):
                buffer.copy_(source, non_blocking=True)
        compute.wait_stream(self._stream)
        torch._foreach_copy_(self._targets, staging)
        consumed.record(compute)


def _buffer_like(leaf: Tensor, device: torch.device) -> Tensor:
    """Memory of its own with the leaf's shape and, where they do not overlap, its strides.

    Kernels were traced for these strides: a transposed batch stays transposed.
    """
    buffer = torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=device)
    return buffer.requires_grad_(leaf.requires_grad) if leaf.requires_grad else buffer
