"""What a recipe is given: how many steps, where, which way, at which size, and a clock."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset

__all__ = ["WAYS", "Clock", "Run"]

WAYS = ("plain", "compile", "ours")
WINDOWS = 20
"""So often in a run the clock waits for the device."""

T = TypeVar("T")


@dataclass
class Clock:
    """Times a run from the moment before its first step to the end of its last one, in windows of equal length.

    Attributes:
        steps: of the run.
        cuda: whether there is a device to wait for.
        progress: where each window is written to, so that a run that is cut has told how far it came.
    """

    steps: int
    cuda: bool
    progress: Path | None = None
    made: int = 0
    windows_ms: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    whole_s: float = 0.0
    reserved_mib: int | None = None
    _border: float | None = None

    def start(self) -> None:
        """The loop begins; later calls do nothing."""
        if self._border is None:
            self._border = self._now()

    def step(self, loss: Any = None) -> bool:
        """A step has ended, with this loss where the loop has it at hand. Whether it was the last one."""
        assert self._border is not None, "a recipe calls start() first"
        self.made += 1
        window = max(1, self.steps // WINDOWS)
        if self.made <= self.steps and (self.made % window == 0 or self.made == self.steps):
            now, before = self._now(), window * len(self.windows_ms)
            self.whole_s += now - self._border
            self.windows_ms.append((now - self._border) / (self.made - before) * 1e3)
            self.losses += [] if loss is None else [float(loss)]
            self.reserved_mib = torch.cuda.max_memory_reserved() >> 20 if self.cuda else None
            if self.progress is not None:
                self.progress.write_text(json.dumps(self.told()))
            self._border = self._now()
        return self.made >= self.steps

    def told(self) -> dict[str, Any]:
        """What goes into the row."""
        last = sorted(self.windows_ms[-max(1, len(self.windows_ms) // 4) :])
        return {
            "steps_made": min(self.made, self.steps),
            "whole_s": self.whole_s,
            "last_quarter_ms": last[len(last) // 2] if last else None,
            "windows_ms": self.windows_ms,
            "reserved_mib": self.reserved_mib,
            "last_loss": self.losses[-1] if self.losses else None,
            "losses": self.losses,
        }

    def _now(self) -> float:
        if self.cuda:
            torch.cuda.synchronize()
        return time.perf_counter()


@dataclass(frozen=True)
class Run:
    """One run of a recipe.

    Attributes:
        steps: batches, or optimizer steps where the framework counts these.
        device: "cuda" or "cpu".
        way: one of `WAYS`.
        scale: "full" or "tiny".
        clock: is told of each step.
    """

    steps: int
    device: str
    way: str
    scale: str
    clock: Clock

    @property
    def ours(self) -> bool:
        """Whether the library is added."""
        return self.way == "ours"

    @property
    def compiled(self) -> bool:
        """Whether the framework's own compile switch is on."""
        return self.way == "compile"

    @property
    def cuda(self) -> bool:
        """Whether it trains on a GPU."""
        return self.device == "cuda"

    @property
    def options(self) -> dict[str, Any]:
        """Of the library: its defaults, but for the emulation that a CPU needs."""
        return {} if self.cuda else {"engine": "emulated"}

    def sized(self, full: T, tiny: T) -> T:
        """What belongs to the scale of this run."""
        return full if self.scale == "full" else tiny

    def loader(
        self, data: Dataset[Any] | Sequence[Any], batch_size: int, collate: Callable[[Any], Any] | None = None
    ) -> DataLoader[Any]:
        """Shuffled batches of what is in memory, from pinned memory where there is a GPU."""
        return DataLoader(data, batch_size, shuffle=True, collate_fn=collate, pin_memory=self.cuda)  # type: ignore[arg-type]
