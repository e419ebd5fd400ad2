"""Step times of one arm, and whether two of them differ by more than noise."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

__all__ = ["Summary", "margin", "summary", "surely_faster", "surely_no_faster"]

_TRIM = 0.25
"""Share of the samples left out at each end: a garbage collection or a page fault is no property of a plan."""


@dataclass(frozen=True)
class Summary:
    """A trimmed mean and how well it is known.

    Attributes:
        mean: trimmed mean, in the unit of the samples.
        error: its standard error, infinite for fewer than two samples.
        freedom: degrees of freedom of the error.
    """

    mean: float
    error: float
    freedom: float


def summary(samples: Sequence[float]) -> Summary:
    """Trimmed mean and its standard error from the winsorized variance (Yuen 1974).

    Args:
        samples: in any order; none gives an infinite mean.
    """
    ordered = sorted(samples)
    count = len(ordered)
    if not count:
        return Summary(math.inf, math.inf, 1.0)
    cut = int(count * _TRIM)
    kept = ordered[cut : count - cut]
    mean = sum(kept) / len(kept)
    if len(kept) < 2:
        return Summary(mean, math.inf, 1.0)
    winsorized = [kept[0]] * cut + kept + [kept[-1]] * cut
    center = sum(winsorized) / count
    variance = sum((x - center) ** 2 for x in winsorized) / (len(kept) * (len(kept) - 1))
    return Summary(mean, math.sqrt(variance), len(kept) - 1)


def surely_faster(fast: Summary, slow: Summary, *, confidence: float, gain: float = 0.0) -> bool:
    """Whether `fast` takes less than `(1 - gain)` of `slow`'s time, at this one-sided confidence."""
    wanted = slow.mean * (1 - gain)
    if not fast.mean < wanted or not math.isfinite(fast.mean):
        return False
    if math.isinf(slow.mean):
        return True
    error = math.hypot(fast.error, slow.error * (1 - gain))
    return fast.mean + _student(confidence, min(fast.freedom, slow.freedom)) * error < wanted


def surely_no_faster(one: Summary, other: Summary, *, confidence: float, gain: float) -> bool:
    """Whether `one` takes more than `(1 - gain)` of `other`'s time, at this one-sided confidence."""
    wanted = other.mean * (1 - gain)
    error = math.hypot(one.error, other.error * (1 - gain))
    return one.mean - _student(confidence, min(one.freedom, other.freedom)) * error > wanted


def margin(one: Summary, other: Summary, *, confidence: float) -> float:
    """By how much the difference of two means may be wrong, at this one-sided confidence."""
    error = math.hypot(one.error, other.error)
    return _student(confidence, min(one.freedom, other.freedom)) * error


def _student(confidence: float, freedom: float) -> float:
    """Quantile of Student's t (Cornish-Fisher expansion, exact enough from two degrees of freedom on)."""
    z = NormalDist().inv_cdf(confidence)
    first = (z**3 + z) / 4
    second = (5 * z**5 + 16 * z**3 + 3 * z) / 96
    return z + first / freedom + second / freedom**2
