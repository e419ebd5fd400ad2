"""How many bytes of tensors on the CPU are alive at once: what a peak of allocated memory is on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from torch.profiler import ProfilerActivity, profile, record_function

__all__ = ["changes_in_bytes", "peak_bytes"]

T = TypeVar("T")

_BEGINS = "the work begins"


def peak_bytes(make: Callable[[], T], work: Callable[[T], Any]) -> int:
    """The most bytes that were alive at once in `work(make())`, above those that were alive before the work.

    The profiler sees each allocation of torch's CPU allocator, also those inside of an operation. It does not see that
    something is freed which was made before the profiler began: that is what `make` is for.
    """
    before, during = changes_in_bytes(make, work)
    alive = most = start = sum(before)
    for change in during:
        alive += change
        most = max(most, alive)
    return most - start


def changes_in_bytes(make: Callable[[], T], work: Callable[[T], Any]) -> tuple[list[int], list[int]]:
    """What was allocated, and freed (less than zero), one after the other: in `make()`, and then in `work(...)`."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, acc_events=True) as told:
        made = make()
        with record_function(_BEGINS):
            pass
        work(made)
    events: Any = told.profiler
    found = [e for e in events.kineto_results.events() if e.name() in ("[memory]", _BEGINS)]
    found.sort(key=lambda e: e.start_ns())
    begin = [e.name() for e in found].index(_BEGINS)
    return [e.nbytes() for e in found[:begin]], [e.nbytes() for e in found[begin + 1 :]]
