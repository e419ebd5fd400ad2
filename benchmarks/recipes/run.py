"""What a recipe is given: how many steps, where, which way, at which size. It times the steps that it is told of."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, TensorDataset

from benchmarks.record import write_json

WINDOWS = 20
"""So often in a run the clock waits for the device."""

T = TypeVar("T")


class Run:
    """One run, timed from the moment before its first step to the end of its last one, in windows.

    Each window is written to `progress`, so that a run that is cut has told how far it came. `options` are those of
    the library: its defaults, but for the emulation that a CPU needs.
    """

    def __init__(self, steps: int, device: str, way: str, scale: str, progress: Path) -> None:
        self.steps, self.device, self.cuda, self.full = steps, device, device == "cuda", scale == "full"
        self.ours, self.compiled, self.progress = way == "ours", way == "compile", progress
        self.options: dict[str, Any] = {} if self.cuda else {"engine": "emulated"}
        self.made, self.whole_s = 0, 0.0
        self.windows_ms: list[float] = []  # of a step
        self.losses: list[float] = []

    def start(self) -> None:
        """The loop begins."""
        self.border = self._now()

    def step(self, loss: Any = None) -> None:
        """A step has ended, with this loss, or with what this function finds; None where it is not at hand."""
        self.made += 1
        window = max(1, self.steps // WINDOWS)
        if self.made % window == 0 or self.made == self.steps:
            seconds = self._now() - self.border
            self.whole_s += seconds
            self.windows_ms.append(seconds / (self.made - window * len(self.windows_ms)) * 1e3)
            found = loss() if callable(loss) else loss
            self.losses += [] if found is None else [float(found)]
            write_json(self.progress, self.told())
            self.border = self._now()

    def told(self) -> dict[str, Any]:
        """What goes into the row."""
        last = self.windows_ms[-max(1, len(self.windows_ms) // 4) :] or [math.nan]
        return {
            "steps_made": self.made,
            "whole_s": self.whole_s,
            "last_quarter_ms": statistics.median(last),
            "windows_ms": self.windows_ms,
            "reserved_mib": torch.cuda.max_memory_reserved() >> 20 if self.cuda else None,
            "last_loss": self.losses[-1] if self.losses else None,
            "losses": self.losses,
        }

    def _now(self) -> float:
        torch.get_device_module(self.device).synchronize()
        return time.perf_counter()

    def sized(self, full: T, tiny: T) -> T:
        """What belongs to the scale of this run."""
        return full if self.full else tiny

    def loader(self, data: Any, batch_size: int, **options: Any) -> DataLoader[Any]:
        """Shuffled batches of what is in memory, from pinned memory where there is a GPU."""
        return DataLoader(data, batch_size, shuffle=True, pin_memory=self.cuda, **options)

    def batches(self, loader: Iterable[T]) -> Iterator[T]:
        """Epoch after epoch, from the start of the clock until the loop has told of all steps."""
        self.start()
        while True:
            for batch in loader:
                yield batch
                if self.made >= self.steps:
                    return


def images(count: int, size: int, classes: int = 100) -> TensorDataset:
    """Random images (3, size, size) with labels."""
    return TensorDataset(torch.randn(count, 3, size, size), torch.randint(classes, (count,)))


def texts(count: int, vocabulary: int, longest: int) -> list[Tensor]:
    """Random tokens from 5 on, each text between a quarter of `longest` and `longest`."""
    lengths = torch.randint(longest // 4, longest + 1, (count,)).tolist()
    return [torch.randint(5, vocabulary, (length,)) for length in lengths]


def padded(rows: list[Tensor]) -> dict[str, Tensor]:
    """A batch as long as its longest text, with the mask of what is no padding."""
    tokens = pad_sequence(rows, batch_first=True)
    return {"input_ids": tokens, "attention_mask": (tokens != 0).long()}
