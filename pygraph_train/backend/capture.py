"""One captured region: which inputs must be where, and where its outputs come from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch

from pygraph_train.backend.arena import Block, Occupant, block_of
from pygraph_train.graphs import Graph
from pygraph_train.graphs.memory import copy_elsewhere, span
from pygraph_train.torch_internals import reinterpret_tensor

__all__ = ["Handing", "RegionCapture"]

_address = torch.Tensor.data_ptr


@dataclass(frozen=True)
class Handing:
    """How the outputs of a region reach its caller.

    Args:
        in_place: output indices that may be handed out where the graph writes them; others are copied.
        together: those that live and die together, and that nobody changes: what a forward saves.
    """

    in_place: frozenset[int]
    together: frozenset[int]


class RegionCapture:
    """A graph of one region for one set of shapes and addresses.

    Args:
        graph: reads and writes the addresses below.
        inputs: the inputs during the capture.
        buffers: by index, fixed buffers that stood for inputs during the capture: copied into.
        served: by index, the position of inputs whose addresses may be rewritten instead.
        spare: by index, buffers for the served, where the graph reads them while `pointing` is False.
        mutated: inputs that the region writes to.
        result: what the region returned during the capture.
        handing: how outputs are handed out.
        keeps, pool: see `arena.Occupant`.
        consumes: outputs of another graph that this one reads and frees.
    """

    def __init__(
        self,
        graph: Graph,
        inputs: Sequence[Any],
        buffers: Mapping[int, torch.Tensor],
        served: Mapping[int, int],
        spare: Mapping[int, torch.Tensor],
        mutated: frozenset[int],
        result: Sequence[Any],
        handing: Handing,
        keeps: frozenset[Block],
        pool: int,
        consumes: Occupant | None,
    ) -> None:
        self.graph = graph
        self.consumes = consumes
        tensors = [i for i, t in enumerate(inputs) if isinstance(t, torch.Tensor)]
        self.fixed = tuple(i for i in tensors if i not in buffers and i not in served)
        # one call in C for hundreds of parameters
        self._pick_fixed: Callable[[Sequence[Any]], Sequence[Any]] = (
            itemgetter(*self.fixed) if len(self.fixed) > 1 else lambda given: [given[i] for i in self.fixed]
        )
        self.addresses = [inputs[i].data_ptr() for i in self.fixed]
        self._served = tuple(served.items())
        self._spare = dict(spare)
        self.pointing = not spare
        self.served_at = [inputs[i].data_ptr() for i in served]
        self._own = dict(buffers)
        self._mutated = mutated
        self._arrange_buffers()
        self._aligned: dict[int, torch.Tensor] = {}  # copies of inputs that came misaligned
        self.patched = 0
        self._sort_outputs(inputs, buffers, result, handing, keeps, pool)

    def _arrange_buffers(self) -> None:
        buffers = self._own if self.pointing else {**self._own, **self._spare}
        self.copied_bytes = sum(t.nbytes for t in buffers.values())
        self._copied = [i for i, t in buffers.items() if t.numel()]
        self._buffers = [span(buffers[i]) if _overlaps(buffers[i]) else buffers[i] for i in self._copied]
        self._spans = any(_overlaps(t) for t in buffers.values())
        self._write_back = tuple((i, buffers[i]) for i in sorted(self._mutated & buffers.keys()))

    @property
    def serves(self) -> bool:
        """Whether some inputs can be read where they are."""
        return bool(self._served)

    def point(self, pointing: bool, for_good: bool = False) -> None:
        """Read served inputs where they are, or copy them into buffers.

        Args:
            pointing: which of the two.
            for_good: it stays so: release the buffers, or the means to rewrite addresses.
        """
        if self._served and pointing != self.pointing:
            self.pointing = pointing
            graph: Any = self.graph
            if not pointing:
                graph.retarget({position: self._spare[i] for i, position in self._served})
            self.served_at = []  # wherever the next ones are, the graph does not read there yet
            self._arrange_buffers()
        if for_good and pointing:
            self._spare.clear()
        elif for_good:
            self._own |= self._spare
            self._spare.clear()
            self._served = ()
            self._arrange_buffers()

    def _sort_outputs(
        self,
        inputs: Sequence[Any],
        buffers: Mapping[int, torch.Tensor],
        result: Sequence[Any],
        handing: Handing,
        keeps: frozenset[Block],
        pool: int,
    ) -> None:
        callers = {*self.fixed, *(i for i, _ in self._served)}  # inputs that the graph uses where they are
        same_object = {id(inputs[i]): i for i in callers}
        same_memory = {block_of(inputs[i]): i for i in callers}
        own_buffers = {block_of(t) for t in buffers.values()}
        self._template: list[Any] = [None] * len(result)
        self._passed: list[tuple[int, int]] = []
        self._viewed: list[tuple[int, int, Any]] = []
        self._copies: list[tuple[int, torch.Tensor]] = []
        self._repeated: list[tuple[int, int]] = []  # autograd asks whether a gradient is nobody else's
        tensors: dict[int, torch.Tensor] = {}
        seen: dict[tuple[int, bool, bool], int] = {}
        for index, output in enumerate(result):
            if not isinstance(output, torch.Tensor):
                self._template[index] = output
                continue
            owner = same_memory.get(block_of(output))
            kind = (id(output), index in handing.in_place, index in handing.together)
            first = seen.setdefault(kind, index)
            if first != index:
                self._repeated.append((index, first))
            elif id(output) in same_object:
                self._passed.append((index, same_object[id(output)]))
            elif owner is not None and owner in self.fixed:
                self._template[index] = output  # its memory is where it was, or this graph does not run
            elif owner is not None and inputs[owner].dtype == output.dtype:
                offset = output.storage_offset() - inputs[owner].storage_offset()
                self._viewed.append((index, owner, (tuple(output.size()), tuple(output.stride()), offset)))
            elif index not in handing.in_place:
                self._copies.append((index, output))
            else:
                tensors[index] = output
        self._shared = _share(self._copies)
        in_buffers = frozenset(i for i, t in tensors.items() if block_of(t) in own_buffers)
        self.occupant = Occupant(tensors, in_buffers, handing.together, keeps, pool)
        self.occupant.on_change = self._follow_occupant
        self._follow_occupant()

    def _follow_occupant(self) -> None:
        """Hand out the tensors that the occupant has now."""
        for index, tensor in self.occupant.handed.items():
            self._template[index] = tensor

    def fits(self, inputs: Sequence[Any]) -> bool:
        """Whether every input that the graph reads in place is where it was."""
        return list(map(_address, self._pick_fixed(inputs))) == self.addresses

    def replay(self, inputs: list[Any]) -> list[Any]:
        """Run the graph on `inputs` (emptied as soon as possible) and return the region's outputs."""
        if self._copied:
            self._fill_buffers(inputs)
        if self._served:
            self._point(inputs)
        self.occupant.tidy()
        outputs = self._template.copy()
        for index, source in self._passed:
            outputs[index] = inputs[source]
        for index, source, geometry in self._viewed:
            outputs[index] = reinterpret_tensor(inputs[source], *geometry)
        written = [(inputs[i], buffer) for i, buffer in self._write_back]
        in_place = [
            inputs[i] for i, _ in self._served
        ]  # nobody else may hold them: alive until they are read
        inputs.clear()
        self.graph.replay()
        del in_place
        for target, buffer in written:
            span(target).copy_(span(buffer))
        if self.occupant.sentinel is not None:
            outputs[self.occupant.sentinel] = self.occupant.tensors[self.occupant.sentinel].detach()
        if self._shared:
            _copy_shared(self._copies, outputs)
        else:
            for index, base in self._copies:
                outputs[index] = base.clone()
        for index, first in self._repeated:
            outputs[index] = outputs[first]
        return outputs

    def _fill_buffers(self, inputs: list[Any]) -> None:
        given = [inputs[i] for i in self._copied]
        if self._spans:
            given = [span(t) if b.dim() == 1 else t for t, b in zip(given, self._buffers, strict=True)]
        if len(given) == 1:
            self._buffers[0].copy_(given[0])
        else:
            torch._foreach_copy_(self._buffers, given)

    def _point(self, inputs: list[Any]) -> None:
        """Let the graph read its served inputs where they are in this run."""
        addresses = [inputs[i].data_ptr() for i, _ in self._served]
        self.patched = 0
        if not self.pointing or (addresses == self.served_at and not self._aligned):
            self.served_at = addresses
            return
        graph: Any = self.graph
        self._aligned.clear()
        changes = {position: inputs[i] for i, position in self._served}
        for position, tensor in changes.items():
            if not graph.accepts(position, tensor):  # kernels rely on the alignment of the capture
                changes[position] = self._aligned[position] = copy_elsewhere(tensor)
        graph.retarget(changes)
        before = self.served_at or [0] * len(addresses)
        self.patched = sum(a != b for a, b in zip(addresses, before, strict=True))
        self.served_at = addresses

    def close(self) -> None:
        """Release the graph. What it handed out stays guarded by the arena."""
        self.occupant.on_change = None
        self.graph.close()


