"""Tensors that stay move out of memory that comes and goes, a few at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from pygraph_train.graphs.engine import Engine

_LEAST = 16 << 20
"""Bytes that are moved at once, and twice in memory for a moment. Each time the device is waited for."""

_SHARE = 32
"""This part of all of them, where that is more."""

_FEW = 16
"""A segment of which other tensors take more than this part stays."""

_GAPS = 64 << 20
"""Bytes between tensors that stay, from which on others are moved there."""


@torch.no_grad()
def move_together(tensors: Sequence[Tensor], engine: Engine) -> None:
    """Give tensors memory beside each other (`t.data`).

    They are moved in the order of their addresses: a segment of the allocator goes back to the device when the last
    tensor has left it, so few of them are in memory twice. Where there is no memory for a copy, the others stay. Some
    fit between other tensors that stay, as DDP's buckets do.

    Args:
        tensors: plain ones, on the engine's device.
    """
    engine.trim()
    for few in _parts(sorted(_beside_others(tensors, engine), key=Tensor.data_ptr)):
        try:
            with engine.lasting_memory():
                copies = [t.clone() for t in few]
        except torch.OutOfMemoryError:
            return
        for t, copy in zip(few, copies, strict=True):
            t.data = copy
        del copies, copy
        engine.trim()


def _beside_others(tensors: Sequence[Tensor], engine: Engine) -> list[Tensor]:
    """Have tensors lie in segments that others keep, where graphs cannot use what is free; those that lie elsewhere."""
    if engine.device.type != "cuda":
        return list(tensors)
    own = set(map(Tensor.data_ptr, tensors))
    kept, free = [], 0
    here = (0, 0), engine.device.index, torch.cuda.current_stream(engine.device).cuda_stream
    for segment in torch.cuda.memory_snapshot():
        if (segment["segment_pool_id"], segment["device"], segment["stream"]) != here:
            continue  # a graph's, or another device's: what is allocated here never lies there
        taken = [b for b in segment["blocks"] if b["state"] != "inactive" and b["address"] not in own]
        if sum(b["size"] for b in taken) * _FEW > segment["total_size"]:
            kept.append(range(segment["address"], segment["address"] + segment["total_size"]))
            free += segment["total_size"] - segment["allocated_size"]

    def fits(tensor: Tensor) -> bool:
        return any(tensor.data_ptr() in segment for segment in kept)

    rest = [t for t in tensors if not fits(t)]
    if free < max(_GAPS, sum(t.nbytes for t in rest) // _SHARE):
        return rest
    elsewhere: list[Tensor] = []
    too_large = math.inf
    for t in sorted(rest, key=lambda t: -t.nbytes):
        while t.nbytes < too_large:
            before = torch.cuda.memory_reserved(engine.device)
            try:
                place = torch.empty_like(t)
            except torch.OutOfMemoryError:
                too_large = t.nbytes
                break
            if torch.cuda.memory_reserved(engine.device) > before:  # in a new segment
                too_large = t.nbytes
                del place
                engine.trim()
            elif fits(place):
                t.data = place.copy_(t)
                break
            else:  # in one that goes: a later one lies somewhere else
                elsewhere.append(place)
    return [t for t in rest if not fits(t)]


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
