"""Loops that step several optimizers, of which some make no steps for a while: training steps go on to be counted."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("accelerate")

import accelerate_training
import torch
from accelerate_training import fresh  # noqa: F401
from test_compile_wait import SIXTY_STEPS, Clock, clock  # noqa: F401
from torch import nn
from training import Net, batches

from pygraph_train.integrations.living import Living
from pygraph_train.integrations.loop_report import LoopReport
from pygraph_train.integrations.rounds import Rounds
from pygraph_train.selection import timing
from pygraph_train.step.compile_wait import declared_price

Steps = Callable[[int], tuple[bool, bool]]
"""For the number of a batch, which of two optimizers make a step."""


def train(steps: Steps, count: int, each: Callable[[Any], None] = lambda script: None) -> LoopReport:
    """Train two models in turns, and compare with stock Accelerate."""

    def script(made: accelerate_training.Script) -> None:
        accelerator = made.accelerator
        models: list[Any] = [Net(), Net()]
        optimizers = [torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True) for model in models]
        prepared = accelerator.prepare(*models, *optimizers)
        models, optimizers = list(prepared[:2]), list(prepared[2:])
        for step, (x, y) in enumerate(batches(count)):
            for model, optimizer, makes_step in zip(models, optimizers, steps(step), strict=True):
                if makes_step:
                    loss = nn.functional.cross_entropy(model(x), y)
                    accelerator.backward(loss)
                    optimizer.step()
                    optimizer.zero_grad()
                    made.write("loss", loss)
            each(made)
        for model, optimizer in zip(models, optimizers, strict=True):
            made.write_state(model, optimizer)

    return accelerate_training.both(script, replays=40)


ENDS = pytest.mark.parametrize(
    "steps",
    [
        lambda step: (True, step < 10),
        lambda step: (True, False),
        lambda step: (False, True),
        lambda step: (step < 10, True),
    ],
    ids=["the last one stops", "the first one alone", "the last one alone", "the first one stops"],
)


@ENDS
def test_a_wait_ends_where_an_optimizer_makes_no_steps(steps: Steps, clock: Clock) -> None:  # noqa: F811
    with declared_price(SIXTY_STEPS):
        report = train(steps, 200)
    assert report.regions() and 60 <= clock.looks <= 110, (clock.looks, str(report))
    assert min(row.replays for row in report.regions()) > 50, str(report)
    assert 160 <= report.steps <= 200, str(report)


@ENDS
def test_steps_come_from_graphs_whatever_the_other_optimizer_did_last(steps: Steps) -> None:
    report = train(steps, 200)
    assert 160 <= report.steps <= 200 and report.steps_from_graphs > 140, str(report)
    assert "{O}" in report.running_plan, str(report)


@pytest.mark.parametrize("critic", [1, 3, 5])
@pytest.mark.parametrize("last", [False, True])
def test_a_round_of_all_optimizers_is_one_step(critic: int, last: bool) -> None:
    """Of which one makes more steps than the other."""
    rare = [step % critic == critic - 1 for step in range(200)]
    report = train(lambda step: (True, rare[step]) if last else (rare[step], True), 200)
    assert report.steps == (200 // critic if last else 200), str(report)


def test_a_loop_that_rests_goes_on_to_be_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "declared_seconds", lambda arm: 1e-3 * (1 + len(arm.plan.graphs)))
    rested = list[bool]()

    def each(script: Any) -> None:
        plugin = getattr(script.accelerator, "pygraph", None)
        if plugin is not None:
            rested.append(plugin._loop._whole.rests)

    report = train(lambda step: (True, step < 200), 400, each)
    assert sum(rested[:200]) > 50 and sum(rested[200:]) > 100
    assert 360 <= report.steps <= 400, str(report)


# -- rounds by themselves -------------------------------------------------------------------------------


class Stepped:
    """An optimizer, as far as it matters here."""

    suspended = False


@pytest.fixture
def three() -> tuple[Rounds, list[Stepped]]:
    living, made = Living[Any](), [Stepped() for _ in range(3)]
    for one in made:
        living.add(one)
    return Rounds(living), made


def counted(rounds: Rounds, *steps: Any) -> int:
    return sum(rounds.ends_with(one) for one in steps)


def test_the_last_one_of_those_that_make_steps_ends_a_round(three: Any) -> None:
    rounds, (a, b, c) = three
    assert counted(rounds, *[a, b, c] * 50) == 50
    assert [rounds.ends_with(one) for one in (a, b, c)] == [False, False, True]
    assert 70 <= counted(rounds, *[a, b] * 100) <= 100
    assert [rounds.ends_with(one) for one in (a, b)] == [False, True]
    assert 50 <= counted(rounds, *[a] * 100) <= 100
    # all of them come back: no round is counted twice
    assert counted(rounds, a, b, c, a, b, c) <= 2
    assert [rounds.ends_with(one) for one in (a, b, c)] == [False, False, True]


def test_the_order_within_a_round_may_be_another_one(three: Any) -> None:
    rounds, (a, b, c) = three
    assert counted(rounds, *[c, b, a] * 50) == 50
    assert 70 <= counted(rounds, *[b, a] * 100) <= 100
    assert counted(rounds, *[c, b, a] * 50) <= 50


def test_many_optimizers_make_one_round() -> None:
    living, made = Living[Any](), [Stepped() for _ in range(40)]
    for one in made:
        living.add(one)
    assert counted(Rounds(living), *made * 10) == 10


def test_what_is_gone_or_looked_after_by_others_ends_no_round(three: Any) -> None:
    rounds, made = three
    made[2].suspended = True
    rounds.begin_anew()
    assert counted(rounds, *made * 10) == 10
    assert rounds.ends_with(made[1]) and not rounds.ends_with(made[2])
    del made[1:]
    assert counted(rounds, *made * 10) == 10
    made[0].suspended = True
    rounds.begin_anew()
    assert counted(rounds, *made * 10) == 0


@pytest.mark.parametrize("often", [20, 40, 200])
def test_one_that_makes_a_step_now_and_then_ends_each_round(
    three: tuple[Rounds, list[Stepped]], often: int
) -> None:
    rounds, (a, _, c) = three
    counted(rounds, *([*[a] * often, c] * 20))
    assert [counted(rounds, *[a] * often, c) for _ in range(10)] == [1] * 10
    assert not any(rounds.ends_with(a) for _ in range(often)) and rounds.ends_with(c)