def _overlaps(tensor: torch.Tensor) -> bool:
    """Whether elements share memory, so that it cannot be written element by element."""
    return any(n > 1 and s == 0 for n, s in zip(tensor.size(), tensor.stride(), strict=True))


def _dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill their memory without gaps or overlaps, in some order of dimensions."""
    expected = 1
    for stride, size in sorted((s, n) for n, s in zip(tensor.size(), tensor.stride(), strict=True) if n > 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _share(outputs: list[tuple[int, torch.Tensor]]) -> bool:
    """Whether outputs overlap each other or themselves: then a plain clone would change what they are."""
    blocks = [block_of(t) for _, t in outputs]
    return len(set(blocks)) < len(blocks) or any(not _dense(t) for _, t in outputs)


def _copy_shared(outputs: list[tuple[int, torch.Tensor]], into: list[Any]) -> None:
    """Copy outputs so that what shared memory still does."""
    copies: dict[Block, torch.UntypedStorage] = {}
    for index, base in outputs:
        block = block_of(base)
        if block not in copies:
            copies[block] = base.untyped_storage().clone()
        numbers = block.nbytes // base.element_size()
        whole = torch.empty(0, dtype=base.dtype, device=base.device).set_(copies[block], 0, (numbers,), (1,))
        into[index] = reinterpret_tensor(whole, base.size(), base.stride(), int(base.storage_offset()))
