"""A captured CUDA graph: read, instantiated, replayed, closed."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from pygraph_train.graphs.nodes import KernelParameters, Node, count_nodes, read_nodes
from pygraph_train.graphs.rewriting import NumberRewriter


class CudaGraph:
    """One captured CUDA graph. See `graphs.engine.Graph`.

    Args:
        graph: captured with `keep_graph=True`.
    """

    def __init__(self, graph: torch.cuda.CUDAGraph) -> None:
        self._graph = graph
        self._parameters: dict[int, KernelParameters] = {}
        self._launch: Callable[[], None] = graph.replay  # looked up once: `replay` is the hot path
        self.nodes = count_nodes(self.raw)
        graph.instantiate()

    @property
    def raw(self) -> int:
        """The cudaGraph_t, whose nodes can be read."""
        return self._graph.raw_cuda_graph()

    def read(self) -> tuple[Node, ...]:
        """Its nodes."""
        return read_nodes(self.raw)

    def replay(self) -> None:
        """Launch the graph in the current stream."""
        self._launch()

    def numbers(self, sets: Sequence[Sequence[float]], kernels: Sequence[str]) -> NumberRewriter:
        """See `graphs.engine.Graph.numbers`."""
        return NumberRewriter(self, sets, kernels)

    def parameters(self, handle: Any) -> KernelParameters:
        """Of one of its kernels, to be written: each time the same object."""
        if int(handle) not in self._parameters:
            self._parameters[int(handle)] = KernelParameters(self._graph.raw_cuda_graph_exec(), handle)
        return self._parameters[int(handle)]

    def close(self) -> None:
        """Destroy the graph. Its private memory returns to the pool."""
        if self._launch is not _replay_after_close:
            self._launch = _replay_after_close
            finish_replays()
            self._graph.reset()

    def __del__(self, is_finalizing: Callable[[], bool] = sys.is_finalizing) -> None:
        if not is_finalizing():  # a default, as `sys` may be gone by then
            self.close()


def finish_replays() -> None:
    """Wait for replays under way, in whatever stream, before their memory is given back.

    The allocator may unmap it at once: it knows nothing of replays, and waits for the stream of the capture only.
    """
    with contextlib.suppress(RuntimeError):  # a broken device is reported by whatever uses it next
        if not torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize()


def _replay_after_close() -> NoReturn:
    raise RuntimeError("this CUDA graph was closed and cannot be replayed")
