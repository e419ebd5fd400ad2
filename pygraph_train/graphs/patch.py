"""Two ways to rewrite the pointers of an instantiated graph: from the host, and by a kernel on the device."""

from __future__ import annotations

import ctypes
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from pygraph_train.graphs.engine import IndirectionUnavailable
from pygraph_train.graphs.indirection import Discovery, Slot
from pygraph_train.graphs.nodes import (
    DESTINATION,
    checked,
    copy_addresses,
    driver,
    node_handles,
)
from pygraph_train.graphs.parameters import KernelParameters
from pygraph_train.graphs.updater import SLOT, TABLE, updater_kernel
from pygraph_train.torch_private.cuda import current_cuda_stream

__all__ = ["DevicePatcher", "HostPatcher", "PatchError", "Patchable", "Patcher"]

THREADS = 128
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


class Patcher(Protocol):
    """Points a graph's inputs at other addresses."""

    discovery: Discovery

    def patch(self, changes: Mapping[int, int]) -> None:
        """Make later replays use new addresses.

        Args:
            changes: address by input; the inputs are served ones and the addresses aligned as required.
        Raises:
            PatchError: a pointer could not be rewritten, by this call or by an earlier one.
        """

    def check(self) -> None:
        """Wait for patches under way and raise PatchError if one failed."""

    def close(self) -> None:
        """Let go of everything. The graph must be closed after its patcher."""


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
        """See `Patcher.patch`."""
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
        _remember(self._plans, inputs, plan)
        return plan

    def check(self) -> None:
        """See `Patcher.check`: the driver has answered already."""

    def close(self) -> None:
        """See `Patcher.close`."""
        self._plans.clear()
        self._updates.clear()


