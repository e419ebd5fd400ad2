"""How much of the training ran from graphs: what is counted for each step, and the figures that are made of it."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from pygraph_train.plans import NOTHING, Phase, Plan

__all__ = ["RECENT", "Progress"]

RECENT = 16
"""The plan that runs is the most frequent one of so many steps."""


@dataclass
class Progress:
    """The steps that were made, each with what of it ran from graphs.

    A step is one call of the step function, or one batch of a Trainer: a micro-batch is a step too, and it has no
    optimizer. In a loop that the user wrote a step is everything up to the end of an optimizer step.

    Attributes:
        steps: that began.
        elsewhere: of these, steps that somebody else counts.
        ended: how many steps ran so, by (what ran from graphs, whether the step had an optimizer step). A step that
            was made outside of the library's hands, or that raised, is not in it.
        recent: the plans of the last steps that had an optimizer step, or of the last steps where none had.
    """

    steps: int = 0
    elsewhere: int = 0
    ended: Counter[tuple[Plan, bool]] = field(default_factory=Counter)
    recent: deque[Plan] = field(default_factory=lambda: deque(maxlen=RECENT))
    _updated: bool = False

    def step_ended(self, plan: Plan, *, updated: bool) -> None:
        """Count a step. Hot path.

        Args:
            plan: what of it ran from graphs.
            updated: whether it had an optimizer step.
        """
        self.ended[plan, updated] += 1
        if updated and not self._updated:
            self._updated = True
            self.recent.clear()
        if updated or not self._updated:
            self.recent.append(plan)

    @property
    def made(self) -> int:
        """Steps that are counted here and nowhere else."""
        return self.steps - self.elsewhere

    @property
    def with_optimizer(self) -> int:
        """Steps that had an optimizer step. Where nothing is known of a step, it had one."""
        return self.made - sum(count for (_, updated), count in self.ended.items() if not updated)

    @property
    def has_optimizer(self) -> bool:
        """Whether any step had an optimizer step, or nothing is known of the steps."""
        return not self.ended or any(updated for _, updated in self.ended)

    @property
    def from_graphs(self) -> int:
        """Steps of which everything ran from graphs: forward, backward, and the optimizer where it had one."""
        return sum(
            count
            for (plan, updated), count in self.ended.items()
            if all(phase in plan.graphs for phase in Phase if updated or phase is not Phase.OPTIMIZER)
        )

    def phase(self, phase: Phase) -> int:
        """Steps of which this phase ran from a graph."""
        return sum(count for (plan, _), count in self.ended.items() if phase in plan.graphs)

    @property
    def plan(self) -> Plan:
        """What the last steps ran from."""
        return max(reversed(self.recent), key=self.recent.count, default=NOTHING)

    @classmethod
    def of(cls, parts: Iterable[Progress]) -> Progress:
        """All of these together. The plan is that of the part that made the most steps."""
        total, most = cls(), 0
        for part in parts:
            total.steps += part.steps
            total.elsewhere += part.elsewhere
            total.ended += part.ended
            if part.made > most:
                most, total.recent = part.made, part.recent
        return total
