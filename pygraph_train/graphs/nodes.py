"""The nodes of a captured CUDA graph as plain data: what each one is, and the raw bytes of its parameters."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pygraph_train.graphs.engine import IndirectionUnavailable

OLDEST_DRIVER = 12040  # cuFuncGetParamInfo and device-updatable nodes


@dataclass(frozen=True)
class Node:
    """One node of a captured graph.

    Attributes:
        kind: "kernel", "memcpy", "memset" or "other".
        name: the kernel's name where the driver tells it.
        blocks: (byte offset in the kernel's parameter space, raw bytes). A memcpy has one block, its
            destination and source address; a memset one with its destination.
        readable: False when the node may hold addresses that could not be read.
    """

    kind: str
    name: str = ""
    blocks: tuple[tuple[int, bytes], ...] = ()
    readable: bool = True

    def __str__(self) -> str:
        return f"{self.kind} {self.name}" if self.name else self.kind


def driver() -> Any:
    """The module `cuda.bindings.driver`.

    Raises:
        IndirectionUnavailable: it is not installed, or the CUDA driver is missing or too old.
    """
    try:
        from cuda.bindings import driver as module
    except ImportError as error:
        raise IndirectionUnavailable(
            f"pointer indirection needs the package cuda-bindings (pip install cuda-bindings): {error}"
        ) from error
    try:
        version = int(checked(module.cuDriverGetVersion(), "asking for the driver's version"))
        module.cuFuncGetParamInfo  # noqa: B018 - is it there?
    except Exception as error:  # cuda-bindings raises errors of its own when it finds no libcuda
        raise IndirectionUnavailable(
            f"pointer indirection needs a CUDA driver that cuda-bindings can use: {error}"
        ) from error
    if version < OLDEST_DRIVER:
        raise IndirectionUnavailable(
            f"pointer indirection needs a CUDA driver of version 12.4 or newer, this one is {version // 1000}."
            f"{version % 1000 // 10}"
        )
    return module


def checked(answer: tuple[Any, ...], doing: str) -> Any:
    """What a driver call returned after its status: None, one value, or a tuple.

    Raises:
        RuntimeError: the status is not success.
    """
    if int(answer[0]) != 0:
        raise RuntimeError(f"{doing} failed: {getattr(answer[0], 'name', answer[0])}")
    values = answer[1:]
    return values[0] if len(values) == 1 else values or None


def count_nodes(graph: int) -> int:
    """How many nodes a graph has, see `read_nodes`; -1 where they cannot be read."""
    try:
        return len(node_handles(graph))
    except RuntimeError:
        return -1


def node_handles(graph: int) -> tuple[Any, ...]:
    """The driver's handles of a graph's nodes, in the order of `read_nodes`.

    Args:
        graph: `CUDAGraph(keep_graph=True).raw_cuda_graph()`.
    """
    d = driver()
    raw = d.CUgraph(graph)
    count = checked(d.cuGraphGetNodes(raw), "counting the graph's nodes")[-1]
    if not count:
        return ()
    return tuple(checked(d.cuGraphGetNodes(raw, count), "listing the graph's nodes")[0][:count])


def read_nodes(graph: int) -> tuple[Node, ...]:
    """Read every node of a captured graph.

    Args:
        graph: `CUDAGraph(keep_graph=True).raw_cuda_graph()`; it may or may not be instantiated.
    Raises:
        IndirectionUnavailable: see `driver`.
    """
    d = driver()
    layouts: dict[int, tuple[str, tuple[tuple[int, int], ...]]] = {}
    return tuple(_read(d, handle, layouts) for handle in node_handles(graph))


def _read(d: Any, handle: Any, layouts: dict[int, Any]) -> Node:
    kinds = d.CUgraphNodeType
    try:
        kind = checked(d.cuGraphNodeGetType(handle), "reading a node's type")
    except ValueError:  # newer than cuda-bindings
        return Node("other", readable=False)
    try:
        if kind == kinds.CU_GRAPH_NODE_TYPE_KERNEL:
            return _kernel(d, handle, layouts)
        if kind == kinds.CU_GRAPH_NODE_TYPE_MEMCPY:
            return _memcpy(d, handle)
        if kind == kinds.CU_GRAPH_NODE_TYPE_MEMSET:
            return _memset(d, handle)
    except (RuntimeError, ValueError):
        return Node("other", kind.name, readable=False)
    harmless = (
        kinds.CU_GRAPH_NODE_TYPE_EMPTY,
        kinds.CU_GRAPH_NODE_TYPE_WAIT_EVENT,
        kinds.CU_GRAPH_NODE_TYPE_EVENT_RECORD,
    )
    return Node("other", kind.name, readable=kind in harmless)


def parameter_layout(d: Any, params: Any) -> tuple[tuple[int, int], ...]:
    """(offset, size) of each parameter of the kernel in a CUDA_KERNEL_NODE_PARAMS."""
    function = int(params.func)
    ask, kernel = (d.cuFuncGetParamInfo, params.func) if function else (d.cuKernelGetParamInfo, params.kern)
    layout: list[tuple[int, int]] = []
    while True:
        status, *where = ask(kernel, len(layout))
        if int(status) != 0:  # one past the last
            if status != d.CUresult.CUDA_ERROR_INVALID_VALUE:
                raise RuntimeError(f"the driver does not tell a kernel's parameters: {status.name}")
            return tuple(layout)
        layout.append((int(where[0]), int(where[1])))


def _kernel(d: Any, handle: Any, layouts: dict[int, Any]) -> Node:
    params = checked(d.cuGraphKernelNodeGetParams(handle), "reading a kernel node")
    key = int(params.func) or int(params.kern)
    if key not in layouts:
        layouts[key] = (
            _kernel_name(d, params),
            () if int(params.extra or 0) else parameter_layout(d, params),
        )
    name, layout = layouts[key]
    blocks = parameter_memory(params, layout)
    return Node("kernel", name, blocks or (), readable=blocks is not None)


def parameter_memory(params: Any, layout: Sequence[tuple[int, int]]) -> tuple[tuple[int, bytes], ...] | None:
    """Offset and bytes of each parameter of a kernel, None where the driver does not tell them.

    Args:
        params: CUDA_KERNEL_NODE_PARAMS. The memory behind them belongs to the node: it is read at once and never kept.
        layout: see `parameter_layout`; nobody asks for it where parameters are packed (`extra`).
    """
    array, extra = int(params.kernelParams or 0), int(params.extra or 0)
    if extra:
        packed = packed_parameters(extra)
        return None if packed is None else ((0, packed),)
    if not array:
        return None if layout else ()
    pointers = (ctypes.c_uint64 * len(layout)).from_address(array)
    return tuple(
        (offset, ctypes.string_at(pointer, size))
        for pointer, (offset, size) in zip(pointers, layout, strict=True)
    )


def _kernel_name(d: Any, params: Any) -> str:
    ask, kernel = (d.cuFuncGetName, params.func) if int(params.func) else (d.cuKernelGetName, params.kern)
    status, name = ask(kernel)
    return name.decode(errors="replace") if int(status) == 0 and name else ""


def packed_parameters(extra: int) -> bytes | None:
    """The parameter buffer of an `extra` list: (name, value) pairs up to a name of 0."""
    values: dict[int, int] = {}
    for at in range(extra, extra + 128, 16):
        name = ctypes.c_uint64.from_address(at).value
        if name == 0:
            break
        values[name] = ctypes.c_uint64.from_address(at + 8).value
    buffer, size = values.get(1), values.get(2)  # CU_LAUNCH_PARAM_BUFFER_POINTER, ..._SIZE
    if not buffer or not size:
        return None
    return ctypes.string_at(buffer, ctypes.c_size_t.from_address(size).value)


def _memcpy(d: Any, handle: Any) -> Node:
    params = checked(d.cuGraphMemcpyNodeGetParams(handle), "reading a memcpy node")
    destination, source = copy_addresses(d, params)
    if destination is None or source is None:
        return Node("memcpy", readable=False)
    data = destination.to_bytes(8, "little") + source.to_bytes(8, "little")
    return Node("memcpy", blocks=((0, data),))


def copy_addresses(d: Any, params: Any) -> tuple[int | None, int | None]:
    """First byte written and read by a CUDA_MEMCPY3D; None for one that is a CUDA array."""
    found: list[int | None] = []
    for side in ("dst", "src"):
        kind = getattr(params, f"{side}MemoryType")
        if kind == d.CUmemorytype.CU_MEMORYTYPE_ARRAY:
            found.append(None)
            continue
        host = kind == d.CUmemorytype.CU_MEMORYTYPE_HOST
        base = int(getattr(params, f"{side}Host" if host else f"{side}Device") or 0)
        x, y, z, pitch, height = (
            getattr(params, f"{side}{field}") for field in ("XInBytes", "Y", "Z", "Pitch", "Height")
        )
        found.append(base + x + (y + z * height) * pitch)
    return found[0], found[1]


def _memset(d: Any, handle: Any) -> Node:
    params = checked(d.cuGraphMemsetNodeGetParams(handle), "reading a memset node")
    return Node("memset", blocks=((0, int(params.dst).to_bytes(8, "little")),))


class KernelParameters:
    """A copy of the parameters of one kernel node, which may be written and handed to an instantiated graph.

    The memory behind a node's parameters must not be written to, and successive changes have to add up: all that
    changes a node shares one object, see `CudaGraph.parameters`.

    Args:
        executable: the cudaGraphExec_t.
        handle: of the node.

    Attributes:
        memory: their bytes, of dtype uint8.

    Raises:
        RuntimeError: the driver does not tell the parameters.
    """

    def __init__(self, executable: int, handle: Any) -> None:
        d = driver()
        self._params = params = checked(d.cuGraphKernelNodeGetParams(handle), "reading a kernel node")
        packed = int(params.extra or 0) != 0
        blocks = parameter_memory(params, () if packed else parameter_layout(d, params))
        if blocks is None:
            raise RuntimeError("the driver does not tell a kernel's parameters")
        size = max((offset + len(data) for offset, data in blocks), default=0)
        self.memory = np.zeros(-(-size // 16) * 16, dtype=np.uint8)
        for offset, data in blocks:
            self.memory[offset : offset + len(data)] = np.frombuffer(data, dtype=np.uint8)
        address = self.memory.ctypes.data
        self._keep: list[Any] = []
        if packed:
            nbytes = np.array([len(blocks[0][1])], dtype=np.uint64)
            # CU_LAUNCH_PARAM_BUFFER_POINTER, ..._SIZE, ..._END
            extra = np.array([1, address, 2, nbytes.ctypes.data, 0], dtype=np.uint64)
            params.extra = extra.ctypes.data
            self._keep += [nbytes, extra]
        else:
            pointers = np.array([address + offset for offset, _ in blocks], dtype=np.uint64)
            params.kernelParams = pointers.ctypes.data
            self._keep.append(pointers)
        self._set, self._to = d.cuGraphExecKernelNodeSetParams, (d.CUgraphExec(executable), handle)

    def update(self) -> None:
        """Let launches from now on have what is in `memory`. Those of before keep what they had. Hot path.

        Raises:
            RuntimeError: the driver refuses it.
        """
        checked(self._set(*self._to, self._params), "giving a captured kernel other parameters")
