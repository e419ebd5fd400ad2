"""A CUDA graph whose inputs may move: found by comparing two captures, kept up by patching pointers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NoReturn

import torch

from pygraph_train.graphs.engine import IndirectionUnavailable
from pygraph_train.graphs.indirection import Discovery, discover, misplaced, moved_inputs
from pygraph_train.graphs.memory import address_range
from pygraph_train.graphs.patch import DevicePatcher, HostPatcher, Patcher
from pygraph_train.graphs.updater import updater_kernel

if TYPE_CHECKING:
    from pygraph_train.graphs.cuda import CudaGraph

__all__ = ["IndirectCudaGraph", "indirect"]


def indirect(
    first: CudaGraph,
    second: CudaGraph,
    inputs_first: Sequence[torch.Tensor],
    inputs_second: Sequence[torch.Tensor],
    device: torch.device,
    prefer: str,
) -> IndirectCudaGraph:
    """See `graphs.engine.Engine.indirect`."""
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
    reason = "it is copied or filled by the graph itself, which only the host can patch"
    on_device = discovery.without(dict.fromkeys(discovery.host_only, reason))
    note = _why_not_on_device(on_device, device) if prefer == "device" else None
    patcher: Patcher
    if prefer == "device" and note is None:
        patcher = DevicePatcher(second, on_device, device)
    else:
        patcher = HostPatcher(second, discovery)
    graph = IndirectCudaGraph(second, patcher, inputs_second, note)
    first.close()
    return graph


def _why_not_on_device(discovery: Discovery, device: torch.device) -> str | None:
    """Asked before any node is marked: a graph with marked nodes is no longer one for the host."""
    if not discovery.served:
        return "only the host can patch the inputs that can be moved"
    try:
        updater_kernel(device)
    except IndirectionUnavailable as error:
        return str(error)
    return None


class IndirectCudaGraph:
    """See `graphs.engine.IndirectGraph`."""

    def __init__(
        self, graph: CudaGraph, patcher: Patcher, inputs: Sequence[torch.Tensor], note: str | None
    ) -> None:
        self.nodes = graph.nodes
        self.discovery = patcher.discovery
        self.served = self.discovery.served
        self.unserved = self.discovery.unserved
        self.path = "device" if isinstance(patcher, DevicePatcher) else "host"
        self.note = note
        self._graph = graph
        self._patcher: Patcher | None = patcher
        self._addresses = [tensor.data_ptr() for tensor in inputs]
        self._launch = graph.replay

    def accepts(self, index: int, tensor: torch.Tensor) -> bool:
        """See `graphs.engine.IndirectGraph.accepts`."""
        return index in self.served and misplaced(index, tensor, self.discovery.alignment[index]) is None

    def retarget(self, changes: Mapping[int, torch.Tensor]) -> None:
        """See `graphs.engine.IndirectGraph.retarget`. Patches in the current stream."""
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

    def check(self) -> None:
        """See `graphs.engine.IndirectGraph.check`."""
        if self._patcher is not None:
            self._patcher.check()

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
