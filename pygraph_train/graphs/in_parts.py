"""A CUDA graph with gaps: parts that are replayed one after the other, and work of the host between them."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from pygraph_train.gaps import Work, left_to
from pygraph_train.graphs.cuda_graph import CudaGraph
from pygraph_train.graphs.engine import NumbersNotFound
from pygraph_train.graphs.nodes import named_kernels
from pygraph_train.graphs.rewriting import NumberRewriter
from pygraph_train.torch_private.cuda import begin_capture

__all__ = ["CapturedParts", "GraphInParts"]


class GraphInParts:
    """See `graphs.engine.Graph`.

    Args:
        parts: in their order, at least two.
        work: what is called between two of them each.
    """

    def __init__(self, parts: Sequence[CudaGraph], work: Sequence[Work]) -> None:
        *first, self._last = parts
        self._first = list(zip(first, work, strict=True))
        self.nodes = sum(part.nodes for part in parts)

    def replay(self) -> None:
        """Launch the parts in the current stream, and do in it what is between them."""
        for part, work in self._first:
            part.replay()
            work()
        self._last.replay()

    def numbers(self, sets: Sequence[Sequence[float]], kernels: Sequence[str]) -> NumberRewriter:
        """See `graphs.engine.RewritableGraph.numbers`. All such kernels have to be in the last part."""
        try:
            early = [node.name for part, _ in self._first for node in named_kernels(part.raw, kernels)[1]]
        except (RuntimeError, ValueError) as error:
            raise NumbersNotFound(str(error)) from error
        if early:
            raise NumbersNotFound(f"{early[0]} comes before a gap in the graph")
        return self._last.numbers(sets, kernels)

    def close(self) -> None:
        """Destroy the parts. Their private memory returns to the pool."""
        for part in (*[part for part, _ in self._first], self._last):
            part.close()
        self._first = []


class CapturedParts:
    """What one capture in the current stream makes: a graph, or several where there are gaps.

    Args:
        pool: of memory.

    Attributes:
        graphs: so far.
        under_way: whether the last one has no end yet.
    """

    def __init__(self, pool: tuple[int, int]) -> None:
        self.graphs: list[torch.cuda.CUDAGraph] = []
        self.under_way = False
        self._pool = pool
        self._work: list[Work] = []

    def begin(self) -> None:
        """Begin the capture of a part."""
        self.graphs.append(torch.cuda.CUDAGraph(keep_graph=True))
        self.under_way = True
        begin_capture(self.graphs[-1], self._pool)

    def end(self) -> None:
        """End it. Raises RuntimeError if it holds what no graph can hold."""
        with warnings.catch_warnings():  # that nothing was launched is no news to the user
            warnings.filterwarnings("ignore", "The CUDA Graph is empty")
            self.graphs[-1].capture_end()
        self.under_way = False

    @contextmanager
    def with_gaps(self) -> Iterator[None]:
        """A capture ends in the thread where it began: no other one may run the backward."""
        with left_to(self._cut), torch.autograd.set_multithreading_enabled(False):
            yield

    def _cut(self, work: Work) -> None:
        self.end()
        self._work.append(work)
        self.begin()

    def graph(self, *, instantiate: bool) -> CudaGraph | GraphInParts:
        """What was captured."""
        parts = [CudaGraph(graph, instantiate=instantiate) for graph in self.graphs]
        return GraphInParts(parts, self._work) if self._work else parts[0]
