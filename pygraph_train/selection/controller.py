"""Compares arms in alternating windows of real training steps, and keeps the fastest (SCG).

Pure logic: it never looks at a clock. The caller asks for a `Window` (run this arm for so many steps), puts the
times of the measured steps into it, and asks for the next one. Every decision depends only on step counts and
on numbers that went through `agree`, so that ranks which count the same steps decide the same.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field

from pygraph_train.selection.arms import NOTHING, OPTIMIZER, Arm
from pygraph_train.selection.rules import Rules
from pygraph_train.selection.samples import Summary, summary, surely_faster, surely_no_faster

__all__ = ["Controller", "Estimate", "Rules", "Switch", "Window"]

_MORE_STEPS = "twice as many steps"
_MADE = "work beside the training"

_REFERENCES = 2
"""Looks at steps without graphs which later ones are compared with."""

_ROUNDS = 2
"""Rounds of a comparison that must agree where the best arm changes, or a graph is given up."""

_FARTHEST = 64
"""Times `Rules.look_every`, which looks are apart at most."""


@dataclass(frozen=True)
class Estimate:
    """What is known of an arm before it is tried. Seconds.

    Attributes:
        least: no step of it can be shorter (the launch-bound estimate).
        likely: what a step of it probably takes; None when there is no telling.
        seen: the shortest such step of the warm-up, None when there was none.
        one_time: what trying it costs once: capture, compilation.
        after: until it can be tried, while other arms run.
        why: words for the report.
    """

    least: float = 0.0
    likely: float | None = None
    seen: float | None = None
    one_time: float = 0.0
    after: float = 0.0
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


class Controller:
    """Chooses among arms while training runs.

    Args:
        arms: legal arms, the one to begin with first.
        rules: see `Rules`.
        estimate: what is known of an arm, given the best arm so far and its time in seconds.
        steps_left: training steps still to come; None when unknown: then as many as were made so far, the
            rule of whoever rents skis for an unknown number of days, looked at again when they have doubled.
        agree: element-wise maximum of these numbers over all ranks; every rank calls it at the same steps.
        known: time of the first arm in seconds from an earlier run: found true, it needs no exploration.
        decided: called after each decision.
        waits: whether an arm that is worth it cannot be tried yet, because what it needs is made beside the training.
            The first call has it made. Called at the ends of windows.
    """

    def __init__(
        self,
        arms: Sequence[Arm],
        *,
        rules: Rules | None = None,
        estimate: Callable[[Arm, Arm, float], Estimate] = lambda arm, best, seconds: Estimate(),
        steps_left: Callable[[], float | None] = lambda: None,
        agree: Callable[[Sequence[float]], Sequence[float]] = tuple,
        known: float | None = None,
        decided: Callable[[Switch], None] = lambda switch: None,
        waits: Callable[[Arm], bool] = lambda arm: False,
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
        self._arms = list(arms)
        self._estimate = estimate
        self._steps_left = steps_left
        self._agree = agree
        self._known = known
        self._decided = decided
        self._waits = waits
        self._waiting: set[Arm] = set()
        self._reopen: str | None = None
        self._why = ""
        self._too_dear: set[Arm] = set()
        self._windows = self._run()
        self._present: Window | None = None
        self._most = _FARTHEST * self.rules.look_every

    def next_window(self) -> Window:
        """The next window. Call it when the steps of the last one were made."""
        if self._present is not None:
            self.steps += self._present.steps
            if self._present.exploring:
                self.exploration_steps += self._present.steps
        self._present = next(self._windows)
        return self._present

    @property
    def waiting(self) -> bool:
        """Whether an arm is to be tried as soon as what it needs was made."""
        return bool(self._waiting)

    def reopen(self, why: str) -> None:
        """Something changed that times depend on: compare again from the next window on."""
        self._reopen = why

    # -- the course of things -----------------------------------------------------------------------

    def _run(self) -> Generator[Window, None, None]:
        rules = self.rules
        why, look_every = "the first choice", rules.look_every
        while True:
            before = self.best
            first = not self.history
            only = {_MORE_STEPS: self._too_dear, _MADE: self._waiting}.get(self._reopen or "")
            arms = [arm for arm in self._arms if only is None or arm in only]
            self._too_dear, self._waiting = self._too_dear.difference(arms), self._waiting.difference(arms)
            self._reopen, self.settled = None, False
            yield from self._explore(arms, why, first=first)
            if self._reopen is None:
                self.settled = True
                settled = first or self.best != before
                look_every = rules.look_every if settled else min(2 * look_every, self._most)
                yield from self._watch(look_every)
            if self._reopen is not None:
                why = self._why = f"after {self._reopen}"

    def _explore(self, arms: Sequence[Arm], why: str, *, first: bool) -> Generator[Window, None, None]:
        incumbent = [(yield from self._one_window(self.best))]
        while not math.isfinite(now := self._agree([_of(incumbent).mean])[0]):  # read later, never waited for
            if self._reopen is not None:
                return
            incumbent.append((yield from self._one_window(self.best)))
        if self._reopen is not None:
            return
        self.times[self.best] = now
        known, self._known = self._known, None
        if known is not None and abs(now / known - 1) <= self.rules.drift:
            self._choose(self.best, "the winner of an earlier run, as fast as then")
            return
        # no graphs first: whatever the budget leaves undecided, it is not that
        challengers = sorted((arm for arm in arms if arm != self.best), key=lambda a: a.plan != NOTHING)
        budget = self.rules.exploration
        for challenger in challengers:
            hopeless = self._hopeless(challenger, self.times[self.best], first=first)
            if hopeless is not None:
                self.verdicts[challenger] = hopeless
                continue
            budget -= yield from self._duel(challenger, budget)
            if self._reopen is not None:
                return
        self._choose(self.best, why)

    def _duel(self, challenger: Arm, budget: int) -> Generator[Window, None, int]:
        """Alternate windows of both until one is faster with confidence. Returns the steps spent on the challenger.

        One slow window decides nothing: the process may have been suspended in it, or another job may have run. Only
        a challenger without graphs is given up after one.
        """
        rules, spent = self.rules, 0
        rounds: list[tuple[Window, list[Window]]] = []
        ours = other = summary(())
        agreeing, sure = (0, 0), False
        for number in range(rules.rounds):
            steps = rules.probe if number == 0 or (number == 1 and sure) else rules.window
            if spent + steps > budget:
                break
            window = Window(challenger, steps, steps - 1, exploring=True)
            yield window
            spent += steps
            if window.problem is not None:
                self._drop(challenger, window.problem)
                return spent
            mine: list[Window] = []
            rounds.append((window, mine))
            while self._reopen is None:  # measurements arrive late: the incumbent goes on meanwhile
                mine.append((yield from self._one_window(self.best, steps)))
                ours, other, agreeing = self._agreed(rounds)
                if math.isfinite(ours.mean) and math.isfinite(other.mean) and sum(agreeing) == len(rounds):
                    break
            first, second = (ours, other) if self._has_to_prove(challenger) else (other, ours)
            loses = surely_no_faster(first, second, confidence=rules.confidence, gain=rules.min_gain)
            wins = surely_faster(first, second, confidence=rules.confidence, gain=rules.min_gain)
            if first is ours:
                loses, wins = wins, loses
            sure = loses or wins
            enough = agreeing[0] >= _ROUNDS if wins else challenger.plan == NOTHING or agreeing[1] >= _ROUNDS
            if self._reopen is not None or (sure and enough):
                break
        if self._reopen is not None:
            return spent
        if not rounds:
            self.verdicts[challenger] = f"not tried: {rules.exploration} steps of exploration were spent"
            return spent
        self._judge(challenger, ours, other, agreeing[0])
        return spent

    def _judge(self, challenger: Arm, ours: Summary, other: Summary, agreeing: int) -> None:
        """Choose one of the two.

        Args:
            agreeing: rounds in which the challenger was faster.
        """
        rules, incumbent = self.rules, self.best
        self.times[incumbent], self.times[challenger] = ours.mean, other.mean
        here, there = f"{ours.mean * 1e3:.3g} ms", f"{other.mean * 1e3:.3g} ms"
        enough = agreeing >= _ROUNDS
        if enough and surely_faster(other, ours, confidence=rules.confidence, gain=rules.min_gain):
            self.verdicts[incumbent] = f"{here}, and {challenger} takes {there}"
            self._choose(challenger, f"{there} against {here} of {incumbent} {self._why}".strip())
        elif self._is_safer(challenger, ours, other, enough=enough):
            self.verdicts[incumbent] = f"not proved to be faster than no graphs: {here} against {there}"
            self._choose(
                challenger,
                f"no graphs are the safe choice: {there} against {here} of {incumbent} {self._why}".strip(),
            )
        else:
            self.verdicts[challenger] = f"{there}, and {incumbent} takes {here}"

    def _has_to_prove(self, challenger: Arm) -> bool:
        """Whether the best arm has to prove that it is faster than no graphs: a graph of the update alone is small."""
        return challenger.plan == NOTHING and self.best.plan == OPTIMIZER

    def _is_safer(self, challenger: Arm, ours: Summary, other: Summary, *, enough: bool) -> bool:
        """Whether no graphs are better than a plan that is not proved to be faster."""
        rules = self.rules
        if self._has_to_prove(challenger):
            return not surely_faster(ours, other, confidence=rules.confidence, gain=rules.min_gain)
        return enough and challenger.plan == NOTHING and other.mean < ours.mean * (1 - rules.tolerance)

    def _watch(self, look_every: int) -> Generator[Window, None, None]:
        """Short looks at the chosen arm, until something has changed for good."""
        reference, strikes, began = self.times[self.best], 0, max(self.steps, 1)
        # the loop's own optimizer makes the updates from here on, with other kernels than in the comparison
        first = [] if self.best.plan == NOTHING else [reference]
        while self._reopen is None:
            window = Window(self.best, look_every, self.rules.window, skipped=0)
            yield window
            if window.problem is not None:
                self._drop(self.best, window.problem)
                return
            (now,) = self._agree([summary(window.samples).mean])
            if math.isfinite(now):
                self.times[self.best] = now
                if self.best.plan == NOTHING and len(first) < _REFERENCES:
                    first.append(now)
                    reference = min(first)  # disturbances only make steps longer
                change = now / reference - 1
                beyond = 0 if abs(change) <= self.rules.drift else (1 if change > 0 else -1)
                strikes = strikes + beyond if strikes * beyond > 0 else beyond
                if self.best.plan == NOTHING:  # such looks cost what nothing else of these steps costs
                    look_every = self.rules.look_every if beyond else min(2 * look_every, self._most)
                if -strikes >= self.rules.patience and self.best.plan not in (NOTHING, OPTIMIZER):
                    reference, strikes = now, 0  # the comparison was disturbed, or the device has less to do
                elif abs(strikes) >= self.rules.patience:
                    self._reopen = self._reopen or f"a drift of {change:+.0%} in the time of {self.best}"
            if self._waiting and not all(map(self._waits, self._waiting)):
                self._reopen = self._reopen or _MADE
            if self._too_dear and self._steps_left() is None and self.steps >= 2 * began:
                self._reopen = self._reopen or _MORE_STEPS

    # -- pieces -------------------------------------------------------------------------------------

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

    def _agreed(
        self, rounds: Sequence[tuple[Window, Sequence[Window]]]
    ) -> tuple[Summary, Summary, tuple[int, int]]:
        """What all ranks have measured: of the incumbent, of the challenger, and in how many rounds each was slower."""
        a, b = _of([window for _, mine in rounds for window in mine]), _of([window for window, _ in rounds])
        apart = [_of(windows).mean for window, mine in rounds for windows in (mine, [window])]
        numbers = self._agree([a.mean, a.error, -a.freedom, b.mean, b.error, -b.freedom, *apart])
        pairs = [pair for pair in zip(numbers[6::2], numbers[7::2], strict=True) if math.isfinite(sum(pair))]
        slower = sum(there < here for here, there in pairs)
        ours, other = (
            Summary(numbers[0], numbers[1], -numbers[2]),
            Summary(numbers[3], numbers[4], -numbers[5]),
        )
        return ours, other, (slower, len(pairs) - slower)

    def _hopeless(self, arm: Arm, best: float, *, first: bool) -> str | None:
        """Why an arm is not even tried, None when it is."""
        known = self._estimate(arm, self.best, best)
        left = self._steps_left()
        steps = (max(self.steps, 1) if left is None else left) - known.after / best
        likely = known.least if known.likely is None else known.likely
        seen = 0.0 if known.seen is None or not first else known.seen  # what was seen long ago is stale
        least, likely, earlier, one_time, steps = self._agree(
            [known.least, likely, -seen, known.one_time, float(steps)]
        )
        because = f" ({known.why})" if known.why else ""
        if least >= best * (1 - self.rules.min_gain):
            return f"not tried: at least {least * 1e3:.3g} ms{because}"
        if -earlier > best * self.rules.warmup_slack:
            return f"not tried: {-earlier * 1e3:.3g} ms in warm-up{because}"
        if one_time > max(0.0, best - likely) * steps:
            self._too_dear.add(arm)
            return f"not tried: {one_time:.3g} s would not pay in {max(steps, 0):.0f} steps{because}"
        if self._waits(arm):
            self._waiting.add(arm)
            return f"not tried yet: what it needs is made beside the training{because}"
        return None

    def _choose(self, arm: Arm, why: str) -> None:
        before, self.best = self.best, arm
        if before != arm or not self.history:
            self.history.append(Switch(self.steps, arm, before, why))
            self._decided(self.history[-1])
        self.verdicts[arm] = f"kept: {why}"


def _of(windows: Sequence[Window]) -> Summary:
    return summary([sample for window in windows for sample in window.samples])
