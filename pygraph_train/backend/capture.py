"""One captured region: which inputs must be where, and where its outputs come from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from pygraph_train.backend.arena import Block, Occupant, block_of
from pygraph_train.graphs import Graph
from pygraph_train.torch_internals import reinterpret_tensor

__all__ = ["RegionCapture", "copy_geometry", "static_like"]


class RegionCapture:
    """A graph of one region for one set of shapes and addresses.

    Args:
        graph: reads and writes the addresses below.
        captured_inputs: the inputs during the capture.
        copied: inputs that were replaced by fixed buffers during the capture.
        mutated: inputs that the region writes to.
        result: what the region returned during the capture.
        in_place: output indices that may be handed out where the graph writes them.
        reusable: of those, the ones whose tensor object may be handed out again and again.
        keeps: see `arena.Occupant`.
        pool: see `arena.Occupant`.
        consumes: outputs of another graph that this one reads and frees.
    """

    def __init__(
        self,
        graph: Graph,
        captured_inputs: Sequence[Any],
        copied: dict[int, torch.Tensor],
        mutated: frozenset[int],
        result: Sequence[Any],
        in_place: frozenset[int],
        reusable: frozenset[int],
        keeps: frozenset[Block],
        pool: int,
        consumes: Occupant | None,
    ) -> None:
        self.graph = graph
        self.consumes = consumes
        self.copied = tuple(copied.items())
        self.copied_bytes = sum(t.nbytes for t in copied.values())
        self._write_back = tuple((i, copied[i]) for i in sorted(mutated & copied.keys()))
        self.fixed = tuple(
            i for i, t in enumerate(captured_inputs) if isinstance(t, torch.Tensor) and i not in copied
        )
        self.addresses = [captured_inputs[i].data_ptr() for i in self.fixed]
        self._sort_outputs(captured_inputs, copied, result, in_place, reusable, keeps, pool)

    def _sort_outputs(
        self,
        inputs: Sequence[Any],
        copied: dict[int, torch.Tensor],
        result: Sequence[Any],
        in_place: frozenset[int],
        reusable: frozenset[int],
        keeps: frozenset[Block],
        pool: int,
    ) -> None:
        same_object = {id(t): i for i, t in enumerate(inputs) if isinstance(t, torch.Tensor)}
        same_memory = {block_of(inputs[i]): i for i in self.fixed}
        buffers = {block_of(t) for t in copied.values()}
        self._template: list[Any] = [None] * len(result)
        self._passed: list[tuple[int, int]] = []
        self._viewed: list[tuple[int, int, Any]] = []
        self._copies: list[tuple[int, torch.Tensor]] = []
        self._aliases: list[int] = []
        tensors: dict[int, torch.Tensor] = {}
        for index, output in enumerate(result):
            if not isinstance(output, torch.Tensor):
                self._template[index] = output
                continue
            source = same_object.get(id(output))
            owner = same_memory.get(block_of(output))
            if source in self.fixed:
                self._passed.append((index, source))
            elif owner is not None and inputs[owner].dtype == output.dtype:
                offset = output.storage_offset() - inputs[owner].storage_offset()
                self._viewed.append((index, owner, (tuple(output.size()), tuple(output.stride()), offset)))
            elif index in in_place:
                tensors[index] = output
                if index in reusable:
                    self._template[index] = output
                else:
                    self._aliases.append(index)
            else:
                self._copies.append((index, output))
        self._shared = _sharing(self._copies)
        # Reusable outputs live and die together: one alias tells for all of them.
        self._aliases += [i for i in tensors if i in reusable][:1]
        in_buffers = frozenset(i for i, t in tensors.items() if block_of(t) in buffers)
        self.occupant = Occupant(tensors, in_buffers, list(self._aliases), keeps, pool)
        self._reusable = reusable
        self._owned = True

    def _follow_occupant(self) -> None:
        """The memory went back to the pool: hand out tensors that do not own it."""
        self._owned = self.occupant.owned
        for index, tensor in self.occupant.tensors.items():
            if index in self._reusable:
                self._template[index] = tensor

    def fits(self, inputs: Sequence[Any]) -> bool:
        """Whether every input that the graph reads in place is where it was."""
        return [inputs[i].data_ptr() for i in self.fixed] == self.addresses

    def replay(self, inputs: list[Any]) -> list[Any]:
        """Run the graph on `inputs` (emptied as soon as possible) and return the region's outputs."""
        for i, buffer in self.copied:
            copy_geometry(buffer, inputs[i])
        if self._owned is not self.occupant.owned:
            self._follow_occupant()
        outputs = self._template.copy()
        for index, source in self._passed:
            outputs[index] = inputs[source]
        for index, source, geometry in self._viewed:
            outputs[index] = reinterpret_tensor(inputs[source], *geometry)
        written = [(inputs[i], buffer) for i, buffer in self._write_back]
        inputs.clear()
        self.graph.replay()
        for target, buffer in written:
            copy_geometry(target, buffer)
        tensors = self.occupant.tensors
        for index in self._aliases:
            outputs[index] = tensors[index].detach()
        if self._shared:
            self._copy_shared(outputs)
        else:
            for index, base in self._copies:
                outputs[index] = base.clone()
        return outputs

    def _copy_shared(self, outputs: list[Any]) -> None:
        copies: dict[Block, torch.Tensor] = {}
        for index, base in self._copies:
            block = block_of(base)
            if block not in copies:
                copies[block] = torch.empty(0, dtype=torch.uint8, device=base.device).set_(
                    base.untyped_storage().clone()
                )
            whole = torch.empty(0, dtype=base.dtype, device=base.device).set_(
                copies[block].untyped_storage(), 0, (block.nbytes // base.element_size(),), (1,)
            )
            outputs[index] = reinterpret_tensor(whole, base.size(), base.stride(), int(base.storage_offset()))

    def close(self) -> None:
        """Release the graph."""
        self.graph.close()


def _sharing(outputs: list[tuple[int, torch.Tensor]]) -> bool:
    """Whether outputs overlap each other or themselves: then a plain clone would change what they are."""
    blocks = [block_of(t) for _, t in outputs]
    return len(set(blocks)) < len(blocks) or any(not _dense(t) for _, t in outputs)


def _dense(tensor: torch.Tensor) -> bool:
    """Whether the elements fill their memory without gaps or overlaps, in some order of dimensions."""
    expected = 1
    for stride, size in sorted((s, n) for n, s in zip(tensor.size(), tensor.stride(), strict=True) if n > 1):
        if stride != expected:
            return False
        expected *= size
    return True


def static_like(tensor: torch.Tensor) -> torch.Tensor:
    """A buffer with the same geometry (also where strides overlap)."""
    return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def copy_geometry(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy between tensors of equal geometry, also where their elements overlap."""
    if _dense(target):
        target.copy_(source)
    else:
        _span(target).copy_(_span(source))


def _span(tensor: torch.Tensor) -> torch.Tensor:
    """The memory from the first to the last element as one dimension."""
    extent = sum((n - 1) * s for n, s in zip(tensor.size(), tensor.stride(), strict=True)) + 1
    return tensor.as_strided((extent if tensor.numel() else 0,), (1,))
