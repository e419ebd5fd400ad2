"""Where a strided tensor lies in memory, and copies of it that lie elsewhere."""

from __future__ import annotations

from typing import NamedTuple

import torch

__all__ = ["AddressRange", "address_range", "bits", "copy_elsewhere", "span"]


class AddressRange(NamedTuple):
    """The bytes from a tensor's first to its last element."""

    address: int
    nbytes: int


def span(tensor: torch.Tensor) -> torch.Tensor:
    """The memory from a tensor's first to its last element: writable also where elements overlap."""
    if not tensor.numel():
        return tensor.reshape(-1)
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((last + 1,), (1,), tensor.storage_offset())


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of `span(tensor)`, behind autograd's back."""
    return span(tensor.data).view(torch.uint8)


def address_range(tensor: torch.Tensor) -> AddressRange:
    """First byte and number of bytes of `span(tensor)`."""
    if not tensor.numel():
        return AddressRange(tensor.data_ptr(), 0)
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return AddressRange(tensor.data_ptr(), (last + 1) * tensor.element_size())


def copy_elsewhere(tensor: torch.Tensor) -> torch.Tensor:
    """The same values, shape and strides in memory of their own, outside of autograd."""
    tensor = tensor.detach()
    return span(tensor).clone().as_strided(tensor.shape, tensor.stride(), 0)
