"""How carefully the controller compares."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Rules"]


@dataclass(frozen=True)
class Rules:
    """How carefully arms are compared. Windows and limits are in steps.

    Attributes:
        window: steps of one arm in a row; the first one after a switch is not measured.
        probe: length of an arm's first window, enough to see that it is hopeless.
        rounds: windows that one arm gets at most before a comparison counts as a draw.
        exploration: steps that one opening of the question may spend on arms other than the best one known.
        confidence: one-sided, of every verdict.
        min_gain: a change that gains a smaller share of the step time than this is not made.
        tolerance: where a draw leaves an arm this share slower than no graphs, there are no graphs.
        warmup_slack: times seen in warm-up are taken to be up to this factor too long.
        slack_apart: the same where the graphs of the best arm would have to make way, and be captured again.
        again: share of the run so far that all further captures for plans which have lost a comparison may take.
        again_of_gain: the same, of what such a plan could gain if its fastest window was the only undisturbed one.
        drift: a lasting change of the chosen arm's time by more than this share opens the question again.
        patience: looks in a row that must agree on a drift.
        look_every: steps from one look at the chosen arm to the next; doubled by every opening that
            changed nothing, and by every look at steps without graphs that has found the same as before.
    """

    window: int = 9
    probe: int = 5
    rounds: int = 4
    exploration: int = 96
    confidence: float = 0.95
    min_gain: float = 0.01
    tolerance: float = 0.01
    warmup_slack: float = 2.0
    slack_apart: float = 1.5
    again: float = 0.01
    again_of_gain: float = 0.25
    drift: float = 0.1
    patience: int = 3
    look_every: int = 64
