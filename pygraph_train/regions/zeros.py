"""Gradients of outputs that nothing depends on, such as logits beside a loss."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from pygraph_train.regions.pair import Tangent
from pygraph_train.regions.region import Region
from pygraph_train.regions.region_capture import LARGE
from pygraph_train.torch_private.memory import storages

__all__ = ["Zeros"]

_MOST = 64
"""Sizes that are remembered."""

_AHEAD = 1.25
"""So much larger the memory is at least when a larger one is needed: graphs that read it are captured again."""


class Zeros:
    """Gradients of outputs that nothing depends on, such as logits beside a loss.

    Large ones are made once, in memory that they share: a graph reads them where they are, where it would have
    to copy new ones.

    Args:
        backward: the region that takes them.
    """

    def __init__(self, backward: Region) -> None:
        self._backward = backward
        self._memory: torch.Tensor | None = None
        self._lasting: dict[Any, torch.Tensor] = {}
        self._bases: list[torch.Tensor] = []  # where these lie
        self._seen: Callable[[], object] = lambda: None  # the graph whose outputs were looked at
        self._returned = False  # an output of the backward lies in their memory
        self._looked = False  # and outputs of a run were looked at

    def of(self, i: int, tangent: Tangent, size: tuple[int, ...] | None) -> torch.Tensor:
        """For the output with this number, of this size where that changes."""
        key = (i, size)
        zeros = self._lasting.get(key)
        if zeros is not None:
            return zeros
        if size is not None:
            tangent = tangent.of_size(size)
        if tangent.nbytes >= LARGE and not self._returned and self._may_last(size is not None):
            zeros = self._shared(tangent)
            if len(self._lasting) < _MOST:
                self._lasting[key] = zeros
                if self._looked:  # what is returned does not depend on the size
                    self._backward.standing = tuple(self._lasting.values())
            return zeros
        device = self._backward.device
        return torch.empty_strided(tangent.size, tangent.stride, dtype=tangent.dtype, device=device).zero_()

    def _may_last(self, sizes_change: bool) -> bool:
        """Whether they may stay: a run without a graph needs them no longer than itself."""
        backward = self._backward
        if backward.plain_only:
            self._let_go()
        # what somebody else captures just now holds nothing before his graph runs
        return not backward.plain_only and not backward.capturing and (backward.fed or not sizes_change)

    def _let_go(self) -> None:
        self._lasting.clear()
        self._bases.clear()
        self._memory = None

    def _shared(self, tangent: Tangent) -> torch.Tensor:
        """A view of as many zeros as were ever needed at once; earlier ones keep theirs."""
        before = 0 if self._memory is None else self._memory.nbytes
        if self._memory is None or before < tangent.nbytes:
            for key in [key for key in self._lasting if key[1] is not None]:
                del self._lasting[key]  # those of other sizes follow, where they come back
            if not self._lasting:
                self._bases.clear()
            with self._backward.lasting_memory():
                most = max(tangent.nbytes, -int(-before * _AHEAD // LARGE) * LARGE)
                self._memory = torch.zeros(most, dtype=torch.uint8, device=self._backward.device)
            self._bases.append(self._memory)
        return self._memory[: tangent.nbytes].view(tangent.dtype).as_strided(tangent.size, tangent.stride)

    def look(self, outputs: Sequence[Any]) -> None:
        """After a run with them: where the caller gets them, each run needs its own."""
        run = self._backward.last
        if self._lasting and (run is None or run is not self._seen()):
            self._seen = weakref.ref(run) if run is not None else lambda: None
            memory = storages(self._bases)
            if not set(memory).isdisjoint(storages(outputs)):
                self._returned = True
                self._let_go()
            self._backward.standing = tuple(self._lasting.values())
            self._looked = not self._returned
