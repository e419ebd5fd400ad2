"""What windows in turns tell of a mode: its ratio over another one, and whether the ratio is below what twins show.

A twin is a second process of a plain contender. Both run the same code, so the ratio of their windows is noise: of
addresses, of processors, of whatever else differs from process to process.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

__all__ = [
    "ALLOWED",
    "KINDS",
    "TWIN",
    "Times",
    "is_below_noise",
    "limit_of",
    "median_ratio",
    "noise_of",
    "paired",
    "spread_of_twins",
    "surely",
    "times_of",
]

Row = dict[str, Any]
Times = Mapping[str, Sequence[float]]

ALLOWED = 0.98
"""No mode of the library may be slower than this."""
TWIN = " twin"
"""Ends the name of the mode of a twin."""
LEVEL = 0.02
"""How often a coin may land on one side so often as windows have to be on one side of a limit."""
TELLING = 0.9
"""The share of twins that deviate no more than the noise of a run."""
KINDS = ("windows_ms", "long_ms", "again_ms")
"""Windows of the first screening, longer ones, and those that were made again beside a twin."""


def paired(times: Times, mode: str, other: str) -> list[float]:
    """How many times faster a mode is than another one, in windows that were made in the same rounds."""
    ours, theirs = times.get(mode), times.get(other)
    return [b / a for a, b in zip(ours, theirs, strict=True)] if ours and theirs else []


def median_ratio(row: Row, mode: str, other: str) -> float | None:
    """The median over all longer windows in which both were measured; where there are none, over the short ones."""
    short, *longer = (paired(times_of(row, kind), mode, other) for kind in KINDS)
    ratios = [ratio for found in longer for ratio in found] or short
    return statistics.median(ratios) if ratios else None


def times_of(row: Row, kind: str) -> dict[str, list[float]]:
    """The windows of one kind of all modes that have them."""
    return {mode: found[kind] for mode, found in row["modes"].items() if found.get(kind)}


def noise_of(row: Row) -> dict[str, float]:
    """How many times faster each twin was than its original."""
    times = times_of(row, "again_ms")
    twins = {mode.removesuffix(TWIN): mode for mode in times if mode.endswith(TWIN)}
    return {
        mode: statistics.median(paired(times, twin, mode)) for mode, twin in twins.items() if mode in times
    }


def limit_of(times: Times, other: str, spread: float) -> float | None:
    """What a mode has to be below that is slower than twins of the other one; None where no twin was measured.

    Args:
        times: of windows that were made beside a twin.
        spread: of the other twins of the run.
    """
    ratios = paired(times, other + TWIN, other)
    if not ratios:
        return None
    ratio = statistics.median(ratios)
    return ALLOWED / max(ratio, 1 / ratio, spread)


def spread_of_twins(rows: Iterable[Row]) -> float:
    """What nine of ten twins of the run stay within; 1 where there are none.

    One twin is one draw: a mode that is as fast as its twin would look slower than it in one case of four.
    """
    spreads = [max(ratio, 1 / ratio) for row in rows for ratio in noise_of(row).values()]
    return sorted(spreads)[math.ceil(TELLING * len(spreads)) - 1] if spreads else 1.0


def surely(on_one_side: Iterable[bool]) -> bool:
    """The sign test: whether so many windows are on one side that a coin would seldom fall so."""
    sides = list(on_one_side)
    count = len(sides)
    tail = sum(math.comb(count, k) for k in range(sum(sides), count + 1)) / 2**count
    return tail <= LEVEL


def is_below_noise(times: Times, mode: str, other: str, spread: float) -> bool | None:
    """Whether a mode is below 0.98 by more than twins differ, in windows that were made beside a twin.

    Args:
        times: of these windows.
        spread: of the other twins of the run.

    Returns:
        None where no twin of the other mode was measured.
    """
    limit, ratios = limit_of(times, other, spread), paired(times, mode, other)
    if limit is None or not ratios:
        return None
    return surely(ratio < limit for ratio in ratios)
