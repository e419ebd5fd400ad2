"""Compares arms in alternating windows of real training steps, and keeps the fastest (SCG).

Pure logic: it never looks at a clock. The caller asks for a `Window` (run this arm for so many steps), puts the
times of the measured steps into it, and asks for the next one.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence

from pygraph_train.selection.arms import Arm
from pygraph_train.selection.leaving import Leaving
from pygraph_train.selection.rules import Rules
from pygraph_train.selection.samples import Summary, summary, surely_faster, surely_no_faster
from pygraph_train.selection.windows import Estimate, Switch, Window, of_windows

__all__ = ["Controller", "Estimate", "Rules", "Switch", "Window"]

_MORE_STEPS = "more steps"

_REFERENCES = 2
"""Looks at steps without graphs which later ones are compared with."""

_ROUNDS = 2
"""Rounds of a comparison that must agree where the best arm changes, or a graph is given up."""


class Controller(Leaving):
    """Chooses among arms while training runs.

    Args: see `Comparison`.
    """

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
            only = self._too_dear if self._reopen == _MORE_STEPS else None
            arms = [arm for arm in self._arms if only is None or arm in only]
            self._too_dear = self._too_dear.difference(arms)
            self._reopen, self.settled, self._due = None, False, math.inf
            told = self.verdicts.get(before, "")
            yield from self._explore(arms, why, first=first)
            if only is not None and self.best == before and told.startswith("kept"):
                self.verdicts[before] = told  # all others were compared before
            if self._reopen is None:
                self.settled = self.was_settled = True
                settled = first or self.best != before
                look_every = rules.look_every if settled else min(2 * look_every, self._most)
                yield from self._watch(look_every)
            if self._reopen is not None:
                why = self._why = f"after {self._reopen}"

    def _explore(self, arms: Sequence[Arm], why: str, *, first: bool) -> Generator[Window, None, None]:
        incumbent = [(yield from self._one_window(self.best))]
        while not math.isfinite(now := of_windows(incumbent).mean):  # read later, never waited for
            if self._reopen is not None:
                return
            incumbent.append((yield from self._one_window(self.best)))
        if self._reopen is not None:
            return
        self.times[self.best] = now
        # no graphs first: whatever the budget leaves undecided, it is not that
        left = sorted((arm for arm in arms if arm != self.best), key=lambda a: not a.without_graphs)
        begun, spent = self.best, 0
        while left:
            before = self.best
            budget = self.rules.exploration - spent
            apart = [arm for arm in left if self._comes_back(before, arm) is not None]
            if apart and (beside := next(self._at_hand(left, apart), None)) is not None:
                left.remove(beside)
                steps = yield from self._duel(beside, budget - self._needed(apart), first=first)
            elif apart:
                steps, judged = yield from self._leave_once(apart, incumbent, first=first, spent=spent)
                left = [arm for arm in left if arm not in judged]
            else:
                steps = yield from self._duel(left.pop(0), budget, first=first)
            spent += steps
            if self._reopen is not None:
                return
            if self.best != before:
                incumbent = []
        if self.best == begun:
            self._choose(self.best, why)

    def _duel(self, challenger: Arm, budget: int, *, first: bool) -> Generator[Window, None, int]:
        """Alternate windows of both until one is faster with confidence. Returns the steps spent on the challenger.

        One slow window decides nothing: the process may have been suspended in it, or another job may have run. Only
        a challenger without graphs is given up after one.
        """
        if (hopeless := self._hopeless(challenger, self.times[self.best], first=first)) is not None:
            self._is_not_tried(challenger, hopeless)
            return 0
        if challenger in self.times:
            self._again += self._price(challenger)
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
            one, two = (ours, other) if self._has_to_prove(challenger) else (other, ours)
            loses = surely_no_faster(one, two, confidence=rules.confidence, gain=rules.min_gain)
            wins = surely_faster(one, two, confidence=rules.confidence, gain=rules.min_gain)
            if one is ours:
                loses, wins = wins, loses
            sure = loses or wins
            enough = agreeing[0] >= _ROUNDS if wins else challenger.without_graphs or agreeing[1] >= _ROUNDS
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
        self._beside[incumbent], self._beside[challenger] = other.mean, ours.mean
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
        return challenger.without_graphs and self.best.update_alone

    def _is_safer(self, challenger: Arm, ours: Summary, other: Summary, *, enough: bool) -> bool:
        """Whether no graphs are better than a plan that is not proved to be faster."""
        rules = self.rules
        if self._has_to_prove(challenger):
            return not surely_faster(ours, other, confidence=rules.confidence, gain=rules.min_gain)
        return enough and challenger.without_graphs and other.mean < ours.mean * (1 - rules.tolerance)

    def _watch(self, look_every: int) -> Generator[Window, None, None]:
        """Short looks at the chosen arm, until something has changed for good."""
        reference, strikes, began = self.times[self.best], 0, max(self.steps, 1)
        # the loop's own optimizer makes the updates from here on, with other kernels than in the comparison
        first = [] if self.best.without_graphs else [reference]
        while self._reopen is None:
            until = self._due - self.steps
            steps = math.ceil(min(until, look_every)) if until > 0 else look_every
            window = Window(self.best, max(self.rules.window, steps), self.rules.window, skipped=0)
            yield window
            if window.problem is not None:
                self._drop(self.best, window.problem)
                return
            now = summary(window.samples).mean
            if math.isfinite(now):
                self.times[self.best] = now
                if self.best.without_graphs and len(first) < _REFERENCES:
                    first.append(now)
                    reference = min(first)  # disturbances only make steps longer
                change = now / reference - 1
                beyond = 0 if abs(change) <= self.rules.drift else (1 if change > 0 else -1)
                strikes = strikes + beyond if strikes * beyond > 0 else beyond
                if self.best.without_graphs:  # such looks cost what nothing else of these steps costs
                    look_every = self.rules.look_every if beyond else min(2 * look_every, self._most)
                if -strikes >= self.rules.patience and not (
                    self.best.without_graphs or self.best.update_alone
                ):
                    reference, strikes = now, 0  # the comparison was disturbed, or the device has less to do
                elif abs(strikes) >= self.rules.patience:
                    self._reopen = self._reopen or f"a drift of {change:+.0%} in the time of {self.best}"
            again = self._steps_left() is None or not self._too_dear.isdisjoint(self.times)
            if self._too_dear and again and self.steps >= min(2 * began, self._due):
                self._reopen = self._reopen or _MORE_STEPS

    # -- pieces -------------------------------------------------------------------------------------

    def _agreed(
        self, rounds: Sequence[tuple[Window, Sequence[Window]]]
    ) -> tuple[Summary, Summary, tuple[int, int]]:
        """What was measured: of the incumbent, of the challenger, and in how many rounds each was slower."""
        a, b = (
            of_windows([window for _, mine in rounds for window in mine]),
            of_windows([window for window, _ in rounds]),
        )
        apart = [of_windows(windows).mean for window, mine in rounds for windows in (mine, [window])]
        pairs = [pair for pair in zip(apart[::2], apart[1::2], strict=True) if math.isfinite(sum(pair))]
        slower = sum(there < here for here, there in pairs)
        return a, b, (slower, len(pairs) - slower)