class DevicePatcher:
    """Rewrites single pointers by a small kernel in the current stream: no host work per node.

    Marks the nodes as device-updatable, which cannot be undone, and instantiates the graph, which can
    then not be instantiated again, nor copied or updated as a whole.

    Args:
        graph: not yet instantiated.
        discovery: of this graph, with nothing that only the host can patch.
        device: where the graph runs.
    Raises:
        IndirectionUnavailable: the updater cannot be built, in which case the graph is as it was, or
            CUDA takes none of the nodes. The graph can still be replayed where it was captured.
    """

    def __init__(self, graph: Patchable, discovery: Discovery, device: torch.device) -> None:
        if discovery.host_only:
            raise ValueError(f"inputs {sorted(discovery.host_only)} can be patched from the host only")
        d = driver()
        self._kernel = updater_kernel(device)
        handles = node_handles(graph.raw)
        marked, refused = _mark(d, handles, {slot.node for slot in discovery.slots})
        if refused:
            reasons = {s.input: refused[s.node] for s in discovery.slots if s.node in refused}
            discovery = discovery.without(reasons)
        if not discovery.served:
            raise IndirectionUnavailable(next(iter(refused.values()), "no input can be moved"))
        self.discovery = discovery
        graph.instantiate()
        self._d, self._device = d, device
        with torch.cuda.device(device):
            stream = d.CUstream(torch.cuda.current_stream(device).cuda_stream)
            checked(d.cuGraphUpload(d.CUgraphExec(graph.raw_exec), stream), "uploading the graph")
            self._error = torch.zeros(2, dtype=torch.int32, device="cpu", pin_memory=True)
            self._lay_out(marked)
            torch.cuda.synchronize(device)  # replays and patches come in other streams
        self._status = (ctypes.c_int32 * 2).from_address(self._error.data_ptr())

    def _lay_out(self, marked: Mapping[int, int]) -> None:
        """One table of addresses, and one launch for each piece of it that fits a kernel's parameters."""
        inputs = sorted(self.discovery.served)
        self._rows = {index: row for row, index in enumerate(inputs)}
        self._plans: dict[tuple[int, ...], tuple[Any, list[_Launch]]] = {}
        count = -(-len(inputs) // TABLE)
        self._table = np.zeros(count * TABLE, dtype=np.uint64)
        self._launches = []
        slots = sorted(self.discovery.slots, key=lambda slot: self._rows[slot.input])
        for piece in range(count):
            part = [
                (marked[slot.node], slot.offset, self._rows[slot.input] % TABLE, slot.node, slot.delta)
                for slot in slots
                if self._rows[slot.input] // TABLE == piece
            ]
            data = np.array(part, dtype=SLOT)
            on_device = torch.frombuffer(bytearray(data.tobytes()), dtype=torch.uint8).to(self._device)
            table = self._table[piece * TABLE : (piece + 1) * TABLE]
            self._launches.append(_Launch(on_device, len(part), table, self._error))

    def patch(self, changes: Mapping[int, int]) -> None:
        """See `Patcher.patch`. An error of the device is reported by a later call."""
        if self._status[0]:
            self._fail()
        key = tuple(changes)
        rows, launches = self._plans.get(key) or self._plan(key)
        self._table[rows] = np.fromiter(changes.values(), dtype=np.uint64, count=len(key))
        d = self._d
        stream = d.CUstream(current_cuda_stream(self._device.index))
        for launch in launches:
            # the parameters are copied during the call: the table can be written again at once
            status = d.cuLaunchKernel(
                self._kernel, launch.grid, 1, 1, THREADS, 1, 1, 0, stream, launch.parameters, 0
            )[0]
            if status:
                raise PatchError(f"launching the pointer updater failed: {status.name}")
        self._table[rows] = 0

    def _plan(self, inputs: tuple[int, ...]) -> tuple[Any, list[_Launch]]:
        rows = np.array([self._rows[index] for index in inputs], dtype=np.int64)
        launches = [self._launches[piece] for piece in sorted(set((rows // TABLE).tolist()))]
        _remember(self._plans, inputs, (rows, launches))
        return rows, launches

    def check(self) -> None:
        """See `Patcher.check`."""
        torch.cuda.synchronize(self._device)
        if self._status[0]:
            self._fail()

    def _fail(self) -> None:
        raise PatchError(
            f"the device could not rewrite a pointer in node {self._status[1]} (CUDA error {self._status[0]}): "
            "replays since then have read from an old address"
        )

    def close(self) -> None:
        """See `Patcher.close`. Waits for the device: a patch under way writes into the graph."""
        torch.cuda.synchronize(self._device)
        self._plans.clear()
        self._launches.clear()


class _Launch:
    """One launch of the updater with everything it points to."""

    def __init__(self, slots: torch.Tensor, count: int, table: Any, error: torch.Tensor) -> None:
        self.grid = -(-count // THREADS)
        self._values = (
            ctypes.c_uint64(slots.data_ptr()),
            ctypes.c_int(count),
            ctypes.c_uint64(error.data_ptr()),  # pinned memory has the same address on the device
        )
        at = [ctypes.addressof(value) for value in self._values]
        self._pointers = (ctypes.c_void_p * 4)(at[0], at[1], table.ctypes.data, at[2])
        self.parameters = ctypes.addressof(self._pointers)
        self._keep = (slots, table, error)


def _mark(d: Any, handles: Sequence[Any], nodes: Iterable[int]) -> tuple[dict[int, int], dict[int, str]]:
    """Make kernel nodes device-updatable: their device handles, and why others could not be."""
    marked, refused = {}, {}
    attribute = d.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_DEVICE_UPDATABLE_KERNEL_NODE
    for node in sorted(nodes):
        value = d.CUkernelNodeAttrValue()
        value.deviceUpdatableKernelNode.deviceUpdatable = 1
        status = d.cuGraphKernelNodeSetAttribute(handles[node], attribute, value)[0]
        handle = int(value.deviceUpdatableKernelNode.devNode)  # CUDA writes it into what it was given
        if int(status) == 0 and handle:
            marked[node] = handle
        else:
            refused[node] = f"CUDA does not let the device update node {node}: {status.name}"
    return marked, refused


def _remember(plans: dict[tuple[int, ...], Any], key: tuple[int, ...], plan: Any) -> None:
    if len(plans) >= PLANS_KEPT:
        plans.clear()
    plans[key] = plan
