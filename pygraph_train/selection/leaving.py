"""Trying arms that graphs of the best one make way for: it is left once, when it is known well."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Sequence

from pygraph_train.selection.arms import Arm
from pygraph_train.selection.comparison import Comparison
from pygraph_train.selection.in_a_row import MOST_WINDOWS, Outcome, is_known_well, known, outcome
from pygraph_train.selection.samples import Summary
from pygraph_train.selection.windows import Window, of_windows

__all__ = ["Leaving"]

_NO_DIFFERENCE = ": no difference beyond the noise"


class Leaving(Comparison):
    """A comparison in which arms are measured one after the other where to alternate would cost captures.

    Args: see `Comparison`.
    """

    def _leave_once(
        self, challengers: Sequence[Arm], incumbent: list[Window], *, first: bool, spent: int
    ) -> Generator[Window, None, tuple[int, set[Arm]]]:
        """Try arms that graphs make way for, one after the other, and come back at most once.

        Args:
            incumbent: windows of the best arm so far; more are added.
            spent: steps on other arms so far.
        Returns:
            The steps that were spent, and the arms of which something is known now. Where another arm was chosen, the
            rest can be compared with that one.
        """
        before, judged, home, ours = spent, set[Arm](), self.best, None
        for challenger in challengers:
            judged.add(challenger)
            hopeless = self._hopeless(challenger, self.times[home], first=first)
            if hopeless is not None:
                self._is_not_tried(challenger, hopeless)
                continue
            if ours is None:
                ours = yield from self._known_well(home, incumbent)
                if ours is None:
                    break
            if not first:
                self._again += self._price(challenger) + (self._comes_back(home, challenger) or 0.0)
            most = self.rules.exploration - spent
            steps, found, other = yield from self._in_a_row(challenger, ours, most)
            spent += steps
            if self._reopen is not None:
                break
            if found is None:
                continue
            self.times[challenger] = other.mean
            self._beside[home], self._beside[challenger] = other.mean, ours.mean
            if self._is_chosen(challenger, ours, other, found):
                break
            if self._stays_away(challenger):
                if not home.plan.forward_backward:
                    break  # the update's graph alone may be faster than regions
                for rest in set(challengers) - judged:
                    self.verdicts[rest] = (
                        f"not tried: {home} is faster than {challenger}, and is to come back"
                    )
                return spent - before, set(challengers)
        return spent - before, judged

    def _at_hand(self, arms: Sequence[Arm], apart: Sequence[Arm]) -> Iterator[Arm]:
        """Arms for which no graph makes way, and that cost nothing once: they come before the best one is left."""
        return (arm for arm in arms if arm not in apart and self._price(arm) == 0)

    def _needed(self, apart: Sequence[Arm]) -> int:
        """Steps that are kept for arms that graphs make way for: it is not no graphs that stays undecided."""
        rules = self.rules
        most = rules.probe + (MOST_WINDOWS - 1) * rules.window
        return most if any(arm.without_graphs for arm in apart) else 0

    def _known_well(self, arm: Arm, windows: list[Window]) -> Generator[Window, None, Summary | None]:
        """Windows of the best arm, until it can be left. They are steps like all others."""
        while self._reopen is None:
            ours, every = known(windows[-MOST_WINDOWS:]), known(windows)
            if is_known_well(ours, len(windows), self.rules):
                self.times[arm], self._fastest[arm] = ours.found.mean, every.fastest
                return ours.found
            windows.append((yield from self._one_window(arm)))
        return None

    def _in_a_row(
        self, challenger: Arm, ours: Summary, budget: int
    ) -> Generator[Window, None, tuple[int, Outcome | None, Summary]]:
        """Windows of an arm one after the other, until it is known how it compares, or `budget` steps were made."""
        spent, windows, other = 0, list[Window](), of_windows(())
        while True:
            steps = self.rules.window if windows else self.rules.probe
            if spent + steps > budget:
                return spent, Outcome.DRAW if math.isfinite(other.mean) else None, other
            windows.append(Window(challenger, steps, steps - 1, exploring=True))
            yield windows[-1]
            spent += steps
            if (problem := windows[-1].problem) is not None:
                self._drop(challenger, problem)
            if problem is not None or self._reopen is not None:
                return spent, None, other
            all_of_it = known(windows)
            other, found = all_of_it.found, outcome(ours, all_of_it, self.rules)
            self._fastest[challenger] = all_of_it.fastest
            if found is not None:
                return spent, found, other

    def _is_chosen(self, challenger: Arm, ours: Summary, other: Summary, found: Outcome) -> bool:
        """Choose an arm that graphs have made way for, or not. What cannot be told apart needs no graphs."""
        home = self.best
        here, there = f"{ours.mean * 1e3:.3g} ms", f"{other.mean * 1e3:.3g} ms"
        wins = found is Outcome.WINS or (found is Outcome.DRAW and challenger.without_graphs)
        if not wins:
            draw = found is Outcome.DRAW
            self.verdicts[challenger] = f"{there}, and {home} takes {here}{_NO_DIFFERENCE if draw else ''}"
            self._has_lost(challenger, home, ours.mean)
            return False
        draw = found is Outcome.DRAW
        self.verdicts[home] = f"{here}, and {challenger} takes {there}{_NO_DIFFERENCE if draw else ''}"
        because = "no graph is proved to be faster: " if draw else ""
        self._choose(challenger, f"{because}{there} against {here} of {home} {self._why}".strip())
        self._lost.pop(challenger, None)
        self._has_lost(home, challenger, other.mean)
        return True

    def _has_lost(self, arm: Arm, other: Arm, best: float) -> None:
        """Another trial of an arm with graphs has to be cheap, unless the best arm becomes slower than it is now."""
        if _gives_way(arm, other):
            self._lost[arm] = best
            self._losses[arm] += 1
            self._wait_for(arm, self._price(arm), 0.0)

    def _stays_away(self, challenger: Arm) -> bool:
        """Choose an arm that has lost, where to capture the best one again does not pay in the steps that will come."""
        home = self.best
        if not _gives_way(home, challenger):
            return False
        left = self._steps_left()
        here, there = self.times[home], self.times[challenger]
        price, steps = self._price(home), max(self.steps, 1) if left is None else left
        if price <= (there - here) * steps:
            return False
        why = f"to capture {home} again takes {price:.3g} s, and does not pay in {steps:.0f} steps"
        self.verdicts[home] = f"{here * 1e3:.3g} ms, and {challenger} takes {there * 1e3:.3g} ms: {why}"
        self._choose(challenger, why)
        self._wait_for(home, price, there - here)
        return True


def _gives_way(arm: Arm, other: Arm) -> bool:
    """Whether it is the graphs of this one of two arms that make way for steps of the other one."""
    return arm.plan.forward_backward or (
        arm.regions and not other.regions and not other.plan.forward_backward
    )
