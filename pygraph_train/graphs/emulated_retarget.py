"""An emulated graph whose inputs may move: the counterpart of `retarget`, with the same discovery."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from pygraph_train.graphs.engine import IndirectionUnavailable
from pygraph_train.graphs.indirection import (
    MARGIN,
    Discovery,
    discover,
    misplaced,
    moved_inputs,
    required_alignment,
)
from pygraph_train.graphs.memory import AddressRange, address_range
from pygraph_train.torch_private.dispatch import below_autograd
from pygraph_train.torch_private.memory import borrow_memory

if TYPE_CHECKING:
    from pygraph_train.graphs.emulated import EmulatedGraph

__all__ = ["AddressBook", "IndirectEmulatedGraph", "indirect"]


def indirect(
    first: EmulatedGraph,
    second: EmulatedGraph,
    inputs_first: Sequence[torch.Tensor],
    inputs_second: Sequence[torch.Tensor],
) -> IndirectEmulatedGraph:
    """See `graphs.engine.Engine.indirect`."""
    book = AddressBook()
    discovery = discover(
        first.as_nodes(book),
        second.as_nodes(book),
        [book.range(tensor) for tensor in inputs_first],
        [book.range(tensor) for tensor in inputs_second],
    )
    if not discovery.served:
        raise IndirectionUnavailable(next(iter(discovery.unserved.values()), "there are no inputs"))
    alignment = tuple(
        max(required_alignment(before.data_ptr()), required_alignment(after.data_ptr()))
        for before, after in zip(inputs_first, inputs_second, strict=True)
    )
    first.close()
    return IndirectEmulatedGraph(second, replace(discovery, alignment=alignment), inputs_second)


class IndirectEmulatedGraph:
    """See `graphs.engine.IndirectGraph`. Moves the aliases on the tape to other storages.

    Other than on CUDA, the tensors that it was pointed at stay alive.
    """

    def __init__(self, graph: EmulatedGraph, discovery: Discovery, inputs: Sequence[torch.Tensor]) -> None:
        self.nodes = graph.nodes
        self.discovery = discovery
        self.served = discovery.served
        self.unserved = discovery.unserved
        self._graph = graph
        self._addresses = [tensor.data_ptr() for tensor in inputs]

    def accepts(self, index: int, tensor: torch.Tensor) -> bool:
        """See `graphs.engine.IndirectGraph.accepts`."""
        return index in self.served and misplaced(index, tensor, self.discovery.alignment[index]) is None

    def retarget(self, changes: Mapping[int, torch.Tensor]) -> None:
        """See `graphs.engine.IndirectGraph.retarget`."""
        if self._graph.closed:
            raise RuntimeError("this graph is closed: capture it again instead of retargeting it")
        moved = moved_inputs(changes, self._addresses, self.discovery)
        # like a CUDA graph, the tape does not keep its targets alive
        targets = {index: borrow_memory(changes[index]) for index in moved}
        with below_autograd():
            for node, offset, index, delta in self.discovery.slots:
                if index in moved:
                    _point_at(self._graph.tensor_at(node, offset), targets[index], delta)
        for index, address in moved.items():
            self._addresses[index] = address

    def replay(self) -> None:
        """Run the recorded operations on the tensors it points at."""
        self._graph.replay()

    def close(self) -> None:
        """See `EmulatedGraph.close`."""
        self._graph.close()


class AddressBook:
    """Addresses as a GPU might have them: storages far from each other, and never the same twice.

    The CPU allocator puts small storages side by side, where chance would look like a pointer.
    """

    def __init__(self) -> None:
        self._bases: dict[int, int] = {}
        self._next = 1 << 40

    def range(self, tensor: torch.Tensor) -> AddressRange:
        """Where a tensor would lie."""
        storage = tensor.untyped_storage()
        address, nbytes = address_range(tensor)
        if not nbytes:
            return AddressRange(0, 0)
        start = storage.data_ptr()
        if start not in self._bases:
            self._bases[start] = self._next
            self._next += (storage.nbytes() // MARGIN + 4) * MARGIN
        return AddressRange(self._bases[start] + address - start, nbytes)


def _point_at(alias: torch.Tensor, target: torch.Tensor, delta: int) -> None:
    storage = target.untyped_storage()
    offset = (target.data_ptr() - storage.data_ptr() + delta) // alias.element_size()
    with torch.inference_mode(alias.is_inference()):
        alias.set_(storage, offset, alias.size(), alias.stride())
