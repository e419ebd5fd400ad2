"""Where a strided tensor lies in memory, and copies of it that lie elsewhere."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch

__all__ = [
    "ALIGNMENT",
    "AddressRange",
    "Storages",
    "address_range",
    "bits",
    "copy_elsewhere",
    "extent",
    "fingerprints",
    "overlaps_itself",
    "span",
]

ALIGNMENT = 16
"""Bytes: what kernels of Inductor and cuBLAS, and TMA descriptors, look for in an address."""


class AddressRange(NamedTuple):
    """The bytes from a tensor's first to its last element."""

    address: int
    nbytes: int


class Storages:
    """The memory of some tensors: all of their storages, as they lie now.

    Args:
        tensors: those that are not strided have no such memory.
    """

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        storages = [t.untyped_storage() for t in tensors if t.layout is torch.strided]
        found = {(s.data_ptr(), s.data_ptr() + s.nbytes()) for s in storages if s.nbytes()}
        self._starts: list[int] = []
        self._ends: list[int] = []
        for start, end in sorted(found):
            if self._ends and start < self._ends[-1]:  # two storages over the same memory
                self._ends[-1] = max(end, self._ends[-1])
            else:
                self._starts.append(start)
                self._ends.append(end)

    def hold(self, tensor: torch.Tensor) -> bool:
        """Whether the first element of a tensor lies there. Hot path."""
        address = tensor.data_ptr()
        index = bisect_right(self._starts, address) - 1
        return index >= 0 and address < self._ends[index]


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


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bytes of `span(tensor)`, behind autograd's back."""
    return span(tensor.data).view(torch.uint8)


_FEW = 1 << 14
"""Bytes of a tensor that are compared themselves. All that a forward saves is compared at once, so few are copied."""

_PART = 1 << 22
"""Bytes that are added up at once."""


def fingerprints(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """What tells the bytes of tensors from others without a copy of all of them.

    Few bytes are copied. Many are added up, each word with a weight of its own: a change of one word always shows,
    and changes of several words cancel out once in 2**64 times. Nothing waits for the device.
    """
    weights: dict[torch.device, torch.Tensor] = {}
    found = []
    for tensor in tensors:
        data = bits(tensor)
        if data.numel() > _FEW and data.device not in weights:
            weights[data.device] = _weights(data.device)
        found.append(data.clone() if data.numel() <= _FEW else _sum(data, weights[data.device]))
    return found


def _weights(device: torch.device) -> torch.Tensor:
    """Odd numbers without a pattern, for the words of one part."""
    weights = torch.arange(1, _PART // 8 + 1, dtype=torch.int64, device=device)
    weights.mul_(-7046029254386353131)
    return weights.bitwise_xor_(weights >> 29).mul_(-4658895280553007687).bitwise_or_(1)


def _sum(data: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    for part in data.split(_PART):
        words = part.new_zeros(-(-part.numel() // 8) * 8)
        words[: part.numel()].copy_(part)
        products = words.view(torch.int64).mul_(weights[: words.numel() // 8])
        total = total * 6364136223846793005 + products.sum()
    return total


def address_range(tensor: torch.Tensor) -> AddressRange:
    """First byte and number of bytes of `span(tensor)`."""
    return AddressRange(tensor.data_ptr(), extent(tensor.shape, tensor.stride()) * tensor.element_size())


def copy_elsewhere(tensor: torch.Tensor, *, aligned: bool = False) -> torch.Tensor:
    """The same values, shape and strides in memory of their own, outside of autograd.

    Args:
        tensor: is copied.
        aligned: begin at an aligned address. Otherwise the copy misses one as far as `tensor` does, because
            kernels are chosen by that.
    """
    tensor = tensor.detach()
    odd = 0 if aligned else tensor.data_ptr() % ALIGNMENT
    offset, rest = divmod(odd, tensor.element_size())
    source = span(tensor)
    if not offset or rest or not source.numel():
        return source.clone().as_strided(tensor.shape, tensor.stride(), 0)
    whole = source.new_empty(offset + source.numel())
    whole[offset:].copy_(source)
    return whole.as_strided(tensor.shape, tensor.stride(), offset)
