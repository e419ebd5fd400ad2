"""A CUDA graph whose inputs may move: found by comparing two captures, kept up by patching pointers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn

import torch

from pygraph_train.graphs.engine import IndirectionUnavailable
from pygraph_train.graphs.indirection import discover, misplaced, moved_inputs
from pygraph_train.graphs.memory import address_range
from pygraph_train.graphs.patch import HostPatcher

if TYPE_CHECKING:
    from pygraph_train.graphs.cuda import CudaGraph

__all__ = ["IndirectCudaGraph", "indirect"]


def indirect(
    first: CudaGraph,
    second: CudaGraph,
    inputs_first: Sequence[torch.Tensor],
    inputs_second: Sequence[torch.Tensor],
) -> IndirectCudaGraph:
    """Make a graph whose inputs may move, from two captures of the same work.

    Args:
        first, second: of one engine, captured with `instantiate=False`, not replayed. `first` is closed; `second`
            becomes the result, with the outputs of its capture.
        inputs_first, inputs_second: the inputs of the captures, in the same order. An input that is to be served lies
            at different addresses in the two, and shares no memory with another.
    Raises:
        IndirectionUnavailable: no input can be moved. Both graphs are as they were.
    """
    if second.instantiated:
        raise ValueError("capture with instantiate=False: an instantiated graph can no longer be prepared")
    discovery = discover(
        first.read(),
        second.read(),
        [address_range(tensor) for tensor in inputs_first],
        [address_range(tensor) for tensor in inputs_second],
    )
    if not discovery.served:
        raise IndirectionUnavailable(next(iter(discovery.unserved.values()), "there are no inputs"))
    graph = IndirectCudaGraph(second, HostPatcher(second, discovery), inputs_second)
    first.close()
    return graph


class IndirectCudaGraph:
    """A graph that can be pointed at other inputs of the same shapes, strides and dtypes, without copies.

    Attributes:
        served: inputs that can be moved.
        unserved: the other inputs, which keep their addresses, and a sentence each that says why.
    """

    def __init__(self, graph: CudaGraph, patcher: HostPatcher, inputs: Sequence[torch.Tensor]) -> None:
        self.nodes = graph.nodes
        self.discovery = patcher.discovery
        self.served = self.discovery.served
        self.unserved = self.discovery.unserved
        self._graph = graph
        self._patcher: HostPatcher | None = patcher
        self._addresses = [tensor.data_ptr() for tensor in inputs]
        self._launch = graph.replay

    def accepts(self, index: int, tensor: torch.Tensor) -> bool:
        """Whether input `index` is served and `tensor` is aligned as the captured one was."""
        return index in self.served and misplaced(index, tensor, self.discovery.alignment[index]) is None

    def retarget(self, changes: Mapping[int, torch.Tensor]) -> None:
        """Let later replays read and write other tensors, which the graph does not keep alive.

        Raises:
            ValueError: an input is not served, or its address lost the alignment; nothing was changed.
            RuntimeError: the pointers could not be rewritten; the graph cannot be replayed any more.
        """
        if self._patcher is None:
            raise RuntimeError("this CUDA graph was closed and cannot be retargeted")
        moved = moved_inputs(changes, self._addresses, self.discovery)
        if not moved:
            return
        try:
            self._patcher.patch(moved)
        except BaseException:
            self._launch = _replay_after_failure  # some pointers are new and some old
            raise
        for index, address in moved.items():
            self._addresses[index] = address

    def replay(self) -> None:
        """Launch the graph in the current stream."""
        self._launch()

    def close(self) -> None:
        """Destroy the graph and what patches it."""
        if self._patcher is not None:
            patcher, self._patcher = self._patcher, None
            patcher.close()
            self._graph.close()
            self._launch = self._graph.replay


def _replay_after_failure() -> NoReturn:
    raise RuntimeError(
        "the pointers of this CUDA graph could not be rewritten: it cannot be replayed any more"
    )
