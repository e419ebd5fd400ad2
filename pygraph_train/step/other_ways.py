"""Steps that values of their own led another way than their graph: how often they may."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass

from pygraph_train.problems import Problem

__all__ = ["OtherWays", "StepCosts"]

_SOME = 5
"""Replays that may be taken back at a line before they have to pay: they cost less than as many steps."""

_EACH = 10
"""Replays that pay for one more, where their times are not known."""

_LATEST = 32
"""So many of them in a row have to pay by themselves: what was gained long before is not spent again."""

_UNFIT = 3
"""A graph that was replayed less often than a third of that may be for the way that is seldom taken."""


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
        self._latest: dict[str, deque[int]] = {}  # replays before each of them
        self._anew: set[str] = set()

    def took(self, where: str) -> None:
        """A step went another way at this line."""
        self._others[where] += 1

    def begins_anew(self, where: str, replays: int) -> bool:
        """Whether the step should be traced once more: its graph seems to be for the way that is seldom taken.

        Args:
            replays: of all graphs that ask there.
        """
        others = self._others[where]
        if others < _UNFIT or others <= _UNFIT * replays or where in self._anew:
            return False
        self._anew.add(where)
        del self._others[where]
        self._latest.pop(where, None)
        return True

    def problem(self, where: str, replays: int, costs: StepCosts | None) -> Problem | None:
        """Why steps that ask at this line have no graph any more; None where it goes on to pay.

        Args:
            costs: None where they are not known.
        """
        others = self._others[where]
        latest = self._latest.setdefault(where, deque(maxlen=_LATEST))
        if others <= _SOME or _pay(replays, others, costs):
            latest.append(replays)
            if len(latest) < _LATEST or _pay(max(replays - latest[0], 0), _LATEST - 1, costs):
                return None
        self.left.add(where)
        times = "once" if replays == 1 else f"{replays} times"
        return Problem(
            f"a value that the step computes decides which way it takes, and {others} steps went another way than "
            f"their graph, which was replayed {times}",
            where,
            "Compute the result with tensors (torch.where), or move the decision out of the step",
        )


def _pay(replays: int, others: int, costs: StepCosts | None) -> bool:
    return replays >= _EACH * others if costs is None else costs.pay(replays, others)
