"""Tensors that stay move out of memory that comes and goes, a few at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from pygraph_train.graphs.engine import Engine

_LEAST = 16 << 20
"""Bytes that are moved at once, and twice in memory for a moment. Each time the device is waited for."""

_SHARE = 32
"""This part of all of them, where that is more."""


@torch.no_grad()
def move_together(tensors: Sequence[Tensor], engine: Engine) -> None:
    """Give tensors memory beside each other (`t.data`).

    They are moved in the order of their addresses: a segment of the allocator goes back to the device when the last
    tensor has left it, so few of them are in memory twice. Where there is no memory for a copy, the others stay.

    Args:
        tensors: plain ones, on the engine's device.
    """
    engine.trim()
    for few in _parts(sorted(tensors, key=Tensor.data_ptr)):
        try:
            with engine.lasting_memory():
                copies = [t.clone() for t in few]
        except torch.OutOfMemoryError:
            return
        for t, copy in zip(few, copies, strict=True):
            t.data = copy
        del copies, copy
        engine.trim()


def _parts(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Neighbours that are moved at once."""
    enough = max(_LEAST, sum(t.nbytes for t in tensors) // _SHARE)
    part: list[Tensor] = []
    for t in tensors:
        if part and sum(other.nbytes for other in part) + t.nbytes > enough:
            yield part
            part = []
        part.append(t)
    if part:
        yield part
