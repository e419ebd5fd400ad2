"""What graphs of a CUDA device may do to each other's memory in a pool that they share, on the emulated engine.

While a graph is captured, the caching allocator gives it any block of the pool that nobody holds. Each replay writes
to these blocks again, whoever holds them by then. So a replay may overwrite everything in its pool that was made by
another capture, except what was held during the whole of its own capture. Here it does overwrite it, always.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import pytest
import torch

from pygraph_train.graphs import emulated
from pygraph_train.graphs.emulated import EmulatedEngine, EmulatedGraph
from pygraph_train.graphs.emulated_trees import poison
from pygraph_train.patches import standing_in
from pygraph_train.torch_private.memory import storage_key


def replays_overwrite(patch: pytest.MonkeyPatch) -> None:
    """Let each replay of the emulated engine overwrite what it may."""
    capture, replay, undo = EmulatedEngine._capture, EmulatedGraph.replay, emulated._Tape.undo

    @contextmanager
    def scratch_pool(self: Any, pool: Any = None) -> Iterator[_Pool]:
        with standing_in([(self, "_pool", pool or _Pool())]):
            yield self._pool

    def captured(self: Any, fn: Callable[[], Any]) -> Any:
        pool = vars(self).setdefault("_pool", _Pool())
        held = pool.held(_taped(self))
        graph, result = capture(self, fn)
        vars(self).setdefault("_graphs", WeakSet()).add(graph)
        graph._footprint = pool.add(graph, held, list(_taped(self)))
        return graph, result

    def replayed(self: Any) -> None:
        footprint: _Footprint = self._footprint
        footprint.overwrite(read=False)
        replay(self)
        footprint.overwrite(read=True)

    def undone(self: Any) -> None:
        undo(self)
        self._external.clear()
        self._created.clear()  # the tape holds no memory any more

    patch.setattr(EmulatedEngine, "scratch_pool", scratch_pool)
    patch.setattr(EmulatedEngine, "_capture", captured)
    patch.setattr(EmulatedGraph, "replay", replayed)
    patch.setattr(emulated._Tape, "undo", undone)


def _taped(engine: Any) -> Iterator[torch.Tensor]:
    """The tensors that graphs hold: those of a device hold none."""
    return (
        t for graph in list(vars(engine).get("_graphs", ())) for o in graph._operations for t in o.tensors()
    )


@dataclass
class _Footprint:
    """What a replay does to its pool.

    Attributes:
        spared: storages that its capture has made, and those of others that it never touches.
        reads: addresses of the storages that it works on: it overwrites these when it has read them.
    """

    pool: _Pool
    spared: set[int]
    reads: set[int]

    def overwrite(self, *, read: bool) -> None:
        for key, block in self.pool.blocks.items():
            storage = block.untyped_storage()
            if key not in self.spared and (storage.data_ptr() in self.reads) is read:
                poison(storage, block.dtype)


class _Pool:
    """Memory that captures have made and that later ones may reuse. It stays until the pool is gone, as on a device."""

    def __init__(self) -> None:
        self.blocks: dict[int, torch.Tensor] = {}  # by storage

    def held(self, taped: Iterable[torch.Tensor]) -> set[int]:
        """The storages that somebody holds, other than a graph."""
        ours = Counter(storage_key(t.untyped_storage()) for t in {id(t): t for t in taped}.values())
        return {key for key in self.blocks if torch._C._storage_Use_Count(key) > ours[key] + 1}

    def add(self, graph: Any, held: set[int], taped: list[torch.Tensor]) -> _Footprint:
        """A graph was captured. What it has made and nobody holds is the business of its replays alone.

        Args:
            graph: just captured.
            held: before its capture.
            taped: see `held`.
        """
        reads = {t.untyped_storage().data_ptr() for o in graph._operations for t in o.tensors()}
        keeps = held & self.held(taped)
        with torch.inference_mode(False):
            new = {
                storage_key(made.untyped_storage()): torch.empty(0, dtype=made.dtype).set_(
                    made.untyped_storage()
                )
                for operation in graph._operations
                for _, made in operation.results
            }
        self.blocks |= new
        for key in new.keys() - self.held(taped):
            del self.blocks[key]
        return _Footprint(self, keeps | new.keys(), reads)
