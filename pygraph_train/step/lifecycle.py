"""The life of one kind of call: from its first step to graphs, or to a refusal. A table, and nothing else.

A kind of call is a signature under one set of guards (a `Variant`). What it may do next depends on its `Life` alone;
what has happened to it is a `LifeEvent`; `next_life` says what follows. `refusal` says what a reason against a graph
ends, whoever has found it: tracing, compiling, capturing or comparing.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

__all__ = ["Life", "LifeEvent", "Scope", "Stage", "StageLengths", "next_life", "refusal"]


class Stage(Enum):
    """What the next step of such a call is for. The values are words for messages and tests."""

    MET = "met"
    """It runs as it is: a shape that never comes back is worth nothing."""
    FIRST_LOOK = "first look"
    """It is traced."""
    SECOND_LOOK = "second look"
    """It is traced once more: first calls set things up (caches, hooks, flags)."""
    WATCHED = "watched"
    """It runs from its trace, with eager kernels, and what it changes is compared with what the trace says."""
    COMPILED = "compiled"
    """Inductor compiles it while it runs."""
    PREPARED = "prepared"
    """It runs with the kernels that a graph will hold: lazy initialisation and autotuning happen."""
    GRAPHED = "graphed"
    """It is captured where it was not yet, and replayed where it was."""
    REFUSED = "refused"
    """No graph holds its forward and backward."""


class LifeEvent(Enum):
    """What a step has shown, or what was found out before it."""

    RAN = "ran"
    """It ran as the stage says, and nothing spoke against a graph."""
    UNFIT = "unfit"
    """The trace has a reason against a graph."""
    WANTS_INDUCTOR = "wants Inductor"
    """Its plan asks for kernels that are not compiled yet."""
    NOT_COMPILED = "not compiled"
    """Inductor has failed, and the step ran with eager kernels."""
    STALE = "stale"
    """What its captures rest on has changed: they are gone."""
    REFUSED = "refused"
    """It will have no graph of forward and backward."""


class Life(NamedTuple):
    """Where a kind of call stands.

    Attributes:
        stage: what its next step is for.
        steps: made for that so far.
    """

    stage: Stage
    steps: int = 0


class StageLengths(NamedTuple):
    """How many steps each stage takes.

    Attributes:
        met: steps of a signature that run as they are.
        watched: steps from the trace, the one that was traced included.
        prepared: steps with the kernels that a graph will hold.
    """

    met: int = 3
    watched: int = 3
    prepared: int = 2


def next_life(life: Life, event: LifeEvent, lengths: StageLengths) -> Life:
    """What follows.

    Raises:
        ValueError: that event cannot happen in that stage.
    """
    stage, steps = life
    if event is LifeEvent.REFUSED or stage is Stage.REFUSED:
        return Life(Stage.REFUSED)
    following = _TABLE.get((stage, event))
    if following is None:
        raise ValueError(f"a call that is {stage.value} cannot become {event.value}")
    if event in (LifeEvent.WANTS_INDUCTOR, LifeEvent.STALE, LifeEvent.UNFIT):
        return Life(following)
    made = steps + 1 if following is stage else 1
    enough = {Stage.MET: lengths.met, Stage.WATCHED: lengths.watched, Stage.PREPARED: lengths.prepared}.get(
        following
    )
    if enough is None or made < enough:
        return Life(following, made)
    if following is Stage.PREPARED:
        return Life(Stage.GRAPHED, made)  # goes on counting: some captures wait for more
    return Life(_AFTER[following])


_TABLE = {
    (Stage.MET, LifeEvent.RAN): Stage.MET,
    (Stage.FIRST_LOOK, LifeEvent.RAN): Stage.WATCHED,
    (Stage.FIRST_LOOK, LifeEvent.UNFIT): Stage.SECOND_LOOK,
    (Stage.SECOND_LOOK, LifeEvent.RAN): Stage.WATCHED,
    (Stage.SECOND_LOOK, LifeEvent.UNFIT): Stage.REFUSED,
    (Stage.WATCHED, LifeEvent.RAN): Stage.WATCHED,
    (Stage.WATCHED, LifeEvent.UNFIT): Stage.REFUSED,
    (Stage.PREPARED, LifeEvent.RAN): Stage.PREPARED,
    (Stage.PREPARED, LifeEvent.WANTS_INDUCTOR): Stage.COMPILED,
    (Stage.PREPARED, LifeEvent.STALE): Stage.PREPARED,
    (Stage.COMPILED, LifeEvent.RAN): Stage.PREPARED,
    (Stage.COMPILED, LifeEvent.NOT_COMPILED): Stage.PREPARED,
    (Stage.COMPILED, LifeEvent.STALE): Stage.PREPARED,
    (Stage.GRAPHED, LifeEvent.RAN): Stage.GRAPHED,
    (Stage.GRAPHED, LifeEvent.WANTS_INDUCTOR): Stage.COMPILED,
    (Stage.GRAPHED, LifeEvent.STALE): Stage.PREPARED,
}
"""The stage that an event leads to, before its steps are counted. Anything else cannot happen."""

_AFTER = {Stage.MET: Stage.FIRST_LOOK, Stage.WATCHED: Stage.PREPARED}
"""What follows when a stage has had its steps."""


class Scope(Enum):
    """What a reason against a graph ends."""

    PLAN = "this plan"
    """Its other plans are tried."""
    CALLS = "these calls"
    """Calls of this kind have no graph of forward and backward any more, nor do new kinds with the same signature."""
    RUN = "the whole run"
    """No call has one."""


def refusal(*, other_plans: bool, first: bool, replayed: bool) -> Scope:
    """What a reason against a graph ends. What follows are graphs of regions and of the update, where they pay.

    Args:
        other_plans: whether plans are being compared for this kind of call.
        first: whether it has the first signature of the run, which stands for the others.
        replayed: whether anything was replayed in this run: then other calls may have graphs.
    """
    if other_plans:
        return Scope.PLAN
    return Scope.RUN if first and not replayed else Scope.CALLS
