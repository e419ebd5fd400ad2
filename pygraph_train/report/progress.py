"""How much of the training ran from graphs: what is counted for each step, and the figures that are made of it."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from functools import cache

from pygraph_train.plans import NOTHING, Phase, Plan

RECENT = 16
"""The plan that runs is the most frequent one of so many steps."""

_MOST_ROWS = 6
"""Of steps in a row, which are kept: with changing shapes there are thousands of them."""

_ALL = tuple(Phase)


@cache
def _is_whole(plan: Plan, updated: bool | None) -> bool:
    phases = 2 + (updated is not False)
    return plan.graphs[:phases] == _ALL[:phases]


@dataclass
class Progress:
    """The steps that were made, each with what of it ran from graphs.

    A step is one call of the step function, or one batch of a Trainer: a micro-batch is a step too, and it has no
    optimizer. In a loop that the user wrote a step is everything up to the end of an optimizer step.

    Attributes:
        steps: that began.
        ended: how many steps ran so, by (what ran from graphs, whether the step had an optimizer step). A step that
            was made outside of the library's hands, or that raised, is not in it.
        whole: the first and the last of steps in a row of which everything ran from graphs, as far as they are kept.
        recent: the plans of the last steps that had an optimizer step, or of the last steps where none had.
    """

    steps: int = 0
    ended: Counter[tuple[Plan, bool | None]] = field(default_factory=Counter)
    whole: list[list[int]] = field(default_factory=list)
    recent: deque[Plan] = field(default_factory=lambda: deque(maxlen=RECENT))
    _updated: bool = False

    def step_ended(self, plan: Plan, *, updated: bool | None) -> None:
        """Count a step. Hot path.

        Args:
            plan: what of it ran from graphs.
            updated: whether it had an optimizer step; None where nobody knows: it had none if a later step has one.
        """
        self.ended[plan, updated] += 1
        if _is_whole(plan, updated):
            if self.whole and self.whole[-1][1] == self.steps - 1:
                self.whole[-1][1] = self.steps
            elif len(self.whole) < _MOST_ROWS:
                self.whole.append([self.steps, self.steps])
        if updated and not self._updated:
            self._updated = True
            self.recent.clear()
        if updated or not self._updated:
            self.recent.append(plan)

    @property
    def with_optimizer(self) -> int:
        """Steps that had an optimizer step. Where nothing is known of a step, it had one."""
        without = (False, None) if self._updated else (False,)
        return self.steps - sum(count for (_, updated), count in self.ended.items() if updated in without)

    @property
    def has_optimizer(self) -> bool:
        """Whether any step had an optimizer step, or nothing is known of the steps."""
        return not self.ended or any(updated is not False for _, updated in self.ended)

    @property
    def from_graphs(self) -> int:
        """Steps of which everything ran from graphs: forward, backward, and the optimizer where it had one."""
        return sum(count for (plan, updated), count in self.ended.items() if _is_whole(plan, updated))

    def others(self) -> str:
        """Which steps are not `from_graphs`, in words: "" where all or none of them are."""
        if not self.whole:
            return ""
        known = self.steps if sum(b - a + 1 for a, b in self.whole) == self.from_graphs else self.whole[-1][1]
        edges = [0, *(edge for ends in self.whole for edge in ends), known + 1]
        rows = [(a + 1, b - 1) for a, b in zip(edges[::2], edges[1::2], strict=True) if b - a > 1]
        later = self.steps - self.from_graphs - sum(b - a + 1 for a, b in rows)
        told = [f"{a}-{b}" if a < b else str(a) for a, b in rows]
        if rows and rows[0][0] == 1:
            told[0] += " (warm-up and recordings)"
        return ", ".join([*told, *([f"and {later} later ones"] if later else [])])

    def phase(self, phase: Phase) -> int:
        """Steps of which this phase ran from a graph."""
        return sum(count for (plan, _), count in self.ended.items() if phase in plan.graphs)

    @property
    def plan(self) -> Plan:
        """What the last steps ran from: in a short run the later half of them."""
        latest = [*self.recent][0 if len(self.recent) == RECENT else len(self.recent) // 2 :]
        return max(reversed(latest), key=latest.count, default=NOTHING)
