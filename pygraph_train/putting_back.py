"""Putting back what a run that does not count has changed."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from pygraph_train.random_state import HostRandomState
from pygraph_train.torch_private.memory import keep_versions, local_tensor

_PART = 16 << 20
"""Bytes that are copied to the host at a time."""


class Backup:
    """Random state and tensors that a run without consequences may change; `restore` puts them back.

    Args:
        device: whose generator is kept, besides those of the host.
        tensors: kept by value.
        room: bytes that copies may take on the device. Where they need more, they lie in memory of the host.
    """

    def __init__(self, device: torch.device, tensors: Sequence[torch.Tensor], room: float = 0) -> None:
        self._device = device
        self._host_random = HostRandomState()
        self._random = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        self._tensors = [local_tensor(t.detach()) for t in tensors]
        fits = sum(t.nbytes for t in self._tensors) <= room
        self._values = [t.clone() for t in self._tensors] if fits else _on_host(self._tensors)

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back. That is no change of tensors: what autograd has saved before is what it was."""
        self._host_random.restore()
        if self._random is not None:
            # Where the state of the device's own generator is set, cuDNN's recurrent networks begin their dropout anew:
            # this sets the state that another generator shares with it.
            index = torch.cuda.current_device() if self._device.index is None else self._device.index
            torch.cuda.default_generators[index].graphsafe_get_state().set_state(self._random)
        with keep_versions(tuple(x for x in self._tensors if not x.is_inference())):
            for tensor, value in zip(self._tensors, self._values, strict=True):
                tensor.copy_(value)


class ScratchState(Backup):
    """The same of tensors that are small: they are kept on the device."""

    def __init__(self, device: torch.device, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__(device, tensors, math.inf)


def _on_host(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies in memory that is not pinned.

    The driver copies to such memory by one thread, which has to wait for each page of it: 1.5 GB take two seconds. So
    it copies parts of tensors, and as many small ones as there is room for, to pinned memory, and all cores copy them
    on.
    """
    between_them = [t.device.type == "cuda" and t.is_contiguous() for t in tensors]
    values = [
        torch.empty_like(t, device="cpu") if goes else t.to("cpu", copy=True)
        for t, goes in zip(tensors, between_them, strict=True)
    ]
    if any(between_them):
        pairs = [pair for *pair, goes in zip(values, tensors, between_them, strict=True) if goes]
        targets, sources = zip(*pairs, strict=True)
        size = min(_PART, sum(_rounded(source.nbytes) for source in sources))
        copy_in_parts(targets, sources, torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True))
    return values


@torch.no_grad()
def copy_in_parts(
    targets: Sequence[torch.Tensor], sources: Sequence[torch.Tensor], between: torch.Tensor
) -> None:
    """Copy tensors part by part.

    Args:
        targets, sources: contiguous, two of one shape and dtype at a time. The sources are on one device.
        between: uint8, of the bytes that are copied together at most, and of one element at least.
    """
    arriving: list[tuple[torch.Tensor, torch.Tensor]] = []
    used = 0
    for target, source in zip(targets, sources, strict=True):
        size = between.nbytes // source.itemsize
        for theirs, ours in zip(source.view(-1).split(size), target.view(-1).split(size), strict=True):
            if used + theirs.nbytes > between.nbytes:
                _arrive(arriving, source.device)
                used = 0
            part = between[used : used + theirs.nbytes].view(theirs.dtype)
            part.copy_(theirs, non_blocking=True)
            arriving.append((ours, part))
            used = _rounded(used + theirs.nbytes)
    if arriving:
        _arrive(arriving, sources[0].device)


def _arrive(parts: list[tuple[torch.Tensor, torch.Tensor]], device: torch.device) -> None:
    """Wait for copies from the device, copy them on and empty the list."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()
    for target, part in parts:
        target.copy_(part)
    parts.clear()


def _rounded(size: int) -> int:
    """Bytes until the next tensor may begin, whatever its dtype is."""
    return -(-size // 16) * 16
