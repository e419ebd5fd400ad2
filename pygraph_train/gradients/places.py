"""Where the gradients of a step lie: at the same addresses on each step, or wherever there is room."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

from torch import Tensor

from pygraph_train.graphs.memory import overlaps_itself
from pygraph_train.torch_private.memory import local_tensors

__all__ = ["Layout", "Place", "Source"]

Source = Literal["graph", "regions", "autograd"]
"""Who leaves the gradients: a graph of the step, regions of the compile backend, or autograd in Python."""

_SAME_PLACE = 3
"""So many steps in a row must find the gradients at the same addresses before a graph reads them there."""

_PATIENCE: dict[Source, int] = {"graph": 16, "regions": 16, "autograd": 4}
"""Steps without a graph to wait for that; later the graph gets buffers, into which gradients are copied."""

_REPLAYS_PER_STEP = 50
"""Replays that pay for one more step without a graph."""

_REPLAYS_PER_CAPTURE = 100
"""Replays that pay for one capture of the update: 30 to 47 ms on an H200, and 0.3 to 0.5 ms are saved."""

_FREE = 2
"""Further captures that need not have paid: gradients may lie elsewhere once, and stay there."""

_SHARE_OF_COPIES = 0.05
"""Of all memory that the process has needed so far, which copies of gradients may take on top of it."""

_FEW_COPIES = 32 << 20
"""Bytes of copies that no process misses: cuBLAS has as much for each stream."""

_dtype = operator.attrgetter("dtype")


class Layout(NamedTuple):
    """Where gradients are, and what they look like. Made on every step."""

    addresses: list[int]
    looks: tuple[Any, ...]

    @property
    def missing(self) -> Sequence[bool]:
        """For each parameter whether it has none; empty where all have one."""
        missing: Sequence[bool] = self.looks[0]
        return missing

    @classmethod
    def of(cls, gradients: Sequence[Tensor | None]) -> Layout:
        """Of those that are there.

        Raises:
            RuntimeError: one of them has no memory of its own (sparse gradients).
        """
        present = local_tensors([g for g in gradients if g is not None])
        missing = () if len(present) == len(gradients) else [g is None for g in gradients]
        strides = () if all(map(Tensor.is_contiguous, present)) else list(map(Tensor.stride, present))
        looks = (missing, list(map(_dtype, present)), list(map(Tensor.numel, present)), strides)
        return cls(list(map(Tensor.data_ptr, present)), looks)


class Place:
    """Finds out whether the gradients of one source come to rest at the same addresses.

    Args:
        source: of the gradients.
        weighs: whether further graphs have to pay. Where plans are compared, the comparison decides what pays.

    Attributes:
        buffers: they do not, and a graph works on copies.
    """

    def __init__(self, source: Source, *, weighs: bool = False) -> None:
        self.buffers, self._weighs = False, weighs
        self._latest: Layout | None = None
        self._same = 0
        # since the latest graph was made: steps whose gradients lay where those of the step before did
        self._unserved = 0
        self._again = 0  # graphs after the first one
        self._waited = 0
        self._patience = _PATIENCE[source]

    def why_no_copies(self, gradients: Sequence[Tensor | None], peak_memory: Callable[[], int]) -> str | None:
        """Before a capture: why gradients cannot be copied, None where they can or need not.

        Where copies are too large, a graph waits until gradients come to rest, however long that takes.

        Args:
            gradients: of this step.
            peak_memory: tells how many bytes the training has needed so far, 0 where nobody knows.
        """
        present = [g for g in gradients if g is not None]
        # a graph knows nothing of what other kinds of tensors do, and none has an address for no elements
        self.buffers |= any(type(g) is not Tensor or not g.numel() for g in present)
        if not self.buffers:
            return None
        if any(map(overlaps_itself, present)):
            return "elements of a gradient share memory, so nothing can be copied back there"
        needed, peak = sum(g.nbytes for g in present), peak_memory()
        if not peak or needed <= max(_SHARE_OF_COPIES * peak, _FEW_COPIES):
            return None
        self.buffers, self._waited = False, 0
        return (
            f"gradients lie elsewhere in each step, and copies of them would take {needed >> 20} MiB, where the whole "
            f"training has needed {peak >> 20} MiB so far"
        )

    def follow(self, layout: Layout) -> None:
        """Note where they are in this step."""
        self._same = self._same + 1 if layout == self._latest else 1
        self._latest = layout

    def settled(self, replays: int, latest: int | None = None) -> bool:
        """Whether a graph can be made now; False while gradients move counts as a step that it was waited for.

        Args:
            replays: so far.
            latest: of these, those of the graph that finds no gradients where they are now; None where there is none.
                After the first few, another graph is made once that one has paid for its capture, together with the
                steps that it could not serve.
        """
        if self.buffers:
            return True
        rests = self._same >= _SAME_PLACE
        self._unserved += rests
        paid = (
            not self._weighs or self._again < _FREE or self._unserved + (latest or 0) >= _REPLAYS_PER_CAPTURE
        )
        if not rests or (latest is not None and not paid):
            self._waited += 1
            self.buffers = self._waited > self._patience + replays // _REPLAYS_PER_STEP
            return self.buffers
        self._again += latest is not None
        self._unserved = 0
        return True
