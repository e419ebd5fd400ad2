"""Two arms, each measured in windows one after the other: to alternate would make graphs again and again.

The graphs of one arm make way for steps of the other one where memory would not hold both, and coming back costs a
capture. So the arm that runs is measured well before it is left, and it is left once. Nothing here looks at a clock.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from enum import Enum
from typing import NamedTuple

from pygraph_train.selection.rules import Rules
from pygraph_train.selection.samples import Summary, margin, surely_faster
from pygraph_train.selection.windows import Window, of_windows

__all__ = ["MOST_WINDOWS", "Known", "Outcome", "is_known_well", "known", "outcome"]

MOST_WINDOWS = 6
"""Of one arm."""

_MOST_BEFORE = 4
"""Undisturbed windows of an arm after which it is left, however noisy they are: the comparison has to end."""

_LEAST = 3
"""Windows of an arm before anything is decided: one disturbance spoils at most two of them, and two have to agree."""

_AGREEING = 2
"""Undisturbed windows of an arm that decide."""

_DISTURBED = 1.25
"""A window that took so many times as long as the fastest one of the same arm says nothing of that arm."""

_PRECISE = 0.5
"""Of the tolerance: arms that are known so well, and not told apart, are as fast as each other."""


class Outcome(Enum):
    """What windows of another arm have shown."""

    WINS = "it is faster"
    LOSES = "it is slower"
    DRAW = "they cannot be told apart"


class Known(NamedTuple):
    """What windows of one arm say.

    Attributes:
        windows: that were measured.
        quiet: of these, windows that were not disturbed.
        found: what the quiet ones say.
        fastest: the mean of the fastest one.
    """

    windows: int
    quiet: int
    found: Summary
    fastest: float = math.inf


def known(windows: Sequence[Window]) -> Known:
    """Look at windows of one arm. Of those that ended a moment ago, times may be under way."""
    means = [of_windows([w]).mean if 2 * len(w.samples) >= w.measured else math.inf for w in windows]
    fastest = min(means, default=math.inf)
    if not math.isfinite(fastest):
        return Known(0, 0, of_windows(()))
    quiet = [w for w, mean in zip(windows, means, strict=True) if mean <= _DISTURBED * fastest]
    found = of_windows(quiet)
    return Known(sum(map(math.isfinite, means)), len(quiet), found, fastest)


def is_known_well(ours: Known, made: int, rules: Rules) -> bool:
    """Whether an arm may be left.

    Args:
        made: windows of it.
    """
    if made >= 2 * _MOST_BEFORE and ours.quiet:
        return True  # it will not become clearer
    if ours.windows < _LEAST or ours.quiet < _AGREEING:
        return False
    precise = _PRECISE * rules.tolerance * ours.found.mean
    return (
        ours.quiet >= _MOST_BEFORE or margin(ours.found, ours.found, confidence=rules.confidence) <= precise
    )


def outcome(ours: Summary, other: Known, rules: Rules) -> Outcome | None:
    """What is known of another arm than the one that was left; None where one more window may tell."""
    if other.windows < _LEAST or other.quiet < _AGREEING:
        return None
    if surely_faster(other.found, ours, confidence=rules.confidence, gain=rules.min_gain):
        return Outcome.WINS
    if surely_faster(ours, other.found, confidence=rules.confidence, gain=rules.min_gain):
        return Outcome.LOSES
    precise = margin(ours, other.found, confidence=rules.confidence) <= _PRECISE * rules.tolerance * ours.mean
    return Outcome.DRAW if precise or other.quiet >= MOST_WINDOWS else None
