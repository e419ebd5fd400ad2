"""A copy of the parameters of a captured kernel, which may be written and handed to an instantiated graph."""

from __future__ import annotations

from typing import Any

import numpy as np

from pygraph_train.graphs.nodes import checked, driver, parameter_layout, parameter_memory


class KernelParameters:
    """The parameters of one kernel node.

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
