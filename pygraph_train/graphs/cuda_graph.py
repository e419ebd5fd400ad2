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
        instantiate: at once, or when `instantiate` or `replay` is called first.
    """

    def __init__(self, graph: torch.cuda.CUDAGraph, *, instantiate: bool = True) -> None:
        self._graph: torch.cuda.CUDAGraph | None = graph
        self._parameters: dict[int, KernelParameters] = {}
        self.nodes = count_nodes(self.raw)
        self.instantiated = False
        self._launch: Callable[[], None] = self._first_replay
        if instantiate:
            self.instantiate()

    @property
    def raw(self) -> int:
        """The cudaGraph_t, whose nodes can be read, and marked before it is instantiated."""
        return self._open().raw_cuda_graph()

    def read(self) -> tuple[Node, ...]:
        """Its nodes."""
        return read_nodes(self.raw)

    @property
    def raw_exec(self) -> int:
        """The cudaGraphExec_t. Instantiates the graph if nobody has."""
        self.instantiate()
        return self._open().raw_cuda_graph_exec()

    def instantiate(self) -> None:
        """Make the graph ready to replay; nothing if it is."""
        if self.instantiated:
            return
        graph = self._open()
        graph.instantiate()
        self.instantiated = True
        # looked up once: `replay` is the hot path
        self._launch = graph.replay

    def _first_replay(self) -> None:
        self.instantiate()
        self._launch()

    def _open(self) -> torch.cuda.CUDAGraph:
        if self._graph is None:
            _replay_after_close()
        return self._graph

    def replay(self) -> None:
        """Launch the graph in the current stream."""
        self._launch()

    def numbers(self, sets: Sequence[Sequence[float]], kernels: Sequence[str]) -> NumberRewriter:
        """See `graphs.engine.Graph.numbers`. Instantiates the graph if nobody has."""
        return NumberRewriter(self, sets, kernels)

    def parameters(self, handle: Any) -> KernelParameters:
        """Of one of its kernels, to be written: each time the same object. Instantiates the graph if nobody has."""
        if int(handle) not in self._parameters:
            self._parameters[int(handle)] = KernelParameters(self.raw_exec, handle)
        return self._parameters[int(handle)]

    def close(self) -> None:
        """Destroy the graph. Its private memory returns to the pool."""
        if self._graph is not None:
            graph, self._graph = self._graph, None
            self._launch = _replay_after_close
            finish_replays()
            graph.reset()

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
