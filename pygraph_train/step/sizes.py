"""Sizes of batches that change."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import BatchSampler

from pygraph_train.torch_private.stock_dynamo import make_dynamic
from pygraph_train.trees import tensors_in


class Sizes:
    """Sees which sizes of its arguments change, before a function is traced.

    Args:
        fixed: whether its graphs get Inductor's kernels, which are faster for sizes that do not change.
        even: whether all batches have the same number of rows.
    """

    def __init__(self, *, fixed: bool, even: Callable[[], bool]) -> None:
        self._fixed, self._even = fixed, even
        self._shapes: list[torch.Size] = []
        self._changed: set[tuple[int, int]] = set()

    def look(self, *given: Any) -> list[Tensor]:
        """Compare sizes with those of the call before. Returns the tensors among the arguments."""
        tensors = [t for t in tensors_in(given) if not isinstance(t, nn.Parameter)]
        before, self._shapes = self._shapes, [t.shape for t in tensors]
        for k, (one, other) in enumerate(zip(before, self._shapes, strict=False)):
            self._changed |= {(k, d) for d, (a, b) in enumerate(zip(one, other, strict=False)) if a != b}
        return tensors

    @property
    def changed(self) -> bool:
        """Whether some have."""
        return bool(self._changed)

    @contextmanager
    def dynamic(self, *given: Any) -> Iterator[None]:
        """Around a trace: sizes that change are numbers from the first trace on, which needs no second one then.

        These are what has changed, and the rows of each batch, of which there may be fewer at the end of an epoch.
        Such a trace takes twice as long.
        """
        tensors = [] if self._fixed else self.look(*given)
        even = self._even()
        before = [set(vars(tensor)) for tensor in tensors]
        for k, tensor in enumerate(tensors):
            for d, size in enumerate(tensor.shape):
                if size > 1 and ((d == 0 and not even) or (k, d) in self._changed):
                    make_dynamic(tensor, d)
        marks = [vars(tensor).keys() - names for tensor, names in zip(tensors, before, strict=True)]
        yield
        for tensor, names in zip(tensors, marks, strict=True):
            for name in names & vars(tensor).keys():
                delattr(tensor, name)


def rows_stay(loader: Any) -> bool:
    """Whether all batches of a DataLoader have the same number of rows. False where nobody knows."""
    sampler: Any = getattr(loader, "batch_sampler", None)
    if not isinstance(sampler, BatchSampler):
        return False
    try:
        return sampler.drop_last or len(sampler.sampler) % sampler.batch_size == 0  # type: ignore[arg-type]
    except Exception:  # that of an IterableDataset has no length
        return False
