"""One captured region: which inputs must be where, and where its outputs come from."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch

from pygraph_train.graphs.memory import copy_elsewhere, overlaps_itself, span
from pygraph_train.regions.arena import Occupant
from pygraph_train.regions.blocks import Block, block_of
from pygraph_train.regions.recording import Recorded
from pygraph_train.torch_private.hooks import saved_tensors_hooks_active
from pygraph_train.torch_private.memory import borrow_memory, copy_all, reinterpret_tensor

__all__ = ["Handing", "RegionCapture"]

LARGE = 1 << 20  # bytes from which an output that the user sees is not copied

_address = torch.Tensor.data_ptr


@dataclass(frozen=True)
class Handing:
    """How the outputs of a region reach its caller.

    Args:
        in_place: output indices that may be handed out where the graph writes them; others are copied.
        together: those that live and die together, and that nobody changes: what a forward saves.
        visible: what the user sees of a forward: handed out in place, as new objects, where it is large.
        returned: what goes through an autograd function: handed out as new objects.
    """

    in_place: frozenset[int]
    together: frozenset[int]
    visible: frozenset[int] = frozenset()
    returned: frozenset[int] = frozenset()


class RegionCapture:
    """A graph of one region for one set of shapes and addresses.

    Args:
        work: what was recorded. The graph reads spare buffers for the served while `pointing` is False.
        settled: inputs that are outputs of another graph, and are read where it wrote them; with all of these
            outputs. They move when that graph is captured again.
        mutated: inputs that the region writes to.
        handing: how outputs are handed out.
        keeps, pool: see `arena.Occupant`.
        source: outputs of a forward's graph that this one reads.
        spares: it leaves them alone, for another backward that reads them; else it frees them.
        watched: look at the strides of what is read in place, because no guard does.

    Attributes:
        consumes: outputs of another graph that this one reads and frees.
        producers: by settled input, a weak reference to the outputs that it was part of.
        occupants: outputs that are handed out in place; what a backward consumes of a forward comes first.
        seconds: that it took to capture, with what was tidied up before.
    """

    def __init__(
        self,
        work: Recorded,
        settled: Mapping[int, Occupant],
        mutated: frozenset[int],
        handing: Handing,
        keeps: frozenset[Block],
        pool: int,
        source: Occupant | None,
        spares: bool = False,
        watched: bool = False,
    ) -> None:
        inputs, buffers, served = work.inputs, work.buffers, work.served
        self.graph = work.graph
        self.source = source
        self.spares = spares
        self.consumes = None if spares else source
        tensors = [i for i, t in enumerate(inputs) if isinstance(t, torch.Tensor)]
        self.fixed = tuple(i for i in tensors if i not in buffers and i not in served)
        # one call in C for hundreds of parameters
        self._pick_fixed: Callable[[Sequence[Any]], Sequence[Any]] = (
            itemgetter(*self.fixed) if len(self.fixed) > 1 else lambda given: [given[i] for i in self.fixed]
        )
        self.addresses = [inputs[i].data_ptr() for i in self.fixed]
        self._laid_out = [i for i in self.fixed if watched and inputs[i].dim() > 1]
        self._layouts = [inputs[i].stride() for i in self._laid_out]
        self.settled = tuple(settled)
        # weak: their memory is theirs
        self.producers = {i: weakref.ref(o) for i, o in settled.items()}
        self._strides = [inputs[i].stride() for i in self.settled]
        self._served = tuple(served.items())
        self._spare = dict(work.spare)
        self.pointing = not work.spare
        self.served_at = [inputs[i].data_ptr() for i in served]
        self._own = dict(buffers)
        self._mutated = mutated
        self._arrange_buffers()
        self._aligned: dict[int, torch.Tensor] = {}  # copies of inputs that came misaligned
        self.patched = 0
        self.seconds = 0.0
        # nobody else may hold them: alive until they are read
        self._held: tuple[int, ...] = (*served, *self.settled)
        self._sort_outputs(work, handing, keeps, pool)

    def _arrange_buffers(self) -> None:
        buffers = self._own if self.pointing else {**self._own, **self._spare}
        self.copied_bytes = sum(t.nbytes for t in buffers.values())
        self._copied = [i for i, t in buffers.items() if t.numel()]
        self._spanned = [overlaps_itself(buffers[i]) for i in self._copied]
        self._buffers = [
            span(buffers[i]) if whole else buffers[i]
            for i, whole in zip(self._copied, self._spanned, strict=True)
        ]
        self._spans = any(self._spanned)
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
            self._held = self.settled
            self._arrange_buffers()

    def _sort_outputs(self, work: Recorded, handing: Handing, keeps: frozenset[Block], pool: int) -> None:
        inputs, buffers, result = work.inputs, work.buffers, work.result
        # inputs that the graph uses where they are; of those that share memory, what may move speaks for it
        callers = [*(i for i in self.fixed if i not in self.settled), *self._held]
        same_object = {id(inputs[i]): i for i in callers}
        same_memory = {block_of(inputs[i]): i for i in callers}
        own_buffers = {block_of(t) for t in buffers.values()}
        large = _large(result, handing.visible) - own_buffers - same_memory.keys()
        self._template: list[Any] = [None] * len(result)
        self._passed: list[tuple[int, int]] = []
        self._viewed: list[tuple[int, int, Any]] = []
        self._recast: list[tuple[int, int, Any]] = []  # views as another dtype
        self._copies: list[tuple[int, torch.Tensor]] = []
        self._repeated: list[tuple[int, int]] = []  # autograd asks whether a gradient is nobody else's
        tensors: dict[int, torch.Tensor] = {}
        visible: dict[int, torch.Tensor] = {}
        seen: dict[tuple[int, bool, bool], int] = {}
        for index, output in enumerate(result):
            if not isinstance(output, torch.Tensor):
                self._template[index] = output
                continue
            block = block_of(output)
            # what an input was may be freed by then, and an output may lie at its place
            owner = None if index in work.fresh else same_memory.get(block)
            in_place = index in handing.in_place or block in large
            kind = (id(output), in_place, index in handing.together and block not in large)
            first = seen.setdefault(kind, index)
            if first != index:
                self._repeated.append((index, first))
            elif id(output) in same_object:
                self._passed.append((index, same_object[id(output)]))
            elif owner is not None and owner in self.fixed and owner not in self.settled:
                self._template[index] = output  # its memory is where it was, or this graph does not run
            elif owner is not None and inputs[owner].dtype == output.dtype:
                offset = output.storage_offset() - inputs[owner].storage_offset()
                self._viewed.append((index, owner, (tuple(output.size()), tuple(output.stride()), offset)))
            elif owner in self.settled:
                first_byte = output.data_ptr() - inputs[owner].data_ptr()
                geometry = (output.dtype, first_byte, output.size(), output.stride())
                self._recast.append((index, owner, geometry))
            elif block in large:
                visible[index] = output
            elif not in_place:
                own = owner is None and block not in own_buffers
                # copied as soon as it was written: the pool may hand the memory on
                lent = borrow_memory(output) if own and block.nbytes >= LARGE else output
                self._copies.append((index, lent))
            else:
                tensors[index] = output
        self._shared = _share(self._copies)
        in_buffers = frozenset(i for i, t in tensors.items() if block_of(t) in own_buffers)
        self.occupant = Occupant(
            tensors, in_buffers, handing.together, keeps, pool, returned=handing.returned
        )
        self._seen = Occupant(visible, frozenset(), frozenset(), keeps, pool, visible=True)
        self.occupants = (self.occupant, self._seen) if visible else (self.occupant,)
        for occupant in self.occupants:
            occupant.on_change = self._follow_occupants
        self._follow_occupants()

    def _follow_occupants(self) -> None:
        """Hand out the tensors that the occupants have now."""
        for index, tensor in self.occupant.handed.items():
            self._template[index] = tensor
        self._visible = tuple((i, t, (t.size(), t.stride(), 0)) for i, t in self._seen.tensors.items())

    def fits(self, inputs: Sequence[Any]) -> bool:
        """Whether every input that the graph reads in place is where it was."""
        if list(map(_address, self._pick_fixed(inputs))) != self.addresses:
            return False
        if self._laid_out and self.laid_out_anew(inputs):
            return False
        return not self.settled or [inputs[i].stride() for i in self.settled] == self._strides

    def moved(self, inputs: Sequence[Any]) -> set[int]:
        """Inputs that the graph reads in place and that are elsewhere."""
        moved = {i for i, at in zip(self.fixed, self.addresses, strict=True) if inputs[i].data_ptr() != at}
        return moved | {
            i for i, s in zip(self.settled, self._strides, strict=True) if inputs[i].stride() != s
        }

    def laid_out_anew(self, inputs: Sequence[Any]) -> bool:
        """Whether something that the graph reads in place has other strides, which no guard of Dynamo's saw."""
        return [inputs[i].stride() for i in self._laid_out] != self._layouts

    def replay(self, inputs: list[Any], begins: Callable[[], None]) -> list[Any]:
        """Run the graph on `inputs` (emptied as soon as possible) and return the region's outputs.

        Args:
            begins: called just before the graph is launched.
        """
        if self._copied:
            self._fill_buffers(inputs)
        if self._served:
            self._point(inputs)
        self.occupant.tidy(saved_tensors_hooks_active())
        outputs = self._template.copy()
        for index, source in self._passed:
            outputs[index] = inputs[source]
        for index, source, geometry in self._viewed:
            outputs[index] = reinterpret_tensor(inputs[source], *geometry)
        written = [(inputs[i], buffer) for i, buffer in self._write_back]
        for index, source, geometry in self._recast:
            outputs[index] = _recast(inputs[source], *geometry)
        held = [inputs[i] for i in self._held]
        begins()
        inputs.clear()
        self.graph.replay()
        del held
        for target, buffer in written:
            if overlaps_itself(buffer):
                span(target).copy_(span(buffer))
            else:  # what lies between the elements is somebody else's
                target.copy_(buffer)
        for index in self.occupant.single:
            outputs[index] = self.occupant.tensors[index].detach()
        if self._shared:
            _copy_shared(self._copies, outputs)
        else:
            for index, base in self._copies:
                outputs[index] = base.clone()
        for index, base, geometry in self._visible:
            outputs[index] = reinterpret_tensor(base, *geometry)
        for index, first in self._repeated:
            outputs[index] = outputs[first]
        return outputs

    def _fill_buffers(self, inputs: list[Any]) -> None:
        given = [inputs[i] for i in self._copied]
        if self._spans:
            given = [span(t) if whole else t for t, whole in zip(given, self._spanned, strict=True)]
        if len(given) == 1:
            self._buffers[0].copy_(given[0])
        else:
            copy_all(self._buffers, given)

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
                changes[position] = self._aligned[position] = copy_elsewhere(tensor, aligned=True)
        graph.retarget(changes)
        before = self.served_at or [0] * len(addresses)
        self.patched = sum(a != b for a, b in zip(addresses, before, strict=True))
        self.served_at = addresses

    def close(self) -> None:
        """Release the graph. What it handed out stays guarded by the arena."""
        with ExitStack() as stack:
            for occupant in self.occupants:
                occupant.on_change = None
                stack.enter_context(occupant.recounting())
            if self.source is not None:  # the graph may hold what it read
                stack.enter_context(self.source.recounting())
            # now, while it is told from what others hold
            self._template.clear()
            self._buffers.clear()
            self._own.clear()
            self._spare.clear()
            self._write_back = ()
            self.graph.close()


def _dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill their memory without gaps or overlaps, in some order of dimensions."""
    expected = 1
    for stride, size in sorted((s, n) for n, s in zip(tensor.size(), tensor.stride(), strict=True) if n > 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _large(result: Sequence[Any], visible: frozenset[int]) -> set[Block]:
    """The memory of large outputs that the user sees."""
    tensors = {i: t for i, t in enumerate(result) if isinstance(t, torch.Tensor)}
    blocks = {block_of(t) for i, t in tensors.items() if i in visible}
    return {block for block in blocks if block.nbytes >= LARGE}


def _recast(
    tensor: torch.Tensor, dtype: torch.dtype, first_byte: int, size: Sequence[int], stride: Sequence[int]
) -> torch.Tensor:
    """A view of memory near a tensor's first element, as another type."""
    offset = (tensor.storage_offset() * tensor.element_size() + first_byte) // dtype.itemsize
    empty = torch.empty(0, dtype=dtype, device=tensor.device)
    return empty.set_(tensor.untyped_storage(), offset, size, stride)


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
