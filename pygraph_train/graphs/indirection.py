"""Finding the pointers to a graph's inputs: two captures of the same work, and what moved with the inputs.

The idea is the parameter indirection of PyGraph (arXiv 2503.19779), without rewriting kernels: the
parameters of every captured kernel are searched for 8-byte values that lie in an input. One capture
cannot tell an address from a number that looks like one, so the work is captured again with the inputs
elsewhere. An input is served only when nothing about it is left unexplained.

Pure functions on plain data; nothing here needs a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from pygraph_train.graphs.memory import ALIGNMENT, AddressRange
from pygraph_train.graphs.nodes import Node

__all__ = ["Discovery", "Slot", "discover", "misplaced", "moved_inputs", "refusals", "required_alignment"]

MARGIN = 512
"""Bytes around an input where an address that moves with it is taken for one that was derived from it."""

NOT_FOUND = "no captured operation holds its address: it is unused, or reached in a way that cannot be seen"

Words = NDArray[np.uint64]
Indices = NDArray[np.int64]


class Slot(NamedTuple):
    """One pointer in a node's parameters: it has to be the input's address plus `delta`."""

    node: int
    offset: int
    input: int
    delta: int


@dataclass(frozen=True)
class Discovery:
    """Which inputs can be moved, and what has to be rewritten for it.

    Attributes:
        slots: pointers to served inputs, in the order of nodes and offsets.
        served: inputs whose pointers are all known.
        unserved: for each other input a sentence that says why not.
        alignment: by input, bytes that its address must be a multiple of.
    """

    slots: tuple[Slot, ...]
    served: frozenset[int]
    unserved: Mapping[int, str]
    alignment: tuple[int, ...]


def required_alignment(address: int) -> int:
    """What the address of an input captured at `address` must be a multiple of."""
    return min(address & -address, ALIGNMENT) if address else 1


def misplaced(index: int, tensor: torch.Tensor, alignment: int) -> str | None:
    """Why an input cannot be moved to a tensor's address, or None."""
    address = tensor.data_ptr()
    if address % alignment:
        return (
            f"input {index} was captured at a multiple of {alignment} bytes, which {address:#x} is not: "
            "the captured kernels rely on it"
        )
    return None


def moved_inputs(
    changes: Mapping[int, torch.Tensor], addresses: Sequence[int], discovery: Discovery
) -> dict[int, int]:
    """The new address of each input that is no longer where it was.

    Args:
        changes: tensors by input.
        addresses: where each input is now.
        discovery: what can be moved.
    Raises:
        ValueError: one of them is not served, or lost its alignment.
    """
    moved: dict[int, int] = {}
    for index, tensor in changes.items():
        address = tensor.data_ptr()
        if address == addresses[index]:
            continue
        if index not in discovery.served:
            raise ValueError(f"input {index} cannot be moved: {discovery.unserved[index]}")
        if address % discovery.alignment[index]:
            raise ValueError(misplaced(index, tensor, discovery.alignment[index]))
        moved[index] = address
    return moved


def refusals(first: Sequence[AddressRange], second: Sequence[AddressRange]) -> dict[int, str]:
    """Inputs that cannot be served whatever the captured work is: reasons by input.

    Args:
        first, second: where each input lay in the two captures.
    """
    refused: dict[int, str] = {}
    for index, (before, after) in enumerate(zip(first, second, strict=True)):
        if not before.nbytes:
            refused[index] = "it has no memory"
        elif before.nbytes != after.nbytes:
            refused[index] = (
                f"it spans {before.nbytes} bytes in the first capture and {after.nbytes} in the second"
            )
        elif before.address == after.address:
            refused[index] = "it lay at the same address in both captures"
    for ranges in (first, second):
        reach, owner = -1, -1
        for index in sorted(range(len(ranges)), key=lambda i: ranges[i]):
            address, nbytes = ranges[index]
            if not nbytes:
                continue
            if address < reach:
                refused.setdefault(index, f"it overlaps input {owner}")
                refused.setdefault(owner, f"it overlaps input {index}")
            if address + nbytes > reach:
                reach, owner = address + nbytes, index
    return refused


