"""Capture the work of a region, with its moving inputs in buffers or at addresses that can be rewritten."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from pygraph_train.graphs import Engine, Graph
from pygraph_train.graphs.engine import CaptureError, IndirectGraph, IndirectionUnavailable
from pygraph_train.graphs.memory import copy_elsewhere, fingerprints, span
from pygraph_train.graphs.prove import poison, prove
from pygraph_train.regions.arena import Occupant
from pygraph_train.regions.blocks import block_of
from pygraph_train.torch_private.dispatch import has_no_memory
from pygraph_train.torch_private.memory import borrow_memory, storages

__all__ = ["Recorded", "record"]

Compiled = Callable[[list[Any]], Any]


@dataclass
class Recorded:
    """A captured region.

    Attributes:
        graph: not replayed yet.
        result: what the region returned.
        inputs: what stood for each input during the capture.
        buffers: by index, inputs that are copied into fixed memory before a replay.
        served: by index, position of inputs whose addresses can be rewritten (`IndirectGraph.retarget`).
        spare: by index, the buffers in which the graph reads these as long as nobody rewrote anything.
        unserved: by index, why an input that moves is copied.
        fresh: outputs that are no part of an input, also where they took the place of one that was freed.
    """

    graph: Graph
    result: Sequence[Any]
    inputs: list[Any]
    buffers: dict[int, torch.Tensor]
    served: dict[int, int] = field(default_factory=dict)
    spare: dict[int, torch.Tensor] = field(default_factory=dict)
    unserved: dict[int, str] = field(default_factory=dict)
    fresh: frozenset[int] = frozenset()


def record(
    engine: Engine,
    compiled: Compiled,
    inputs: list[Any],
    moving: Collection[int],
    settled: Collection[int],
    consumed: Occupant | None,
    mutated: Collection[int],
    prefer: Literal["device", "host"] | None,
) -> Recorded:
    """Capture `compiled(inputs)`. Nothing is executed.

    Args:
        engine: captures.
        compiled: the region; it empties the list that it is given.
        inputs: of this run. Those that lie in memory of `consumed` are replaced, in this list, by tensors
            that do not own it: the captured work frees that memory as it goes, and its own results may
            take the place. The contents stay until a replay.
        moving: inputs that will be elsewhere in other runs.
        settled: inputs that stay where they are, as far as anyone knows: the graph does not own their memory.
        consumed: what the region is the last to read.
        mutated: inputs that the region writes to.
        prefer: rewrite the addresses of moving inputs from there; None copies them into buffers.
    Raises:
        CaptureError: see `Engine.capture`.
    """
    buffers = {i: copy_elsewhere(inputs[i]) for i in moving}
    stand_in = {**buffers, **{i: borrow_memory(inputs[i]) for i in settled}}
    if prefer is None or not buffers:
        return _capture(engine, compiled, inputs, stand_in, buffers, consumed, instantiate=True)
    before = _capture_elsewhere(engine, compiled, inputs, stand_in, moving)
    recorded = _capture(engine, compiled, inputs, stand_in, buffers, consumed, instantiate=before is None)
    order = list(buffers)
    if before is None:
        recorded.unserved = dict.fromkeys(order, "the device has no memory left to capture twice")
        return recorded
    first, elsewhere = before
    try:
        indirect = engine.indirect(
            first, recorded.graph, [elsewhere[i] for i in order], [buffers[i] for i in order], prefer=prefer
        )
    except IndirectionUnavailable as unavailable:
        first.close()
        recorded.unserved = dict.fromkeys(order, str(unavailable))
        return recorded
    recorded.graph = indirect
    unproven = _unproven(engine, indirect, recorded, list(elsewhere.values()), consumed, mutated)
    for position, index in enumerate(order):
        if position in unproven:
            recorded.unserved[index] = "reading from its old address could not be ruled out"
        elif position in indirect.served:
            recorded.served[index] = position
            recorded.spare[index] = buffers.pop(index)
        else:
            recorded.unserved[index] = indirect.unserved.get(position, "no node reads it")
    return recorded


def _capture_elsewhere(
    engine: Engine,
    compiled: Compiled,
    inputs: Sequence[Any],
    stand_in: Mapping[int, torch.Tensor],
    moving: Collection[int],
) -> tuple[Graph, dict[int, torch.Tensor]] | None:
    """A graph that is never replayed, and the moving inputs that it reads; None where there is no room for them."""
    try:
        elsewhere = {i: copy_elsewhere(inputs[i]) for i in moving}
        others = {**stand_in, **elsewhere}
        with engine.scratch_pool():  # `inputs` keeps what this capture would free
            graph = engine.capture(
                lambda: compiled([others.get(i, x) for i, x in enumerate(inputs)]), instantiate=False
            )[0]
        engine.outline(graph)  # its memory would come on top of that of the graph which stays
    except torch.OutOfMemoryError:
        engine.trim()
        return None
    return graph, elsewhere


def _capture(
    engine: Engine,
    compiled: Compiled,
    inputs: list[Any],
    stand_in: dict[int, torch.Tensor],
    buffers: dict[int, torch.Tensor],
    consumed: Occupant | None,
    instantiate: bool,
) -> Recorded:
    given = [stand_in.get(i, x) for i, x in enumerate(inputs)]
    theirs = set(storages(given))
    if consumed is not None and engine.shares_memory:
        inputs[:] = [
            borrow_memory(x) if isinstance(x, torch.Tensor) and block_of(x) in consumed.blocks else x
            for x in inputs
        ]
    stood = [stand_in.get(i, x) for i, x in enumerate(inputs)]
    graph, result = engine.capture(lambda: compiled(given), instantiate=instantiate)
    for i, x in enumerate(result):
        if isinstance(x, torch.Tensor) and (x.is_conj() or x.is_neg() or has_no_memory(x)):
            graph.close()
            what = "is zeros without memory" if has_no_memory(x) else "is conjugated or negated lazily"
            raise CaptureError(f"output {i} {what}")
    made = {i: x for i, x in enumerate(result) if isinstance(x, torch.Tensor)}
    fresh = frozenset(i for i, x in made.items() if theirs.isdisjoint(storages([x])))
    return Recorded(graph, list(result), stood, buffers, fresh=fresh)


class _Repeatable:
    """Replays again and again: what a replay writes to, of what it reads, is put back first.

    Args:
        graph: replays.
        written: what it reads and writes.
        room: bytes that copies may take on the device.
    """

    def __init__(self, graph: IndirectGraph, written: Sequence[torch.Tensor], room: int) -> None:
        self.served = graph.served
        self.retarget = graph.retarget
        self._graph = graph
        on_device = sum(t.nbytes for t in written) <= room
        self._written = [
            (t, copy_elsewhere(t) if on_device else span(t.detach()).to("cpu", copy=True)) for t in written
        ]

    def replay(self) -> None:
        self.put_back()
        self._graph.replay()

    def put_back(self) -> None:
        for tensor, values in self._written:
            span(tensor).copy_(span(values))  # the values may be on the host


def _unproven(
    engine: Engine,
    graph: IndirectGraph,
    recorded: Recorded,
    elsewhere: Sequence[torch.Tensor],
    consumed: Occupant | None,
    mutated: Collection[int],
) -> frozenset[int]:
    """Served inputs that experiments with poisoned memory do not clear of stale pointers.

    Neither the memory of this capture may be read after its pointers were moved, nor that of the other
    capture (`elsewhere`) at any time.
    """
    buffers = recorded.buffers
    tensors = {i: x for i, x in enumerate(recorded.inputs) if isinstance(x, torch.Tensor)}
    mine = consumed.blocks if consumed is not None else frozenset()
    written = [
        x
        for i, x in tensors.items()
        if i not in buffers and x.numel() and (i in mutated or block_of(x) in mine)
    ]
    memory = engine.memory()
    repeatable = _Repeatable(graph, written, memory.peak - memory.reserved)
    own = [recorded.result[i] for i in sorted(recorded.fresh)]

    def results() -> list[torch.Tensor]:
        with torch.random.fork_rng(sorted({x.device.index for x in own if x.device.type == "cuda"})):
            repeatable.replay()
        return fingerprints(own)

    try:
        before = results()
        for tensor in elsewhere:
            poison(tensor)
        if not all(torch.equal(a, b) for a, b in zip(before, results(), strict=True)):
            return frozenset(graph.served)
        del before
        return prove(repeatable, list(buffers.values()), lambda: own)  # type: ignore[arg-type]
    except torch.OutOfMemoryError:
        return frozenset(graph.served)
    finally:
        repeatable.put_back()
