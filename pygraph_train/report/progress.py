"""How much of the training ran from graphs: what is counted for each step, and the figures that are made of it."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from pygraph_train.selection.arms import NOTHING, Phase, Plan
from pygraph_train.selection.windows import Switch

__all__ = ["Progress"]

_RECENT = 16
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
    _ended: Counter[tuple[Plan, bool]] = field(default_factory=Counter)
    _recent: deque[Plan] = field(default_factory=lambda: deque(maxlen=_RECENT))
    _updated: bool = False
    _last: tuple[Plan, bool] | None = None
    _again: int = 0
    """How many more steps ran like the last one, not counted yet."""

    def step_ended(self, plan: Plan, *, updated: bool) -> None:
        """Count a step.

        Args:
            plan: what of it ran from graphs.
            updated: whether it had an optimizer step.
        """
        last = self._last
        if last is not None and last[0] is plan and last[1] is updated:  # hot path
            self._again += 1
            return
        self._count_again()
        self._last = plan, updated
        self._count(plan, updated)

    def decided(self, switch: Switch) -> None:
        """Another plan runs from now on: steps of the comparison that chose it say no more which one does."""
        if switch.before != switch.arm:
            recent = self.recent
            recent.clear()
            recent.extend([switch.arm.plan] * 2)  # more than the step that ends just now

    @property
    def ended(self) -> Counter[tuple[Plan, bool]]:
        """See the class."""
        self._count_again()
        return self._ended

    @property
    def recent(self) -> deque[Plan]:
        """See the class."""
        self._count_again()
        return self._recent

    def _count_again(self) -> None:
        if self._last is not None and self._again:
            again, self._again = self._again, 0
            self._count(*self._last, again)

    def _count(self, plan: Plan, updated: bool, times: int = 1) -> None:
        self._ended[plan, updated] += times
        if updated and not self._updated:
            self._updated = True
            self._recent.clear()
        if updated or not self._updated:
            self._recent.extend([plan] * min(times, _RECENT))

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
            if all(_holds(plan, phase) for phase in Phase if updated or phase is not Phase.OPTIMIZER)
        )

    def phase(self, phase: Phase) -> int:
        """Steps of which this phase ran from a graph."""
        return sum(count for (plan, _), count in self.ended.items() if _holds(plan, phase))

    @property
    def plan(self) -> Plan:
        """What the last steps ran from."""
        if not self.recent:
            return NOTHING
        counts = Counter(self.recent)
        most = max(counts.values())
        return next(plan for plan in reversed(self.recent) if counts[plan] == most)

    @classmethod
    def of(cls, parts: Iterable[Progress]) -> Progress:
        """All of these together. The plan is that of the part that made the most steps."""
        total, most = cls(), 0
        for part in parts:
            total.steps += part.steps
            total.elsewhere += part.elsewhere
            total._ended += part.ended
            if part.made > most:
                most, total._recent = part.made, part.recent
        return total


def _holds(plan: Plan, phase: Phase) -> bool:
    return any(phase in graph for graph in plan.graphs)
