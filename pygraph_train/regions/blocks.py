"""Pieces of device memory, as the allocator hands them out."""

from __future__ import annotations

from typing import NamedTuple

import torch

__all__ = ["Block", "block_of"]


class Block(NamedTuple):
    """A piece of captured memory."""

    address: int
    nbytes: int


def block_of(tensor: torch.Tensor) -> Block:
    """The whole memory behind a tensor."""
    storage = tensor.untyped_storage()
    return Block(storage.data_ptr(), storage.nbytes())
