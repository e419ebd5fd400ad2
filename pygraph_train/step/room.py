"""How many kinds of calls keep graphs: as many as memory has room for, or as an option says."""

from __future__ import annotations

import torch

from pygraph_train.problems import NotLegal, Problem
from pygraph_train.step.signatures import Signatures
from pygraph_train.step.training_run import TrainingRun
from pygraph_train.step.variants import Variant

__all__ = ["Room"]

_MOST = 1024
"""Kinds of calls with graphs, where memory sets no bound."""

_MOST_APART = 8
"""The same where each kind of call is traced for itself."""

_RESERVE = 0.05
"""Share of the device's memory that graphs leave to others."""

_NEARLY = 0.9
"""Of the peak: from there a step may make it higher."""

_GROWS = 1.02
"""Peaks that differ by less are the same."""


class Room:
    """Makes room for captures.

    Args:
        training, signatures: of the runner.
        alone: whether no other process captures with this one.
    """

    def __init__(self, training: TrainingRun, signatures: Signatures, *, alone: bool) -> None:
        self._alone = alone
        self._training = training
        self._signatures = signatures
        self._asked = training.config.max_signatures
        self._most = self._asked or (_MOST_APART if signatures.families is None else _MOST)
        self._growth = 0  # bytes that one capture took at most
        self._idle = 0  # bytes of graphs, after the latest capture
        self._before: int | None = None

    def is_there(self, variant: Variant | None) -> bool:
        """Whether another kind of call may have graphs, or this one. Those of one that was not used for long are
        released."""
        holders = self._holders(variant)
        if len(holders) < self._most and self._memory_is_left():
            return True
        oldest = self._unused(holders)
        if oldest is None:
            if len(holders) >= self._most and self._asked is not None:
                self._training.note(self._problem())
            return False
        self._release(oldest)
        return self._memory_is_left()

    def make(self, variant: Variant) -> None:
        """Release the least recently used captures above the bound.

        Raises:
            NotLegal: all of them were used a moment ago, and capturing again and again costs more than it gives.
        """
        holders = self._holders(variant)
        if len(holders) < self._most:
            return
        oldest = self._unused(holders)
        if oldest is None:
            raise NotLegal(self._problem())
        self._release(oldest)

    def makes_way(self, variant: Variant) -> bool:
        """Whether graphs of forward and backward make way for steps without them, as far as is known."""
        if variant.lead is not None or not self._alone or not self._training.engine.shares_memory:
            return False
        return self.is_short_beside(variant) if variant.captures else variant.makes_way

    def is_short_beside(self, variant: Variant) -> bool:
        """Whether a step without a graph, made beside the only captures that there are, needs more than ever before.

        Such a step needs about as much as lies idle after a capture: nearly all of that is the graphs'.
        """
        if any(v.captures for v in self._signatures.variants() if v is not variant):
            return False  # they would keep the memory
        memory = self._training.engine.memory()
        return memory.reserved + self._idle > _GROWS * memory.peak

    def close_holes(self) -> None:
        """Before a step without a graph beside graphs: give cached blocks back that would let memory grow.

        Steps of one shape leave blocks that those of another one may not fit.
        """
        memory = self._training.engine.memory()
        if memory.reserved >= _NEARLY * memory.peak:
            self._training.engine.trim()

    def capture_begins(self) -> None:
        """Note how much memory there is."""
        self._before = self._free()

    def capture_ended(self) -> None:
        """Note how much less there is."""
        if self._before is not None:
            self._growth = max(self._growth, self._before - (self._free() or 0))
            self._before = None
        self._idle = self._training.engine.memory().idle

    def _holders(self, but: Variant | None) -> list[Variant]:
        """Kinds of calls that have graphs, or have earned them."""
        return [v for v in self._signatures.variants() if (v.captures or v.lead) and v is not but]

    def _unused(self, holders: list[Variant]) -> Variant | None:
        """The least recently used one, if it was not used a moment ago."""
        oldest = min(holders, key=lambda v: v.last_used, default=None)
        bound = 4 * min(self._most, max(len(holders), 1))
        return None if oldest is None or self._training.step - oldest.last_used < bound else oldest

    def _release(self, oldest: Variant) -> None:
        if oldest.lead is not None:
            self._signatures.drop(oldest)
        else:
            oldest.forget_captures()
        oldest.inputs = None

    def _problem(self) -> Problem:
        return Problem(
            f"{self._most} other input signatures are in use",
            fix="Raise PyGraphConfig.max_signatures, or pad batches to fewer shapes",
        )

    def _memory_is_left(self) -> bool:
        free = self._free()
        if free is None:
            return True
        _, total = torch.cuda.mem_get_info(self._training.engine.device)
        return free - self._growth >= _RESERVE * total

    def _free(self) -> int | None:
        """Bytes that could be allocated; None where nothing is known of that."""
        device = self._training.engine.device
        if device.type != "cuda":
            return None
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
