"""What a comparison of arms knows, and what every way of comparing them needs."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from typing import Any

from pygraph_train.selection.arms import NOTHING, Arm
from pygraph_train.selection.rules import Rules
from pygraph_train.selection.windows import Estimate, Switch, Window

__all__ = ["Comparison"]

_FARTHEST = 64
"""Times `Rules.look_every`, which looks are apart at most."""

_NO_HOPE = 0.1
"""Of what trials may take: for an arm of which no window was faster than the best arm."""


_OF_THE_TRAINING = frozenset(("_estimate", "_steps_left", "_decided", "_comes_back", "_windows", "_present"))
"""Attributes that hold, or lead to, what is trained."""


class Comparison:
    """Arms, what is known of them, and decisions.

    Args:
        arms: legal arms, the one to begin with first.
        rules: see `Rules`.
        estimate: what is known of an arm, given the best arm so far and its time in seconds.
        steps_left: training steps still to come; None when unknown: then as many as were made so far, the
            rule of whoever rents skis for an unknown number of days, looked at again when they have doubled.
        decided: called after each decision.
        comes_back: seconds that it takes to come back from an arm to the best one, whose graphs would make way for it,
            or the other way round; None where the graphs of both stay.
    """

    def __init__(
        self,
        arms: Sequence[Arm],
        *,
        rules: Rules | None = None,
        estimate: Callable[[Arm, Arm, float], Estimate] = lambda arm, best, seconds: Estimate(),
        steps_left: Callable[[], float | None] = lambda: None,
        decided: Callable[[Switch], None] = lambda switch: None,
        comes_back: Callable[[Arm, Arm], float | None] = lambda best, arm: None,
    ) -> None:
        if not arms:
            raise ValueError("a controller needs an arm")
        self.rules = rules or Rules()
        self.best = arms[0]
        self.steps = 0
        self.exploration_steps = 0
        self.history: list[Switch] = []
        self.times: dict[Arm, float] = {}
        """Seconds a step of each arm that was measured, at the last look."""
        self.verdicts: dict[Arm, str] = {}
        """Per arm, why it is kept or not."""
        self.settled = False
        self.was_settled = False
        """Whether one comparison has ended: `best` holds for others while the question is open again."""
        self._arms = list(arms)
        self._estimate = estimate
        self._steps_left = steps_left
        self._decided = decided
        self._comes_back = comes_back
        self._reopen: str | None = None
        self._why = ""
        self._too_dear: set[Arm] = set()
        self._lost: dict[Arm, float] = {}  # and the best time then
        self._losses = Counter[Arm]()
        self._fastest: dict[Arm, float] = {}  # windows of arms that were measured in a row
        self._beside: dict[Arm, float] = {}  # what the other arm took when this one was compared with it
        self._due = math.inf  # in steps, when one of them may pay
        self._again = 0.0  # seconds of captures for plans that had lost
        self._most = _FARTHEST * self.rules.look_every
        self._windows = self._run()
        self._present: Window | None = None

    def __getstate__(self) -> dict[str, Any]:
        """What was found out. A copy cannot go on to compare."""
        return {name: value for name, value in vars(self).items() if name not in _OF_THE_TRAINING}

    def next_window(self) -> Window:
        """The next window. Call it when the steps of the last one were made."""
        if self._present is not None:
            self.steps += self._present.steps
            if self._present.exploring:
                self.exploration_steps += self._present.steps
        self._present = next(self._windows)
        return self._present

    def _run(self) -> Generator[Window, None, None]:
        """All windows, one after the other."""
        raise NotImplementedError

    def _one_window(self, arm: Arm, steps: int | None = None) -> Generator[Window, None, Window]:
        steps = steps or self.rules.window
        window = Window(arm, steps, steps - 1)
        yield window
        if window.problem is not None:
            self._drop(arm, window.problem)
        return window

    def _drop(self, arm: Arm, why: str) -> None:
        """This arm cannot be run any more."""
        self._arms = [a for a in self._arms if a != arm] or [Arm(NOTHING)]
        self.verdicts[arm] = why
        self.times.pop(arm, None)
        if self.best == arm:
            self._choose(self._arms[0], why)
            self._reopen = why

    def _hopeless(self, arm: Arm, best: float, *, first: bool) -> str | None:
        """Why an arm is not even tried, None when it is."""
        known, back = self._estimate(arm, self.best, best), self._comes_back(self.best, arm)
        left = self._steps_left()
        steps = max(self.steps, 1) if left is None else left
        likely = known.least if known.likely is None else known.likely
        seen = 0.0 if known.seen is None or not first else known.seen  # what was seen long ago is stale
        once = known.one_time + (0.0 if first or back is None else back)
        if once and arm in self.times:
            likely = self.times[arm]
        because = f" ({known.why})" if known.why else ""
        if known.least >= best * (1 - self.rules.min_gain):
            return f"not tried: at least {known.least * 1e3:.3g} ms{because}"
        if seen > best * (self.rules.warmup_slack if back is None else self.rules.slack_apart):
            return f"not tried: {seen * 1e3:.3g} ms in warm-up{because}"
        gain = max(0.0, best - likely)
        if best <= self._lost.get(arm, 0.0) * (1 + self.rules.drift):
            gain = 0.0  # it was no faster, whatever noise has made of its time
        if once > gain * steps and not self._is_cheap(arm, once, best):
            self._wait_for(arm, once, gain)
            return f"not tried: {once:.3g} s would not pay in {max(steps, 0):.0f} steps{because}"
        return None

    def _is_not_tried(self, arm: Arm, why: str) -> None:
        """Note why, unless it was tried before: then that says more."""
        if arm not in self.times or arm not in self.verdicts:
            self.verdicts[arm] = why

    def _is_cheap(self, arm: Arm, seconds: float, best: float) -> bool:
        """Whether another trial of an arm that was measured takes a small part of the run, whatever it finds."""
        left = self._steps_left()
        steps = self.steps if left is None else min(self.steps, left)
        return arm in self.times and self._again + seconds <= self._share(arm, best) * steps * best

    def _share(self, arm: Arm, best: float) -> float:
        """The part of the run that further trials of an arm may take.

        Its fastest window shows what could be gained at most, if the others were disturbed. Where the best arm has
        become faster since then, all of them were, and some arms more than others. Each trial that has found the
        same makes the next one rarer.
        """
        rules, could_gain = self.rules, 1 - self._fastest.get(arm, best) / best
        all_disturbed = best < self._beside.get(arm, 0.0) * (1 - rules.drift)
        share = max(rules.again, rules.again_of_gain * could_gain)
        if could_gain < rules.min_gain and not all_disturbed:
            share *= _NO_HOPE
        return share / 2 ** max(0, self._losses[arm] - 1)

    def _choose(self, arm: Arm, why: str) -> None:
        before, self.best = self.best, arm
        if before != arm or not self.history:
            self.history.append(Switch(self.steps, arm, before, why))
            self._decided(self.history[-1])
        self.verdicts[arm] = f"kept: {why}"

    def _price(self, arm: Arm) -> float:
        """Seconds that graphs of an arm cost once more."""
        return self._estimate(arm, self.best, self.times[self.best]).one_time

    def _wait_for(self, arm: Arm, price: float, gain: float) -> None:
        """Try an arm later, when the steps that were made could have paid for it, or a trial is cheap."""
        self._too_dear.add(arm)
        if self._steps_left() is not None:
            return
        if gain > 0:
            self._due = min(self._due, price / gain)
        if arm in self.times:
            best = self.times[self.best]
            self._due = min(self._due, (self._again + price) / (self._share(arm, best) * best))
