"""How much faster forward and backward are from graphs."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

__all__ = ["RUNS", "gain_of"]

RUNS = 5
"""Timed runs of each way; one more goes before them."""

_NO_DEVICE = "What graphs would gain was not measured: there is no CUDA device."


def gain_of(plain: Callable[[], object], graphed: Callable[[], object], device: torch.device) -> str:
    """A sentence about the time of forward and backward.

    Args:
        plain, graphed: run them without graphs, and from the graphs that there are already.
        device: of the model.
    """
    if device.type != "cuda":
        return _NO_DEVICE
    before, after = _seconds(plain), _seconds(graphed)
    return (
        f"Forward and backward took {before * 1e3:.2f} ms without graphs and {after * 1e3:.2f} ms with them, on the "
        f"average of {RUNS} runs. What a graph of the update saves was not measured."
    )


def _seconds(run: Callable[[], object]) -> float:
    run()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(RUNS):
        run()
    torch.cuda.synchronize()
    return (time.perf_counter() - started) / RUNS
