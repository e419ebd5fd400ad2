"""Whether the steps of a loop run alike, or in ways that take turns: then whole steps can be compared."""

from __future__ import annotations

from collections import Counter, deque

from pygraph_train.selection.arms import Phase, Plan, graphs_apart

__all__ = ["PlansInTurn"]

_RECENT = 16
"""In so many steps each plan that takes turns has come twice, and nothing else has come."""


class PlansInTurn:
    """The plans of the last steps.

    Attributes:
        steady: steps in a row that ran alike, or as one of the plans that take turns.
        several: whether several plans take turns.
    """

    def __init__(self) -> None:
        self.several = False
        self._recent: deque[Plan] = deque(maxlen=_RECENT)
        self._alike = self._undisturbed = 0

    def add(self, plan: Plan, *, undisturbed: bool) -> bool:
        """Count a step.

        Args:
            plan: what of it ran from graphs.
            undisturbed: whether nothing happened in it that happens once.

        Returns:
            Whether it ran like the step before.
        """
        alike = undisturbed and bool(self._recent) and plan == self._recent[-1]
        self._recent.append(plan)
        self._alike = self._alike + 1 if alike else 0
        self._undisturbed = self._undisturbed + 1 if undisturbed else 0
        counts = Counter(self._recent)
        self.several = self._undisturbed >= 2 * _RECENT and len(counts) > 1 and min(counts.values()) > 1
        return alike

    @property
    def steady(self) -> int:
        """See the class."""
        return max(self._alike, self._undisturbed if self.several else 0)

    def count_anew(self) -> None:
        """Begin to count steps once more."""
        self._alike = self._undisturbed = 0

    def plan(self) -> Plan:
        """The graphs that steps have: all graphs of the plans that take turns."""
        plans = self._recent if self.several else [self._recent[-1]]
        graphs = {graph for plan in plans for graph in plan.graphs}
        return graphs_apart(*((phase,) in graphs for phase in Phase))
