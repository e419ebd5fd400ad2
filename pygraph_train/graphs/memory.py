"""Where a strided tensor lies in memory, and copies of it that lie elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

ALIGNMENT = 16
"""Bytes: what kernels of Inductor and cuBLAS, and TMA descriptors, look for in an address."""


class AddressRange(NamedTuple):
    """The bytes from a tensor's first to its last element."""

    address: int
    nbytes: int


def extent(size: Sequence[int], stride: Sequence[int]) -> int:
    """How many elements lie from the first to the last one, with those of others in between."""
    if 0 in size:
        return 0
    return 1 + sum((n - 1) * step for n, step in zip(size, stride, strict=True))


def overlaps_itself(tensor: torch.Tensor) -> bool:
    """Whether elements share memory, as in an expanded tensor, so that it cannot be written element by element."""
    return any(n > 1 and s == 0 for n, s in zip(tensor.size(), tensor.stride(), strict=True))


def span(tensor: torch.Tensor) -> torch.Tensor:
    """The memory from a tensor's first to its last element: writable also where elements overlap."""
    if not tensor.numel():
        return tensor.reshape(-1)
    return tensor.as_strided((extent(tensor.shape, tensor.stride()),), (1,), tensor.storage_offset())


def address_range(tensor: torch.Tensor) -> AddressRange:
    """First byte and number of bytes of `span(tensor)`."""
    return AddressRange(tensor.data_ptr(), extent(tensor.shape, tensor.stride()) * tensor.element_size())