def discover(
    first: Sequence[Node],
    second: Sequence[Node],
    ranges_first: Sequence[AddressRange],
    ranges_second: Sequence[AddressRange],
) -> Discovery:
    """Find the pointers to each input.

    Args:
        first, second: the nodes of two captures of the same work.
        ranges_first, ranges_second: (address, bytes) of every input in the two captures.
    Returns:
        An input is served when every address inside of it moved with it and no other one points there.
    """
    inputs = len(ranges_first)
    alignment = tuple(
        max(required_alignment(before[0]), required_alignment(after[0]))
        for before, after in zip(ranges_first, ranges_second, strict=True)
    )
    difference = _difference(first, second)
    if difference is not None:
        return Discovery((), frozenset(), dict.fromkeys(range(inputs), difference), alignment)

    refused = refusals(ranges_first, ranges_second)
    slots: list[Slot] = []
    places = _Places(first)
    before, after = _Ranges(ranges_first), _Ranges(ranges_second)
    old_bytes, new_bytes = places.pack(first), places.pack(second)
    for phase in range(8):
        old, new = _words(old_bytes, phase), _words(new_bytes, phase)
        in_old, in_new = before.owner(old), after.owner(new)
        around = before.around(old)
        suspects = np.flatnonzero((in_old >= 0) | (in_new >= 0) | (around >= 0).any(axis=0))
        for word in suspects.tolist():
            place = places.at(8 * word + phase)
            if place is None:  # half of it belongs to the next block
                continue
            node, offset, aligned = place
            value, moved = int(old[word]), int(new[word])
            owner = int(in_old[word])
            follows = (
                owner >= 0
                and owner == in_new[word]
                and value - ranges_first[owner][0] == moved - ranges_second[owner][0]
            )
            where = f"node {node} ({first[node]}), byte {offset}"
            if follows and aligned and first[node].patchable:
                slots.append(Slot(node, offset, owner, value - ranges_first[owner][0]))
            elif follows and aligned:
                refused.setdefault(owner, f"its pointer in {where} cannot be changed after the capture")
            elif follows:
                refused.setdefault(owner, f"its pointer in {where} is not aligned to 8 bytes")
            elif owner >= 0 and moved == value and int(in_new[word]) < 0:
                # Left over in unused parts of an argument, as in the lists of fused optimizers: work that
                # read it would have read memory of the other capture.
                continue
            else:
                for index in {owner, int(in_new[word])} - {-1}:
                    refused.setdefault(
                        index, f"{where} holds an address inside of it that did not move with it"
                    )
                for index in set(around[:, word].tolist()) - {-1}:
                    if moved - value == ranges_second[index][0] - ranges_first[index][0]:
                        refused.setdefault(
                            index, f"{where} holds an address just outside of it that moved with it"
                        )
    for index in set(range(inputs)) - {slot.input for slot in slots}:
        refused.setdefault(index, NOT_FOUND)
    kept = tuple(sorted(slot for slot in slots if slot.input not in refused))
    return Discovery(kept, frozenset(slot.input for slot in kept), refused, alignment)


def _difference(first: Sequence[Node], second: Sequence[Node]) -> str | None:
    """Why the two captures cannot be compared."""
    if len(first) != len(second):
        return f"the two captures differ: {len(first)} and {len(second)} nodes"
    for index, (one, other) in enumerate(zip(first, second, strict=True)):
        if one.layout != other.layout:
            return f"the two captures differ: node {index} is {one} in the first and {other} in the second"
        if not one.readable:
            return f"the parameters of node {index} ({one}) cannot be read"
    return None


class _Places:
    """All parameter blocks in one row of bytes: which byte belongs where."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self._nodes: list[int] = []
        self._offsets: list[int] = []
        self._sizes: list[int] = []
        starts = []
        self._total = 0
        for index, node in enumerate(nodes):
            for offset, data in node.blocks:
                starts.append(self._total)
                self._nodes.append(index)
                self._offsets.append(offset)
                self._sizes.append(len(data))
                self._total += -(-len(data) // 8) * 8
        self._starts = np.array(starts, dtype=np.int64)

    def pack(self, nodes: Sequence[Node]) -> bytes:
        """The bytes of all blocks, each filled up to a multiple of 8, and 8 more."""
        blocks = (data for node in nodes for _, data in node.blocks)
        return b"".join(data + bytes(-len(data) % 8) for data in blocks) + bytes(8)

    def at(self, position: int) -> tuple[int, int, bool] | None:
        """Node, offset in its parameters, and alignment of the 8 bytes from `position`."""
        block = int(np.searchsorted(self._starts, position, side="right")) - 1
        within = position - int(self._starts[block])
        if within + 8 > self._sizes[block]:
            return None
        offset = self._offsets[block] + within
        return self._nodes[block], offset, within % 8 == 0 or offset % 8 == 0


class _Ranges:
    """Which input, if any, each of many values lies in."""

    def __init__(self, ranges: Sequence[AddressRange]) -> None:
        order = sorted((i for i in range(len(ranges)) if ranges[i][1]), key=lambda i: ranges[i][0])
        # a last entry that nothing lies in answers for index -1 too
        self._index = np.array([*order, -1], dtype=np.int64)
        self._start = np.array([*(ranges[i][0] for i in order), 2**64 - 1], dtype=np.uint64)
        self._size = np.array([*(ranges[i][1] for i in order), 0], dtype=np.uint64)

    def _last_start(self, values: Words) -> Indices:
        return np.searchsorted(self._start, values, side="right") - 1

    def owner(self, values: Words) -> Indices:
        """The input that each value lies in, or -1."""
        last = self._last_start(values)
        # below the first start the difference wraps around to more than any size
        return np.where(values - self._start[last] < self._size[last], self._index[last], -1)

    def around(self, values: Words) -> Indices:
        """For each value the input that ends, and the one that starts, within MARGIN of it; -1 for none."""
        margin = np.uint64(MARGIN)
        last = self._last_start(values)
        past = values - self._start[last] - self._size[last]
        ends = np.where((past < margin) & (last >= 0), self._index[last], -1)
        following = np.minimum(last + 1, len(self._index) - 1)
        before = self._start[following] - values
        starts = np.where((before > 0) & (before < margin), self._index[following], -1)
        return np.stack([ends, starts])


def _words(data: bytes, phase: int) -> Words:
    """The 8-byte words from byte `phase` on."""
    words: Any = np.frombuffer(data, dtype="<u8", count=(len(data) - phase) // 8, offset=phase)
    return words
