"""How long Inductor will take, before it was asked once, and whether that is worth it."""

from __future__ import annotations

__all__ = [
    "COMPILE_SECONDS",
    "compile_seconds",
    "saved_by_compiling",
    "steps_until_compiling_pays",
]

COMPILE_SECONDS = 120.0
"""For a step of unknown size: twice what a medium model takes."""

_SECONDS = 5.0
_SECONDS_PER_OPERATION = 0.04
"""Compilations of whole steps took 3 to 12 s for 180 operations on the device, 17 to 23 s for 800 to 1,200, 38 s for
900 of a network of convolutions, and 18 to 49 s for 1,540: hosts with 16 cores, cold caches, `compile_seconds` in
benchmarks/results. This line lies above them."""

_SAVES = 1 / 3
"""The share of a step that Inductor usually saves."""


def saved_by_compiling(seconds: float, *, steps: int, left: float | None) -> float:
    """What compiled steps are expected to save: it has to be more than compiling costs.

    Args:
        seconds: of a step without Inductor.
        steps: made so far.
        left: steps still to come. None where that is unknown: then as many as were made.
    """
    return seconds * _SAVES * (steps if left is None else left)


def steps_until_compiling_pays(seconds: float, price: float) -> int:
    """So many steps have to be made first, where it is unknown how many are to come.

    Args:
        seconds: of a step without Inductor.
        price: of compiling, in seconds.
    """
    return int(price / (seconds * _SAVES)) + 1


def compile_seconds(operations: int | None) -> float:
    """What compiling a step is taken to cost.

    Args:
        operations: of the step on the device, with eager kernels; None where that is not known.
    """
    if operations is None:
        return COMPILE_SECONDS
    return min(COMPILE_SECONDS, _SECONDS + _SECONDS_PER_OPERATION * operations)
