"""What graphs of a CUDA device may do to each other's memory in a pool that they share, for the emulation.

While a graph is captured, the caching allocator gives it any block of the pool that nobody holds. Each replay writes
to these blocks again, whoever holds them by then. So a replay may overwrite everything in its pool that was made by
another capture, except what was held during the whole of its own capture. Here it does overwrite it, always.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from pygraph_train.graphs.emulated_trees import poison
from pygraph_train.torch_private.memory import storage_key, storage_use_count


@dataclass
class Footprint:
    """What a replay does to its pool.

    Attributes:
        made: storages that its capture has made.
        keeps: storages of others that it never touches.
        reads: addresses of the storages that it works on: it may overwrite these when it has read them.
    """

    made: set[int] = field(default_factory=set)
    keeps: set[int] = field(default_factory=set)
    reads: set[int] = field(default_factory=set)


class EmulatedPool:
    """Memory that captures have made and that later ones may reuse. It stays until the pool is gone, as on a device."""

    def __init__(self) -> None:
        self._blocks: dict[int, torch.Tensor] = {}  # by storage

    def held(self, taped: Iterable[torch.Tensor]) -> set[int]:
        """The storages that somebody holds: a graph of a device holds no tensor, so `taped` do not count."""
        ours = Counter(storage_key(t.untyped_storage()) for t in {id(t): t for t in taped}.values())
        return {key for key in self._blocks if storage_use_count(key) > ours[key] + 1}

    def add(self, made: list[torch.Tensor], taped: Iterable[torch.Tensor]) -> None:
        """A capture has made these storages. Those that nobody holds are the business of its replays alone.

        Args:
            made: one tensor on each; nobody else has these tensors.
            taped: see `held`.
        """
        new = {storage_key(t.untyped_storage()): t for t in made}
        made.clear()
        self._blocks |= new
        for key in new.keys() - self.held(taped):
            del self._blocks[key]

    @contextmanager
    def replaying(self, footprint: Footprint) -> Iterator[None]:
        """Around a replay: it writes wherever it may, to what it reads when it has done so."""
        self._overwrite(footprint, read=False)
        yield
        self._overwrite(footprint, read=True)

    def _overwrite(self, footprint: Footprint, *, read: bool) -> None:
        spared = footprint.made | footprint.keeps
        for key, block in self._blocks.items():
            storage = block.untyped_storage()
            if key not in spared and (storage.data_ptr() in footprint.reads) is read:
                poison(storage, block.dtype)
