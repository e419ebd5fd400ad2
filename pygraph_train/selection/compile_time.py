"""How long Inductor will take, before it was asked once."""

from __future__ import annotations

__all__ = ["COMPILE_SECONDS", "COMPILE_SHARE_BESIDE", "compile_seconds"]

COMPILE_SECONDS = 120.0
"""For a step of unknown size: twice what a medium model takes."""

_SECONDS = 5.0
_SECONDS_PER_OPERATION = 0.04
"""Compilations of whole steps took 3 to 12 s for 180 operations on the device, 17 to 23 s for 800 to 1,200, 38 s for
900 of a network of convolutions, and 18 to 49 s for 1,540: hosts with 16 cores, cold caches, `compile_seconds` in
benchmarks/results. This line lies above them."""

COMPILE_SHARE_BESIDE = 1 / 4
"""What training still waits for where Inductor compiles beside it: two traces, and a look into Inductor's caches. On a
CPU with a small transformer that was a fifth to a quarter."""


def compile_seconds(operations: int | None) -> float:
    """What compiling a step is taken to cost.

    Args:
        operations: of the step on the device, with eager kernels; None where that is not known.
    """
    if operations is None:
        return COMPILE_SECONDS
    return min(COMPILE_SECONDS, _SECONDS + _SECONDS_PER_OPERATION * operations)
