"""What a training run has measured of itself, for decisions; the report gets the same and is never asked."""

from __future__ import annotations

from dataclasses import dataclass, field

from pygraph_train.selection.arms import Arm
from pygraph_train.selection.timing import StepTime

__all__ = ["Times"]


@dataclass
class Times:
    """Seconds.

    Attributes:
        ungraphed: of the latest step of the warm-up, 0 before the first one.
        phases: the shortest time of each phase in the warm-up, by "F", "B" and "O".
        compiling: of everything compiled so far.
        latest: the last measured step of each arm.
    """

    ungraphed: float = 0.0
    phases: dict[str, float] = field(default_factory=dict)
    compiling: float = 0.0
    latest: dict[Arm, StepTime] = field(default_factory=dict)
