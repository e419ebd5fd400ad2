"""What the comparison of plans is made of: windows of steps, what is known before them, and what follows from them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from pygraph_train.selection.arms import Arm
from pygraph_train.selection.samples import Summary, summary

__all__ = ["Estimate", "Switch", "Window", "of_windows"]


@dataclass(frozen=True)
class Estimate:
    """What is known of an arm before it is tried. Seconds.

    Attributes:
        least: no step of it can be shorter (the launch-bound estimate).
        likely: what a step of it probably takes; None when there is no telling.
        seen: the shortest such step of the warm-up, None when there was none.
        one_time: what trying it costs once: capture, compilation.
        why: words for the report.
    """

    least: float = 0.0
    likely: float | None = None
    seen: float | None = None
    one_time: float = 0.0
    why: str = ""


@dataclass
class Window:
    """Run `arm` for `steps` steps; skip the first `skipped`, measure the `measured` that follow.

    Attributes:
        samples: seconds of measured steps, in any order; a late one may still come while the next window runs.
        problem: why the arm could not be run; set by the caller, who may then ask for the next window at once.
    """

    arm: Arm
    steps: int
    measured: int
    skipped: int = 1
    exploring: bool = False
    samples: list[float] = field(default_factory=list)
    problem: str | None = None


@dataclass(frozen=True)
class Switch:
    """A decision.

    Attributes:
        step: steps made before it.
        arm: what runs from now on.
        before: what ran before.
        why: one sentence.
    """

    step: int
    arm: Arm
    before: Arm
    why: str


def of_windows(windows: Sequence[Window]) -> Summary:
    """All samples of these windows together."""
    return summary([sample for window in windows for sample in window.samples])
