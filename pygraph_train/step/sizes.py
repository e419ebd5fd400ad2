"""Sizes of batches that change."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from pygraph_train.trees import tensors_in


class Sizes:
    """Sees which sizes of its arguments change, before a function is traced."""

    def __init__(self) -> None:
        self._shapes: list[torch.Size] = []
        self._changed: set[tuple[int, int]] = set()

    def look(self, *given: Any) -> list[Tensor]:
        """Compare sizes with those of the call before. Returns the tensors among the arguments."""
        tensors = [t for t in tensors_in(given) if not isinstance(t, nn.Parameter)]
        before, self._shapes = self._shapes, [t.shape for t in tensors]
        for k, (one, other) in enumerate(zip(before, self._shapes, strict=False)):
            self._changed |= {(k, d) for d, (a, b) in enumerate(zip(one, other, strict=False)) if a != b}
        return tensors

    def that_change(self, *given: Any) -> Iterator[tuple[Tensor, int]]:
        """Tensors, each with a dimension whose size changes: the rows of each batch, as there may be fewer in the last
        one of an epoch, and what has changed so far."""
        for k, tensor in enumerate(self.look(*given)):
            for d, size in enumerate(tensor.shape):
                if size > 1 and (d == 0 or (k, d) in self._changed):
                    yield tensor, d
