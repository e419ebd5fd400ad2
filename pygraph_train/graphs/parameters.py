"""Copies of the parameters of captured kernels, which may be written and handed to an instantiated graph."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any

import numpy as np

from pygraph_train.graphs.nodes import checked, packed_parameters, parameter_layout

__all__ = ["KernelParameters"]


class KernelParameters:
    """The parameters of some kernel nodes, one after the other in memory of our own.

    The memory behind a node's parameters must not be written to, and successive changes have to accumulate.

    Args:
        d: the driver's module.
        handles: nodes by any number of theirs.

    Attributes:
        memory: all bytes.
        base: by node where its parameter space begins in `memory`.
        updates: by node the driver function, the node, the parameters and further arguments of an update.
    """

    def __init__(self, d: Any, handles: Mapping[int, Any]) -> None:
        self.base: dict[int, int] = {}
        self.updates: dict[int, tuple[Any, Any, Any, tuple[Any, ...]]] = {}
        self._keep: list[Any] = []
        found, blocks, total = {}, {}, 0
        for node, handle in handles.items():
            params = checked(d.cuGraphKernelNodeGetParams(handle), "reading a kernel node")
            blocks[node] = _kernel_memory(d, params)
            found[node] = params
            self.base[node] = total
            total += max(-(-(offset + len(data)) // 16) * 16 for offset, data in blocks[node])
        self.memory = memory = np.zeros(total + 16, dtype=np.uint8)
        address = memory.ctypes.data
        for node, params in found.items():
            base = self.base[node]
            for offset, data in blocks[node]:
                memory[base + offset : base + offset + len(data)] = np.frombuffer(data, dtype=np.uint8)
            if int(params.extra or 0):
                size = np.array([len(blocks[node][0][1])], dtype=np.uint64)
                # CU_LAUNCH_PARAM_BUFFER_POINTER, ..._SIZE, ..._END
                extra = np.array([1, address + base, 2, size.ctypes.data, 0], dtype=np.uint64)
                params.extra = extra.ctypes.data
                self._keep += [size, extra]
            else:
                pointers = np.array([address + base + offset for offset, _ in blocks[node]], dtype=np.uint64)
                params.kernelParams = pointers.ctypes.data
                self._keep.append(pointers)
            self.updates[node] = (d.cuGraphExecKernelNodeSetParams, handles[node], params, ())


def _kernel_memory(d: Any, params: Any) -> list[tuple[int, bytes]]:
    """The (offset, bytes) of a kernel's parameters."""
    if int(params.extra or 0):
        packed = packed_parameters(int(params.extra))
        assert packed is not None  # the node was readable
        return [(0, packed)]
    layout = parameter_layout(d, params)
    pointers = (ctypes.c_uint64 * len(layout)).from_address(int(params.kernelParams))
    return [
        (offset, ctypes.string_at(pointer, size))
        for pointer, (offset, size) in zip(pointers, layout, strict=True)
    ]
