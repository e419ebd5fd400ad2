"""The peak of the memory of each phase of a run: what is under way is told by functions of the library."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from benchmarks.backend_trial import MIB

__all__ = ["PHASES", "Phases"]

PHASES = (
    "before the first step",
    "plain steps",
    "preparation of the optimizer",
    "compilation",
    "capture",
    "second capture",
    "comparison",
    "audit",
    "replaying",
)
"""In the order of a table. "Plain steps" has all that no other phase has: the warm-up, and choosing between plans."""


class Phases:
    """Peaks by phase, of the process. On a CPU it only tells which phases there were.

    Each change of the phase resets the peaks of torch's allocator, so nobody else can read the peak of the run.

    Args:
        device: where the model is trained.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._under_way = ["before the first step"]
        self.peaks: dict[str, dict[str, int]] = {}
        self.free: int | None = None
        if self._cuda:
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()

    def note(self) -> None:
        """The phase that is under way has had this peak until now."""
        found = self.peaks.setdefault(self._under_way[-1], {})
        if self._cuda:
            torch.cuda.synchronize()
            read = {"reserved": torch.cuda.max_memory_reserved, "allocated": torch.cuda.max_memory_allocated}
            for kind, peak in read.items():
                found[f"{kind}_mib"] = max(found.get(f"{kind}_mib", 0), round(peak() / MIB))
            torch.cuda.reset_peak_memory_stats()

    def go_on(self, phase: str) -> None:
        """From now on the run is in this phase, where nothing else is under way."""
        self.note()
        self._under_way[0] = phase

    @contextmanager
    def within(self, phase: str) -> Iterator[None]:
        """Inside, this is under way. Of the same phase inside of itself there is one."""
        self.note()
        self._under_way.append(phase)
        try:
            yield
        finally:
            self.note()
            self._under_way.pop()

    def most(self, kind: str, phases: tuple[str, ...] = PHASES) -> int | None:
        """The largest peak of some phases, in MiB; None where there was none, or no GPU."""
        return max((self.peaks[p][f"{kind}_mib"] for p in phases if self.peaks.get(p)), default=None)

    def watch(self) -> None:
        """Let the library's functions tell what is under way, for the rest of the process."""
        from pygraph_train.graphs import cuda, emulated
        from pygraph_train.optimizers.preparation import OptimizerPreparation
        from pygraph_train.regions import recording
        from pygraph_train.step.capture_maker import CaptureMaker
        from pygraph_train.step.capturing import Capturing
        from pygraph_train.step.comparing import Comparing

        self._tells(OptimizerPreparation, "settle", "preparation of the optimizer")
        self._tells(Capturing, "compiled", "compilation")
        self._tells(cuda.CudaEngine, "capture", "capture")
        self._tells(emulated.EmulatedEngine, "capture", "capture")
        self._tells(recording, "_capture_elsewhere", "second capture")
        self._tells(CaptureMaker, "reference", "comparison")
        self._tells(Comparing, "__call__", _kind_of_comparison)

    def _tells(self, owner: Any, name: str, phase: str | Callable[..., str]) -> None:
        function = getattr(owner, name)

        @functools.wraps(function)
        def told(*args: Any, **kwargs: Any) -> Any:
            now = phase if isinstance(phase, str) else phase(*args, **kwargs)
            if self._under_way[-1] in ("second capture", "audit") and now != "preparation of the optimizer":
                return function(*args, **kwargs)  # a part of it
            with self.within(now):
                return function(*args, **kwargs)

        setattr(owner, name, told)


def _kind_of_comparison(comparing: Any, step: Any, variant: Any, capture: Any, *_: Any) -> str:
    return "audit" if capture.verified else "comparison"
