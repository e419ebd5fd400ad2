"""Parameter indirection: a graph that works on its inputs wherever they lie, without copies.

The idea is that of PyGraph (arXiv 2503.19779), without rewriting kernels. A capture gets stand-ins for its inputs, in a
range of addresses that nothing else has. So 8 bytes of a kernel's parameters that are such an address are a pointer to
an input, and before a replay they are replaced where the input has moved. Behind the range lies one small piece of
memory again and again, full of NaN: a pointer that was not found does no harm, and cannot hide, in a replay that is
compared with a plain step.

torch leaves parts of its kernels' parameters as they were on the stack, where pointers of earlier launches still lie. A
pointer too many does no harm either. But what lies there may begin with bytes that a kernel reads, such as the numbers
of tensors in a multi-tensor kernel, in front of what is left of a pointer. So only whole addresses count, and the low
byte of each is larger than those numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from pygraph_train.graphs.cuda_graph import finish_replays
from pygraph_train.graphs.engine import IndirectionUnavailable
from pygraph_train.graphs.memory import ALIGNMENT, AddressRange, address_range
from pygraph_train.graphs.nodes import Node, checked, driver, node_handles
from pygraph_train.torch_private.memory import tensor_at

_MARGIN = 512
"""Bytes between stand-ins, and what their addresses are a multiple of, but for the low byte."""

_LOW_BYTE = 0xF0
"""Of their addresses: a multi-tensor kernel takes at most 110 tensors."""

_HINT = 0x5A31_7000_0000
"""Where the range is asked for: two 4-byte numbers of a kernel do not look like that."""

_LOWEST = 1 << 40
"""Ranges below are refused: two small 4-byte numbers look like addresses there."""


class Pointer(NamedTuple):
    """Eight bytes in a node's parameters: they have to be the input's address."""

    node: int
    offset: int
    input: int


def find_pointers(nodes: Sequence[Node], ranges: Sequence[AddressRange]) -> list[Pointer]:
    """All pointers to inputs.

    Args:
        nodes: of a capture.
        ranges: where its inputs lay, in ascending order, with gaps between them. Nothing else lay between the first
            byte and the last.
    Raises:
        IndirectionUnavailable: a node cannot be read, an address is not in a kernel, or an input has no pointer.
    """
    found: list[Pointer] = []
    at = {address: number for number, (address, _) in enumerate(ranges)}
    low, high = ranges[0].address - _MARGIN, ranges[-1].address + ranges[-1].nbytes + _MARGIN
    for index, node in enumerate(nodes):
        if not node.readable:
            raise IndirectionUnavailable(f"the parameters of node {index} ({node}) cannot be read")
        for offset, data in node.blocks:
            words = np.frombuffer(data, dtype="<u8", count=0 if offset % 8 else len(data) // 8)
            inside = np.flatnonzero((words >= np.uint64(low)) & (words < np.uint64(high)))
            if len(inside) and node.kind != "kernel":
                raise IndirectionUnavailable(
                    f"the address of an input in node {index} ({node}) cannot be replaced"
                )
            found += [
                Pointer(index, offset + 8 * int(n), at[int(words[n])]) for n in inside if int(words[n]) in at
            ]
    if {pointer.input for pointer in found} != {n for n, (_, nbytes) in enumerate(ranges) if nbytes}:
        raise IndirectionUnavailable("no captured operation holds the address of one of the inputs")
    return found


class _Kernel(NamedTuple):
    """Pointers in the parameters of one kernel."""

    parameters: Any
    words: NDArray[np.uint64]
    positions: NDArray[np.int64]
    inputs: NDArray[np.int64]


class MovableInputs:
    """Inputs of a CUDA graph. See `graphs.engine.Inputs`, also for its methods.

    Args:
        inputs: CUDA tensors of one device, at least one.
    Raises:
        IndirectionUnavailable: this machine has no such addresses.
    """

    def __init__(self, inputs: Sequence[Tensor]) -> None:
        self._ranges: list[AddressRange] = []
        at = _MARGIN
        for address, nbytes in map(address_range, inputs):
            at += -at % _MARGIN + _LOW_BYTE + address % ALIGNMENT
            self._ranges.append(AddressRange(at, nbytes))
            at += nbytes + _MARGIN
        try:
            self._memory: _RepeatedMemory | None = _RepeatedMemory(at + _MARGIN, inputs[0].device.index)
        except RuntimeError as error:
            raise IndirectionUnavailable(str(error)) from error
        base = self._memory.address
        self._ranges = [AddressRange(base + start, nbytes) for start, nbytes in self._ranges]
        self._aligned = [min(start & -start, ALIGNMENT) - 1 for start, _ in self._ranges]
        self.stand_ins: Sequence[Tensor] = [
            tensor_at(place.address, tensor, place.nbytes)
            for place, tensor in zip(self._ranges, inputs, strict=True)
        ]
        self._kernels: list[_Kernel] = []
        self._addresses: list[int] = []
        self._now: NDArray[np.uint64] = np.zeros(len(inputs), dtype=np.uint64)

    def follow(self, graph: Any) -> None:
        try:
            found = find_pointers(graph.read(), self._ranges)
            handles = node_handles(graph.raw)
            for node in sorted({pointer.node for pointer in found}):
                own = [pointer for pointer in found if pointer.node == node]
                parameters = graph.parameters(handles[node])
                self._kernels.append(
                    _Kernel(
                        parameters,
                        parameters.memory.view(np.uint64),
                        np.array([pointer.offset // 8 for pointer in own]),
                        np.array([pointer.input for pointer in own]),
                    )
                )
        except RuntimeError as error:
            raise IndirectionUnavailable(str(error)) from error

    def fit(self, addresses: Sequence[int]) -> bool:
        """Hot path."""
        if addresses == self._addresses:
            return True
        return not any(address & mask for address, mask in zip(addresses, self._aligned, strict=True))

    def take(self, inputs: Sequence[Tensor], addresses: list[int]) -> None:
        """Hot path."""
        if addresses == self._addresses:
            return
        now = np.array(addresses, dtype=np.uint64)
        moved = now != self._now
        self._addresses, self._now = [], np.zeros_like(now)  # should a kernel refuse its pointers
        for parameters, words, positions, rows in self._kernels:
            if moved[rows].any():
                words[positions] = now[rows]
                parameters.update()
        self._addresses, self._now = addresses, now

    def give_back(self, inputs: Sequence[Tensor]) -> None:
        """Replays have worked on the inputs themselves."""

    def close(self) -> None:
        self.stand_ins, self._kernels = (), []
        if self._memory is not None:
            self._memory.close()
            self._memory = None


class _RepeatedMemory:
    """A range of addresses behind which lies one small piece of memory, again and again.

    Args:
        nbytes: of the range.
        device: number of a CUDA device.
    Raises:
        RuntimeError: the driver does not give it.
    """

    def __init__(self, nbytes: int, device: int) -> None:
        d = self._driver = driver()
        kind = d.CUmemAllocationProp()
        kind.type = d.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        kind.location.type = d.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        kind.location.id = device
        least = d.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        piece = checked(d.cuMemGetAllocationGranularity(kind, least), "asking for the size of pages")
        self._nbytes = nbytes + -nbytes % piece
        self._range = checked(
            d.cuMemAddressReserve(self._nbytes, 0, d.CUdeviceptr(_HINT), 0), "reserving addresses"
        )
        self.address, self._mapped = int(self._range), 0
        try:
            memory = checked(d.cuMemCreate(piece, kind, 0), "allocating memory")
            try:
                while self._mapped < self._nbytes:
                    checked(d.cuMemMap(self.address + self._mapped, piece, 0, memory, 0), "mapping memory")
                    self._mapped += piece
            finally:
                d.cuMemRelease(memory)  # it stays while it is mapped
            access = d.CUmemAccessDesc()
            access.location.type, access.location.id = kind.location.type, device
            access.flags = d.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
            checked(d.cuMemSetAccess(self.address, self._nbytes, [access], 1), "giving access to memory")
            checked(d.cuMemsetD8(self.address, 0xFF, piece), "filling memory")
            if self.address < _LOWEST:
                raise RuntimeError("the driver gives low addresses, which kernels may hold as numbers")
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Give all back, when nothing touches it any more: it may not even be filled yet."""
        finish_replays()
        if self._mapped:
            self._driver.cuMemUnmap(self.address, self._mapped)
        self._driver.cuMemAddressFree(self.address, self._nbytes)
