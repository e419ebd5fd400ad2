"""Static inputs: fixed addresses that a captured step reads, filled before each replay."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from pygraph_train.graphs.memory import Storages
from pygraph_train.torch_private.memory import copy_all
from pygraph_train.tracing.signature import alignment, copied, flattened

__all__ = ["InputMemory", "StaticInputs", "Transfer"]

T = TypeVar("T")


class InputMemory:
    """Memory for the buffers of several shapes. Each replay fills its own before it reads them, so they may overlap.

    The memory of the largest shape so far serves smaller ones.
    """

    def __init__(self) -> None:
        self._of_leaf: dict[int, torch.UntypedStorage] = {}

    def storage(self, place: int, size: int, device: torch.device) -> torch.UntypedStorage:
        """Memory of at least `size` bytes for the leaf at this place."""
        known = self._of_leaf.get(place)
        if known is None or known.nbytes() < size or known.device != device:
            known = torch.empty(size, dtype=torch.uint8, device=device).untyped_storage()
            self._of_leaf[place] = known
        return known


class StaticInputs:
    """Buffers for the tensor leaves of one signature. Leaves that are one tensor have one buffer.

    The buffer of an expanded tensor is expanded in the same way: each element in memory is copied once.

    Args:
        leaves: example leaves; tensors give shape, dtype, strides and device.
        used: which leaves the step reads; the others are neither allocated nor copied. Further leaves are tensors
            besides those of the call, and each of them has a buffer of its own.
        memory: shared with other shapes; None for memory of their own.
    """

    def __init__(
        self, leaves: Sequence[Any], used: Sequence[bool], memory: InputMemory | None = None
    ) -> None:
        read = [i for i, leaf in enumerate(leaves[: len(used)]) if isinstance(leaf, Tensor) and used[i]]
        first = {id(leaves[i]): i for i in reversed(read)}
        self._index = [*sorted(first.values()), *range(len(used), len(leaves))]
        self._same = {i: first[id(leaves[i])] for i in read}
        self._written = [_written_once(leaves[i]) for i in self._index]
        self._expands = any(size is not None for size in self._written)
        self.tensors: list[Tensor] = [
            _buffer_like(_part(leaves[i], size), i, memory)
            for i, size in zip(self._index, self._written, strict=True)
        ]
        self.further = self.tensors[len(first) :]

    def tree(self, args: Any) -> Any:
        """`args` with every used tensor leaf replaced by its buffer."""
        leaves = flattened(args)[1]
        buffers = {
            i: tensor if size is None else tensor.expand(leaves[i].shape)
            for i, tensor, size in zip(self._index, self.tensors, self._written, strict=True)
        }
        by_position = {i: buffers[k] for i, k in self._same.items()}
        position = iter(range(1 << 62))
        return copied(lambda leaf: by_position.get(next(position), leaf), args)

    def lie_in(self, memory: Storages, leaves: Sequence[Any]) -> bool:
        """Whether a leaf of a call that would be copied lies in this memory. Hot path."""
        return any(memory.hold(leaves[i]) for i in self._index)

    @torch.no_grad()
    def load(self, leaves: Sequence[Any]) -> None:
        """Copy the leaves of a call into the buffers, in the caller's stream."""
        if self._expands:
            parts = [_part(leaves[i], size) for i, size in zip(self._index, self._written, strict=True)]
            copy_all(self.tensors, parts, non_blocking=True)
        elif self.tensors:
            copy_all(self.tensors, [leaves[i] for i in self._index], non_blocking=True)


class Transfer:
    """Moves batches to the device on a stream of its own, while the device is busy with earlier steps.

    In the stream of the kernels a copy would wait for all of them.

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
        for leaf in flattened(moved)[1]:
            if isinstance(leaf, Tensor) and leaf.is_cuda:
                leaf.record_stream(compute)  # the memory is free only when the kernels have read it
        return moved


def _written_once(leaf: Tensor) -> tuple[int, ...] | None:
    """The shape of an expanded tensor before it was expanded; None of others."""
    size = tuple(1 if not stride else n for n, stride in zip(leaf.shape, leaf.stride(), strict=True))
    return None if size == leaf.shape or leaf.numel() == 0 else size


def _part(leaf: Tensor, size: tuple[int, ...] | None) -> Tensor:
    return leaf if size is None else leaf.as_strided(size, leaf.stride())


def _buffer_like(leaf: Tensor, place: int, memory: InputMemory | None) -> Tensor:
    """A tensor with the leaf's shape, strides and alignment: kernels were chosen for these."""
    odd = alignment(leaf)
    if memory is not None and leaf.numel():
        extent = 1 + sum((n - 1) * stride for n, stride in zip(leaf.shape, leaf.stride(), strict=True))
        storage = memory.storage(place, odd + extent * leaf.element_size(), leaf.device)
        buffer = torch.empty(0, dtype=leaf.dtype, device=leaf.device)
        return buffer.set_(storage, odd // leaf.element_size(), leaf.shape, leaf.stride())  # type: ignore[arg-type]
    if not odd or leaf.numel() == 0:
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device)
    extent = 1 + sum((n - 1) * stride for n, stride in zip(leaf.shape, leaf.stride(), strict=True))
    offset = odd // leaf.element_size()
    flat = torch.empty(offset + extent, dtype=leaf.dtype, device=leaf.device)
    return flat.as_strided(leaf.shape, leaf.stride(), offset)
