"""Shapes whose lead has settled on no graphs: they keep none, get none, and are not said to be rare."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from test_changing_shapes import Text, drawn, text, text_loss
from test_comparing_once import PLAIN, Simulated, simulated  # noqa: F401
from training import Diary, adamw, both

from pygraph_train import StepReport
from pygraph_train.graphs.emulated import EmulatedEngine
from pygraph_train.step.variants import Variant


def trained(lengths: list[int], look: Callable[[int, list[Variant], StepReport], None]) -> StepReport:
    """Train on these lengths, and look at all kinds of calls before each step."""

    def script(diary: Diary) -> None:
        model = Text()
        optimizer = adamw(model)
        step = diary.step(text_loss(model), model=model, optimizer=optimizer)
        for number, length in enumerate(lengths):
            if diary.graphed:
                look(number, list(step._runner._signatures.variants()), step.report())
            diary.write("loss", step(text(length, seed=number)))
            if number % 50 == 0:
                diary.write_state(model, optimizer)
        diary.write_state(model, optimizer)

    return both(script, replays=40)


def test_graphs_of_all_shapes_go_when_no_graphs_are_settled_on(simulated: Simulated) -> None:  # noqa: F811
    simulated.table |= {"{F B O}": 1.3 * PLAIN, "F B {O}": 1.2 * PLAIN}
    kept: list[tuple[bool, int]] = []

    def look(number: int, variants: list[Variant], report: StepReport) -> None:
        settled = any(controller.settled for controller in report.controllers)
        kept.append((settled, sum(len(variant.captures) for variant in variants)))

    report = trained(drawn([16, 20, 24], 300), look)
    assert report.running_plan == "F B O", str(report)
    assert {count for settled, count in kept if settled} == {0}
    assert max(count for _, count in kept) == 3


def test_graphs_of_all_shapes_stay_where_memory_has_room(
    simulated: Simulated,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They go all the same when nobody needs them, and stay where they are needed."""
    monkeypatch.setattr(EmulatedEngine, "shares_memory", False)
    for share, left in ((1.3, 0), (0.2, 3)):
        simulated.table |= {"{F B O}": share * PLAIN, "F B {O}": 1.2 * PLAIN}
        kept: list[int] = []
        trained(
            drawn([16, 20, 24], 300),
            lambda number, variants, report, kept=kept: kept.append(sum(len(v.captures) for v in variants)),
        )
        assert kept[-1] == left


def test_shapes_get_no_graphs_while_the_comparison_is_open_again(simulated: Simulated) -> None:  # noqa: F811
    simulated.table |= {"{F B O}": 1.3 * PLAIN, "F B {O}": 1.2 * PLAIN}
    lengths = drawn([16, 20], 200) + drawn([16, 20, 16, 20, 24, 28, 32], 500)
    opened: list[int] = []
    counts: list[int] = []

    def look(number: int, variants: list[Variant], report: StepReport) -> None:
        if number == 205:
            for controller in report.controllers:
                controller.reopen("something has changed")
        if number >= 200:
            opened.extend(number for c in report.controllers if not c.settled)
            counts.append(len(report.captures))
            assert not any(variant.captures for variant in variants)

    report = trained(lengths, look)
    assert len(opened) >= 9, "a comparison was open again"
    assert counts[0] == counts[-1], "and nothing was captured for it"
    assert report.running_plan == "F B O"


def test_steps_without_graphs_of_the_fastest_plan_are_not_called_rare(simulated: Simulated) -> None:  # noqa: F811
    simulated.table |= {"{F B O}": 1.3 * PLAIN, "F B {O}": 1.2 * PLAIN}
    rare: list[int] = []
    report = trained(
        drawn([16, 20], 200) + drawn([16, 20, 24, 28], 100),
        lambda number, variants, report: rare.append(report.shapes.rare_steps),
    )
    assert report.running_plan == "F B O" and report.shapes.met == 4
    assert rare[205] == rare[-1], "of these no shape is without a graph because it is rare"
