"""The table of a call's life, walked through: every stage ends in graphs or in a refusal."""

from __future__ import annotations

import ast
import itertools
from contextlib import suppress
from pathlib import Path

import pytest

from pygraph_train.step import lifecycle
from pygraph_train.step.lifecycle import Life, LifeEvent, Scope, Stage, StageLengths, next_life, refusal

LENGTHS = StageLengths(met=2, watched=3, prepared=2)
MOST = 24
"""Steps of one stage that the walk looks at: more than any stage takes."""

pytestmark = [pytest.mark.quick, pytest.mark.passes_without_graphs("a table, without torch")]


def possible(life: Life) -> dict[LifeEvent, Life]:
    """Every event that can happen, with what follows."""
    found = {}
    for event in LifeEvent:
        with suppress(ValueError):
            found[event] = next_life(life, event, LENGTHS)
    return found


def walk() -> dict[Life, dict[LifeEvent, Life]]:
    """Everything that can be reached from the first step of a signature."""
    table, left = {}, [Life(Stage.MET), Life(Stage.FIRST_LOOK)]
    while left:
        life = left.pop()
        if life in table or life.steps > MOST:
            continue
        table[life] = possible(life)
        left += table[life].values()
    return table


def test_every_stage_is_reached_and_every_event_happens() -> None:
    table = walk()
    assert {life.stage for life in table} == set(Stage)
    assert {event for events in table.values() for event in events} == set(LifeEvent)


def test_graphs_can_always_be_refused_and_a_refusal_is_for_good() -> None:
    for life, events in walk().items():
        assert events[LifeEvent.REFUSED] == Life(Stage.REFUSED)
        if life.stage is Stage.REFUSED:
            assert set(events.values()) == {life}


def test_no_stage_is_a_trap() -> None:
    """From wherever a call stands, steps that run as they should lead to graphs."""
    for life in walk():
        if life.stage is Stage.REFUSED:
            continue
        for _ in range(LENGTHS.met + LENGTHS.watched + LENGTHS.prepared + 3):
            if life.stage is Stage.GRAPHED:
                break
            life = next_life(life, LifeEvent.RAN, LENGTHS)
        assert life.stage is Stage.GRAPHED


def test_a_call_is_captured_only_after_it_was_traced_watched_and_prepared() -> None:
    """Whatever happens on the way: the shortest ways to a graph go through all of that."""
    way = [Life(Stage.FIRST_LOOK)]
    while way[-1].stage is not Stage.GRAPHED:
        way.append(next_life(way[-1], LifeEvent.RAN, LENGTHS))
    assert [str(life.stage.value) for life in way] == [
        "first look",
        "watched",
        "watched",
        "prepared",
        "prepared",
        "graphed",
    ]
    table = walk()
    before: dict[Stage, set[Stage]] = {stage: set() for stage in Stage}
    for life, events in table.items():
        for following in events.values():
            before[following.stage].add(life.stage)
    assert before[Stage.GRAPHED] == {Stage.PREPARED, Stage.GRAPHED}
    assert before[Stage.PREPARED] == {Stage.WATCHED, Stage.COMPILED, Stage.PREPARED, Stage.GRAPHED}
    assert before[Stage.WATCHED] == {Stage.FIRST_LOOK, Stage.SECOND_LOOK, Stage.WATCHED}
    assert before[Stage.SECOND_LOOK] == {Stage.FIRST_LOOK}


def test_stages_take_as_many_steps_as_the_rules_say() -> None:
    for met, watched, prepared in itertools.product((1, 2, 5), (2, 3, 4), (1, 2, 3)):
        lengths, life, stages = StageLengths(met, watched, prepared), Life(Stage.MET), []
        while life.stage is not Stage.GRAPHED:
            stages.append(life.stage)
            life = next_life(life, LifeEvent.RAN, lengths)
        looks = stages.count(Stage.FIRST_LOOK) + stages.count(Stage.WATCHED)
        assert (stages.count(Stage.MET), looks, stages.count(Stage.PREPARED)) == (met, watched, prepared)


def test_an_event_that_cannot_happen_is_named() -> None:
    with pytest.raises(ValueError, match="a call that is met cannot become stale"):
        next_life(Life(Stage.MET), LifeEvent.STALE, LENGTHS)


def test_what_has_changed_is_prepared_anew() -> None:
    for life, events in walk().items():
        if LifeEvent.STALE in events and life.stage is not Stage.REFUSED:
            assert events[LifeEvent.STALE] == Life(Stage.PREPARED, 0), life


def test_what_a_second_look_sees_is_believed() -> None:
    life = next_life(Life(Stage.FIRST_LOOK), LifeEvent.UNFIT, LENGTHS)
    assert life == Life(Stage.SECOND_LOOK)
    assert next_life(life, LifeEvent.UNFIT, LENGTHS).stage is Stage.REFUSED


@pytest.mark.parametrize(
    ("other_plans", "first", "replayed", "scope"),
    [
        (True, True, True, Scope.PLAN),
        (True, True, False, Scope.PLAN),
        (True, False, True, Scope.PLAN),
        (True, False, False, Scope.PLAN),
        (False, True, False, Scope.RUN),
        (False, True, True, Scope.CALLS),
        (False, False, True, Scope.CALLS),
        (False, False, False, Scope.CALLS),
    ],
)
def test_what_a_refusal_ends(other_plans: bool, first: bool, replayed: bool, scope: Scope) -> None:
    assert refusal(other_plans=other_plans, first=first, replayed=replayed) is scope


def test_the_table_knows_nothing_of_torch_or_of_the_runner() -> None:
    tree = ast.parse(Path(lifecycle.__file__).read_text())
    imported = {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    assert imported == {"__future__", "enum", "typing"}
