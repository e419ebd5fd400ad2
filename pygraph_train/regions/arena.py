"""Who may still read memory that a graph replay would overwrite.

The graphs of one device share a pool: a backward reuses the memory of the activations that it has
consumed, and the next forward reuses that of dead gradients, as the caching allocator would have
arranged it without graphs. The price is one question before each replay: is everything that this graph
may overwrite dead? A graph may overwrite any block of its pool except those that were allocated during
the whole of its capture (`Occupant.keeps`). Gradients that are alive during the next forward (Lightning empties
them after it) come from a pool of their own, as do the graphs that write them.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import count
from operator import attrgetter, eq
from sys import getrefcount
from typing import Any

import torch

from pygraph_train.graphs import Engine
from pygraph_train.regions.blocks import Block, block_of
from pygraph_train.regions.pool_room import PoolRoom
from pygraph_train.torch_private.cuda import current_cuda_stream
from pygraph_train.torch_private.hooks import gradient_hooks
from pygraph_train.torch_private.memory import (
    borrow_memory,
    cached_tensors,
    keep_cached_tensors,
    storage_key,
    storage_use_count,
    tensor_use_count,
    uncached_tensors,
)

__all__ = ["Arena", "Block", "Occupant", "block_of"]

_requires_grad = attrgetter("requires_grad")
_has_hooks = gradient_hooks  # a dictionary, when there were any

_WORTH_GIVING_BACK = 128 << 20
"""Bytes of leftovers. Where fewer were given back, a model of 280 MiB needed 10 MiB more (H100)."""


class Occupant:
    """The outputs of one captured graph that are handed out in place, without a copy.

    Args:
        tensors: by output index; tensors with fixed addresses.
        buffers: of those, the ones in input buffers, which belong to this graph alone and not to the pool.
        together: of those, what a forward saves: nobody changes it, and it lives and dies together, so
            that one of them tells for all.
        keeps: blocks that were allocated during the whole capture: its replays leave them alone.
        pool: number of the pool that the capture allocated from.
        visible: these are what the user sees of a forward: every run hands out objects of its own.
        returned: of those, what an autograd function returns: an object that lasts would hold the autograd graph
            of a step until the next one.

    Attributes:
        handed: by output index, the tensor objects to hand out, the same ones in every run: making
            hundreds of new ones would take the host longer than the rest of a replay.
        sentinel: the output of which every run gets an object of its own, if one tells for all.
        single: the outputs of which every run gets objects of its own.
        mark: what other graphs know these outputs by, while the graph of these is open.
        left_alone: marks of outputs of other graphs that replays leave alone, as far as it was asked.
    """

    def __init__(
        self,
        tensors: dict[int, torch.Tensor],
        buffers: frozenset[int],
        together: frozenset[int],
        keeps: frozenset[Block],
        pool: int,
        visible: bool = False,
        returned: frozenset[int] = frozenset(),
    ) -> None:
        self.tensors = tensors
        self.visible = visible
        self._returned = [i for i in tensors if i in returned]
        self.keeps = keeps
        self.pool = pool
        self.mark = object()
        self.left_alone: set[object] = set()
        self.owned = True
        self._owner: Callable[[], object] = lambda: None
        self._watch_all = False  # hooks may keep some of what is saved and replace others
        self.on_change: Callable[[], None] | None = None
        self.blocks = frozenset(block_of(t) for i, t in tensors.items() if i not in buffers)
        self.buffers = buffers
        self.together = together
        self.sentinel = next((i for i in tensors if i in together), None)
        self._forget: Callable[[], object] = int
        self._hand_out()

    @property
    def owner(self) -> object:
        """The region that captured it, while there is one."""
        return self._owner()

    @owner.setter
    def owner(self, region: object) -> None:
        self._owner = weakref.ref(region)

    def _hand_out(self) -> None:
        self._forget()
        lasting = {} if self.visible else {i: t for i, t in self.tensors.items() if i not in self._returned}
        self.handed = {i: t if i in self.together else t.detach() for i, t in lasting.items()}
        saved = [i for i in self.tensors if i in self.together]
        self.single = [*self._returned, *(saved if self._watch_all else saved[:1])]
        watched = [t for i, t in self.tensors.items() if i not in self.together or i in self.single]
        self._objects = [t for i, t in self.handed.items() if i not in self.together]  # none of the visible
        self._sizes = list(map(torch.Tensor.size, self._objects))
        self._strides = list(map(torch.Tensor.stride, self._objects))
        self._own_references = 0
        # autograd must not take our own reference for a reason to copy a gradient instead of keeping it
        cached_tensors(self._objects)
        self._forget = weakref.finalize(self, uncached_tensors, self._objects)
        if self.on_change is not None:
            self.on_change()  # lets go of the objects of before, so that they are not counted
            self._own_references = self._references()
        self._wrappers = list(
            {storage_key(t.untyped_storage()): t.untyped_storage() for t in watched}.values()
        )
        self._storages = list(map(storage_key, self._wrappers))
        # how many references are our own: more than that, and somebody holds an alias
        self._own_counts = self._counts()

    def alive(self) -> bool:
        """Whether anyone but this graph still holds an output of its last replay."""
        if self._counts() != self._own_counts:
            return True
        if not self._own_references:  # it never ran
            return False
        # holders in C++ count separately
        held = sum(map(tensor_use_count, self._objects)) > len(self._objects)
        return held or self._references() > self._own_references

    @contextmanager
    def recounting(self) -> Iterator[None]:
        """Context in which our own references to the memory come or go, and those of others do not."""
        held = [n - own for n, own in zip(self._counts(), self._own_counts, strict=True)]
        references = self._references() - self._own_references
        yield
        self._own_counts = [n - others for n, others in zip(self._counts(), held, strict=True)]
        if self._own_references:
            self._own_references = self._references() - references

    def _counts(self) -> list[int]:
        # who holds nothing but the Python object of a storage does not show in its count
        return [*map(storage_use_count, self._storages), *map(getrefcount, self._wrappers)]

    def _kinds_of_counts(self) -> list[tuple[str, int]]:
        return [("uses", s) for s in self._storages] + [("references", s) for s in self._storages]

    def _held_by_others(self) -> dict[tuple[str, int], int]:
        both = zip(self._kinds_of_counts(), self._counts(), self._own_counts, strict=True)
        return {kind: n - own for kind, n, own in both}

    def _references(self) -> int:
        return sum(map(getrefcount, self._objects))

    def tidy(self, hooks: bool = False) -> None:
        """Before a replay, when nobody holds an output: take back what users did to the objects.

        Args:
            hooks: somebody gets what is saved by this run, and may keep a part of it.
        """
        if hooks and not self._watch_all and self.sentinel is not None:
            self._watch_all = True
            self._hand_out()
        if not self._objects:
            return
        keep_cached_tensors()
        if not self._own_references:  # counted before the first run
            self._own_references = self._references()
        touched = any(map(_requires_grad, self._objects)) or any(map(_has_hooks, self._objects))
        if touched or self._reshaped():
            self._hand_out()

    def _reshaped(self) -> bool:
        # one by one: lists of so many new tuples would call the garbage collector in every step
        same = all(map(eq, map(torch.Tensor.size, self._objects), self._sizes))
        return not (same and all(map(eq, map(torch.Tensor.stride, self._objects), self._strides)))

    def in_use_by(self, storages: set[int]) -> bool:
        """Whether one of these storages (their `_cdata`) is the memory of an output of this graph."""
        return any(storage_key(t.untyped_storage()) in storages for t in self.tensors.values())

    def disown(self) -> None:
        """Give the memory back to the pool for later captures; replays go on writing to it."""
        if self.owned:
            self.owned = False
            others = self._held_by_others()
            self.tensors = {
                index: t if index in self.buffers else borrow_memory(t) for index, t in self.tensors.items()
            }
            self._hand_out()
            # buffers stay the same, and what others hold of them is not our own
            held = [others.get(kind, 0) for kind in self._kinds_of_counts()]
            self._own_counts = [n - m for n, m in zip(self._own_counts, held, strict=True)]


class Arena:
    """All captured memory of one engine, and the lock under which its graphs run.

    Args:
        engine: makes the graphs.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.room = PoolRoom(engine)
        self.lock = threading.RLock()
        self._pools = {False: 0, True: 1}
        self._numbers = count(2)
        self._retired: list[tuple[int, Callable[[], None]]] = []  # old pools, and what lets go of them
        self._occupants: list[Occupant] = []
        self._active: list[Occupant] = []  # replayed, and not seen dead since
        self._stream: int | None = None
        self._used = False  # something was captured since memory was given back
        self.abandoned: list[Any] = []  # captures of regions that are gone
        self.price = 0.0
        """Seconds of a capture, of whatever region, as far as known."""

    def paid(self, seconds: float) -> None:
        """Note what a capture took."""
        self.price = (self.price + seconds) / 2 if self.price else seconds

    def sweep(self) -> None:
        """Close the graphs of regions that nobody can call any more."""
        while self.abandoned:
            for key in self.abandoned.pop().values():
                for capture in key.captures:
                    self.remove(capture.occupants)
                    capture.close()
                key.captures = []

    def give_back_leftovers(self) -> None:
        """Steps with eager kernels and what Inductor tried out have left blocks that do not fit the kernels to come."""
        if not self.engine.capturing() and self.engine.memory().idle >= _WORTH_GIVING_BACK:
            self.engine.trim()

    def give_back_unused(self) -> None:
        """Close the graphs of regions that are gone. When no graph is left, the pools go as well.

        Memory in which somebody still holds an output stays until a later call.
        """
        if not self.lock.acquire(blocking=False):
            return  # another thread runs a region
        try:
            if self.engine.capturing():
                return
            self.sweep()
            self._active = [occupant for occupant in self._active if occupant.alive()]
            if self._used and not self._occupants:
                self._used = False
                for lasting in self._pools:
                    with self.allocating(lasting):
                        self._renew(lasting)
            self._release_pools()
        finally:
            self.lock.release()

    def _renew(self, lasting: bool) -> int:
        """Later captures allocate from a new pool. Call it within `allocating`."""
        self._retired.append((self._pools[lasting], self.engine.fresh_pool()))
        self._pools[lasting] = number = next(self._numbers)
        return number

    def in_the_way(self, occupants: tuple[Occupant, ...], consumed: Occupant | None) -> list[Occupant]:
        """Whose outputs, still in use, a replay would overwrite.

        Args:
            occupants: outputs of the graph that is to run; it keeps the same for all of them.
            consumed: outputs of another graph that this one reads, and that nobody reads again.
        """
        if self._retired:
            self._active = [other for other in self._active if other is consumed or other.alive()]
            self._release_pools()
        asking = occupants[0]
        left_alone = asking.left_alone
        blocking = []
        for other in [o for o in self._active if o.mark not in left_alone and o is not consumed]:
            if not other.alive():
                self._active.remove(other)
            elif other in occupants or not self._spares(asking, other):
                blocking.append(other)
            elif other in self._occupants:
                left_alone.add(other.mark)
        return blocking

    def _spares(self, occupant: Occupant, other: Occupant) -> bool:
        if not self.engine.shares_memory or other.pool != occupant.pool:
            return True
        return other.blocks <= occupant.keeps

    def ran(self, occupants: tuple[Occupant, ...], consumed: Occupant | None) -> None:
        """Note a replay: its outputs are in use until they are seen dead; what it consumed is dead."""
        self._active = [o for o in self._active if o not in occupants and o is not consumed]
        self._active += [o for o in occupants if o.tensors]

    def pool(self, lasting: bool) -> int:
        """Number of the pool that captures allocate from.

        Args:
            lasting: of the second one, for what has to outlive replays of everything in the first.
        """
        return self._pools[lasting]

    def allocating(self, lasting: bool) -> AbstractContextManager[None]:
        """Context for captures that allocate from that pool."""
        return self.engine.other_pool() if lasting else nullcontext()

    def before_capture(self, consumed: Occupant | None, lasting: bool) -> frozenset[Block]:
        """Make room for a capture, within `allocating`.

        Memory of dead outputs goes back to the pool, as does that of `consumed`, which the captured work
        frees as it goes. Where something alive is not owned, the pool would hand out its memory: a new
        pool then.

        Returns:
            The blocks that stay allocated during the whole capture.
        """
        self._used = True
        if not self.engine.shares_memory:
            return frozenset()
        # lets go of what closed graphs left, in memory that the capture may take
        self._active = [o for o in self._active if o is consumed or o.alive()]
        self._release_pools()
        pool = self._pools[lasting]
        for occupant in self._occupants:
            if occupant.pool == pool and (occupant is consumed or not occupant.alive()):
                occupant.disown()
        if any(not o.owned and o is not consumed and o.pool == pool for o in self._active):
            pool = self._renew(lasting)
        # also those of closed graphs whose outputs somebody still holds
        holders = {id(o): o for o in (*self._occupants, *self._active)}.values()
        return frozenset(b for o in holders if o.owned and o.pool == pool for b in o.blocks)

    def _release_pools(self) -> None:
        """Let go of pools without graphs. Their memory is not safe while somebody holds what they do not own."""
        used = {o.pool for o in (*self._occupants, *self._active)}
        for retired in [r for r in self._retired if r[0] not in used]:
            self._retired.remove(retired)
            retired[1]()

    def add(self, occupants: tuple[Occupant, ...]) -> None:
        self._occupants += occupants

    def remove(self, occupants: tuple[Occupant, ...]) -> None:
        """The graph was closed. What it handed out stays guarded until it is dead."""
        self._occupants = [o for o in self._occupants if o not in occupants]
        for occupant in occupants:
            occupant.mark = object()  # whoever leaves it alone lets go of it all the same, when it is dead

    def owners(self) -> set[object]:
        """The regions of all open graphs."""
        return {occupant.owner for occupant in self._occupants}

    def producer(self, tensor: torch.Tensor) -> Occupant | None:
        """The outputs, handed out in place by a graph that is still open, in whose memory a tensor lies."""
        block = block_of(tensor)
        return next((o for o in reversed(self._active) if block in o.blocks and self.produces(o)), None)

    def produces(self, occupant: Occupant | None) -> bool:
        """Whether the graph of this occupant is still open."""
        return occupant in self._occupants

    def follow_stream(self) -> None:
        """Let the current stream wait for the one that ran the last graph, when they differ."""
        if self.engine.device.type != "cuda":
            return
        stream = current_cuda_stream(self.engine.device.index)
        if stream != self._stream:
            if self._stream is not None:
                last = torch.cuda.ExternalStream(self._stream, self.engine.device)
                torch.cuda.current_stream(self.engine.device).wait_stream(last)
            self._stream = stream
