"""Rewriting the pointers of an instantiated graph, from the host.

A kernel of the device could do it as well: on an H200 it took longer at each size of input (benchmarks.inputs).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np

from pygraph_train.graphs.indirection import Discovery, Slot
from pygraph_train.graphs.nodes import (
    DESTINATION,
    checked,
    copy_addresses,
    driver,
    node_handles,
)
from pygraph_train.graphs.parameters import KernelParameters

__all__ = ["HostPatcher", "PatchError", "Patchable"]

PLANS_KEPT = 64  # sets of inputs that changed together


class PatchError(RuntimeError):
    """A pointer could not be rewritten: a replay since then may have read from an old address."""


class Patchable(Protocol):
    """A captured graph whose nodes can still be marked, such as `graphs.cuda.CudaGraph`."""

    @property
    def raw(self) -> int:
        """Its cudaGraph_t."""

    @property
    def raw_exec(self) -> int:
        """Its cudaGraphExec_t, once instantiated."""

    def instantiate(self) -> None:
        """Make it ready to replay; nothing if it is."""


class _Write(NamedTuple):
    """Pointers to rewrite together in one view of the parameter memory."""

    words: Any
    positions: Any
    rows: Any
    deltas: Any


class _Copy(NamedTuple):
    """One address of a memcpy or memset node: `field` has to be the address of `row` plus `shift`."""

    params: Any
    field: str
    row: int
    shift: int


class _Plan(NamedTuple):
    """What a change of certain inputs takes."""

    writes: list[_Write]
    copies: list[_Copy]
    updates: list[tuple[Any, Any, Any, tuple[Any, ...]]]
    """Driver function, node, parameters and further arguments, by node."""


class HostPatcher:
    """Rewrites whole nodes with cuGraphExec...NodeSetParams: under half a microsecond a node.

    Args:
        graph: is instantiated if it was not.
        discovery: of this graph.
    """

    def __init__(self, graph: Patchable, discovery: Discovery) -> None:
        self.discovery = discovery
        d = driver()
        graph.instantiate()
        self._exec = d.CUgraphExec(graph.raw_exec)
        self._plans: dict[tuple[int, ...], _Plan] = {}
        self._slots: dict[int, list[Slot]] = defaultdict(list)
        for slot in discovery.slots:
            self._slots[slot.input].append(slot)
        handles = node_handles(graph.raw)
        affected = sorted({slot.node for slot in discovery.slots})
        kernels: list[int] = []
        others: list[int] = []
        for node in affected:
            kind = checked(d.cuGraphNodeGetType(handles[node]), "reading a node's type")
            (kernels if kind == d.CUgraphNodeType.CU_GRAPH_NODE_TYPE_KERNEL else others).append(node)
        self._parameters = KernelParameters(d, {node: handles[node] for node in kernels})
        self._memory, self._base = self._parameters.memory, self._parameters.base
        self._updates = self._parameters.updates
        self._captured: dict[tuple[int, int], tuple[str, int]] = {}
        context = checked(d.cuCtxGetCurrent(), "asking for the CUDA context") if others else None
        for node in others:
            self._copy_other(d, node, handles[node], context)

    def _copy_other(self, d: Any, node: int, handle: Any, context: Any) -> None:
        """A memcpy or memset node: which fields hold which addresses, and how far from the first byte."""
        if checked(d.cuGraphNodeGetType(handle), "reading") == d.CUgraphNodeType.CU_GRAPH_NODE_TYPE_MEMSET:
            params = checked(d.cuGraphMemsetNodeGetParams(handle), "reading a memset node")
            self._captured[node, DESTINATION] = ("dst", 0)
            self._updates[node] = (d.cuGraphExecMemsetNodeSetParams, handle, params, (context,))
            return
        params = checked(d.cuGraphMemcpyNodeGetParams(handle), "reading a memcpy node")
        for offset, field, first in zip(
            (0, 8), ("dstDevice", "srcDevice"), copy_addresses(d, params), strict=True
        ):
            if first is not None:
                self._captured[node, offset] = (field, int(getattr(params, field)) - first)
        self._updates[node] = (d.cuGraphExecMemcpyNodeSetParams, handle, params, (context,))

    def patch(self, changes: Mapping[int, int]) -> None:
        """Make later replays use new addresses.

        Args:
            changes: address by input; the inputs are served ones and the addresses aligned as required.
        Raises:
            PatchError: a pointer could not be rewritten.
        """
        key = tuple(changes)
        plan = self._plans.get(key) or self._plan(key)
        addresses = np.fromiter(changes.values(), dtype=np.uint64, count=len(key))
        for words, positions, rows, deltas in plan.writes:
            words[positions] = addresses[rows] + deltas
        for params, field, row, shift in plan.copies:
            setattr(params, field, int(addresses[row]) + shift)
        executable = self._exec
        for update, node, params, more in plan.updates:
            status = update(executable, node, params, *more)[0]
            if status:
                raise PatchError(f"the driver refused new parameters for a graph node: {status.name}")

    def _plan(self, inputs: tuple[int, ...]) -> _Plan:
        by_phase: dict[int, list[tuple[int, int, int]]] = defaultdict(list)
        copies, nodes = [], set()
        for row, index in enumerate(inputs):
            for slot in self._slots[index]:
                nodes.add(slot.node)
                if slot.node in self._base:
                    position = self._base[slot.node] + slot.offset
                    by_phase[position % 8].append((position // 8, row, slot.delta))
                else:
                    field, shift = self._captured[slot.node, slot.offset]
                    copies.append(_Copy(self._updates[slot.node][2], field, row, shift + slot.delta))
        writes = []
        for phase, triples in by_phase.items():
            positions, rows, deltas = (np.array(column) for column in zip(*triples, strict=True))
            words = np.frombuffer(
                self._memory, dtype=np.uint64, count=(len(self._memory) - phase) // 8, offset=phase
            )
            writes.append(_Write(words, positions, rows, deltas.astype(np.uint64)))
        plan = _Plan(writes, copies, [self._updates[node] for node in sorted(nodes)])
        if len(self._plans) >= PLANS_KEPT:
            self._plans.clear()
        self._plans[inputs] = plan
        return plan

    def close(self) -> None:
        """Let go of everything. The graph must be closed after its patcher."""
        self._plans.clear()
        self._updates.clear()
