"""Which contenders of an entry are timed again, and how long.

In the first turn all of them make a few short windows, which tell what is far from the best of its loop. The others
make long ones. Where a mode of the library is then near 0.98 of the best or below, there is no verdict yet: a twin of
the best is started, and in a second turn these three make long windows until they tell, or until there are many.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from benchmarks.contenders import Rounds, Window
from benchmarks.noise import ALLOWED, KINDS, TWIN, Times, limit_of, paired, surely

__all__ = ["Loop", "Turn", "first_turn", "second_turn"]

SHORT, LONG, AGAIN = KINDS
CLEAR = 1.1
"""What is faster than the best by so much, or slower as a plain contender, is not measured any longer."""
MORE = 4
"""Windows that are made between two looks at what they tell."""


@dataclass(frozen=True)
class Loop:
    """Modes that are compared: ours with the best of the others."""

    others: Sequence[str]
    ours: Sequence[str]


@dataclass
class Turn:
    """What the first turn has measured, and what the second one needs.

    Attributes:
        times: windows by kind and mode.
        kept: modes that are measured again.
        best: the plain ones of these.
        cut: whether the time for the whole run was over before the first turn was.
    """

    times: dict[str, dict[str, list[float]]]
    kept: list[str] = field(default_factory=list)
    best: list[str] = field(default_factory=list)
    cut: bool = False

    def without_twin(self) -> list[str]:
        """Plain modes of which a twin was called for, and not measured."""
        return [mode for mode in self.best if mode + TWIN not in self.times.get(AGAIN, {})]


def first_turn(
    turn: Turn, modes: Sequence[str], loops: Sequence[Loop], window: Window, args: argparse.Namespace
) -> None:
    """Short windows of all, long ones of those that are near the best of their loop."""
    short = Rounds(window, args.short_s)
    short.prepare(modes)
    short.make(args.short_windows)
    turn.times[SHORT] = short.times()
    turn.cut = short.cut
    near = [mode for loop in loops for mode in _near(turn.times[SHORT], loop)]
    if short.cut or not near:
        return
    long = Rounds(window, args.window_s)
    long.prepare(near)
    long.make(args.windows)
    turn.times[LONG] = long.times()
    turn.cut = long.cut
    _leave_out(turn, set(near) - set(turn.times[LONG]), cut=long.cut)
    if not long.cut:
        for loop in loops:
            if found := list(_doubtful(turn.times[LONG], loop)):
                best = _best(turn.times[LONG], loop)
                turn.best.append(best)
                turn.kept += [best, *found]


def second_turn(
    turn: Turn, loops: Sequence[Loop], window: Window, args: argparse.Namespace, spread: float
) -> None:
    """Long windows of those that are left, beside twins, until each of ours has a verdict.

    Args:
        spread: of the twins of the run until now.
    """
    again = Rounds(window, args.window_s)
    again.prepare([m for mode in turn.kept for m in ((mode, mode + TWIN) if mode in turn.best else (mode,))])
    again.make(args.windows)
    made = args.windows
    while made < args.most_windows and not again.cut and not _settled(again.times(), loops, spread):
        more = min(MORE, args.most_windows - made)
        again.make(more)
        made += more
    turn.times[AGAIN] = again.times()
    _leave_out(turn, set(turn.kept) - set(turn.times[AGAIN]), cut=again.cut)


def _near(times: Times, loop: Loop) -> list[str]:
    """The modes of a loop which may be the best or below it; none where none of ours may be below."""
    plain = [mode for mode in loop.others if mode in times]
    if not plain:
        return []
    best = _best(times, loop)
    plain = [mode for mode in plain if statistics.median(paired(times, mode, best)) > 1 / CLEAR]
    ours = [mode for mode in loop.ours if mode in times]
    ours = [mode for mode in ours if any(not _is_clear(paired(times, mode, other)) for other in plain)]
    return [best, *(mode for mode in plain if mode != best), *ours] if ours else []


def _is_clear(ratios: Sequence[float]) -> bool:
    """Whether all windows but one are."""
    return sum(ratio < CLEAR for ratio in ratios) <= (len(ratios) > 2)


def _best(times: Times, loop: Loop) -> str:
    return min(
        (mode for mode in loop.others if mode in times), key=lambda mode: statistics.median(times[mode])
    )


def _doubtful(times: Times, loop: Loop) -> Iterator[str]:
    """Those of ours that are not measured to be at least 0.98 of the best."""
    if any(mode in times for mode in loop.others):
        best = _best(times, loop)
        for mode in loop.ours:
            if mode in times and not _is_allowed(paired(times, mode, best)):
                yield mode


def _is_allowed(ratios: Sequence[float]) -> bool:
    return statistics.median(ratios) >= 1 or surely(ratio >= ALLOWED for ratio in ratios)


def _settled(times: Times, loops: Sequence[Loop], spread: float) -> bool:
    return all(
        _tell(paired(times, mode, best), limit_of(times, best, spread))
        for loop in loops
        for mode in _doubtful(times, loop)
        for best in [_best(times, loop)]
    )


def _tell(ratios: Sequence[float], limit: float | None) -> bool:
    """Whether windows are on one side of the limit, so that more of them would not change the verdict."""
    return limit is None or surely(r < limit for r in ratios) or surely(r >= limit for r in ratios)


def _leave_out(turn: Turn, crashed: set[str], *, cut: bool) -> None:
    """Keep no windows of modes that have crashed."""
    if not cut:
        turn.times = {
            kind: {m: t for m, t in times.items() if m not in crashed} for kind, times in turn.times.items()
        }
