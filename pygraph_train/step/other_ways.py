"""Steps that values of their own led another way than their graph: how often they may."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from pygraph_train.problems import Problem

__all__ = ["OtherWays", "StepCosts"]

_SOME = 5
"""Replays that may be taken back at a line before they have to pay: they cost less than as many steps."""

_EACH = 10
"""Replays that pay for one more, where their times are not known."""

_UNFIT = 3
"""Graphs that were not replayed once by then may be for the way that is seldom taken."""


@dataclass(frozen=True)
class StepCosts:
    """Seconds of one kind of step.

    Attributes:
        replay: of its graph.
        plain: without any graph.
        otherwise: of the fastest way to run it without this graph.
    """

    replay: float
    plain: float
    otherwise: float

    def pay(self, replays: int, others: int) -> bool:
        """Whether a run was no slower than without this graph.

        Args:
            others: replays that were taken back. Each costs at most what a replay costs, and then a plain step.
        """
        spent = replays * self.replay + others * (self.replay + self.plain)
        return spent <= (replays + others) * self.otherwise


class OtherWays:
    """Counts them for each condition, by its line.

    Attributes:
        left: lines of conditions that decide nothing any more: steps that ask there have no graph of both.
    """

    def __init__(self) -> None:
        self.left: set[str] = set()
        self._others = Counter[str]()
        self._anew: set[str] = set()

    def took(self, where: str) -> None:
        """A step went another way at this line."""
        self._others[where] += 1

    def begins_anew(self, where: str, replays: int) -> bool:
        """Whether the step should be traced once more: its graph seems to be for the way that is seldom taken.

        Args:
            replays: of all graphs that ask there.
        """
        if replays or self._others[where] < _UNFIT or where in self._anew:
            return False
        self._anew.add(where)
        return True

    def problem(self, where: str, replays: int, costs: StepCosts | None) -> Problem | None:
        """Why steps that ask at this line have no graph any more; None where it goes on to pay.

        Args:
            costs: None where they are not known.
        """
        others = self._others[where]
        allowed = _SOME + (replays // _EACH if costs is None else 0)
        if others <= allowed or (costs is not None and costs.pay(replays, others)):
            return None
        self.left.add(where)
        times = "once" if replays == 1 else f"{replays} times"
        return Problem(
            f"a value that the step computes decides which way it takes, and {others} steps went another way than "
            f"their graph, which was replayed {times}",
            where,
            "Compute the result with tensors (torch.where), or move the decision out of the step",
        )
