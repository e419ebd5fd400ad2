"""A step goes through an `OrderedDict`, and the loop moves its entries."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import pytest
from torch import nn
from training import Diary, Net, adamw, batches, both


class Derived(OrderedDict[str, float]):
    pass


WAYS: dict[str, Callable[[Any], float]] = {
    "values": lambda weights: next(iter(weights.values())),
    "items": lambda weights: list(weights.items())[1][1],
    "keys": lambda weights: weights[list(weights.keys())[1]],
    "names": lambda weights: sum(i * weights[name] for i, name in enumerate(weights)),
    "copied": lambda weights: list(dict(weights).values())[1],
    "from the end": lambda weights: weights[next(reversed(weights))],
}


@pytest.mark.parametrize("kind", [OrderedDict, Derived])
@pytest.mark.parametrize("way", WAYS)
def test_a_step_notices_another_order(way: str, kind: type) -> None:
    def script(diary: Diary) -> None:
        model = Net()
        model.weights = kind(first=1.0, second=2.0, third=4.0)
        optimizer, factor = adamw(model), WAYS[way]
        step = diary.step(
            lambda x, y: nn.functional.cross_entropy(model(x), y) * factor(model.weights),
            model=model,
            optimizer=optimizer,
        )
        for i, (x, y) in enumerate(batches(40)):
            if i in (10, 25):
                model.weights.move_to_end("first", last=i < 20)
            diary.write("loss", step(x, y))
        diary.write_state(model, optimizer)

    both(script, replays=20, plan="{F B O}")


def test_a_step_that_asks_for_no_order_needs_no_other_graph() -> None:
    def script(diary: Diary) -> None:
        model, weights = Net(), OrderedDict(first=1.0, second=2.0)
        optimizer = adamw(model)
        step = diary.step(
            lambda x, y: nn.functional.cross_entropy(model(x), y) * weights["second"],
            model=model,
            optimizer=optimizer,
        )
        for i, (x, y) in enumerate(batches(40)):
            if i % 5 == 4:
                weights.move_to_end("first" if i % 2 else "second")
            diary.write("loss", step(x, y))
        diary.write_state(model, optimizer)

    both(script, replays=34, plan="{F B O}")


def test_a_step_may_move_entries_itself() -> None:
    def script(diary: Diary) -> None:
        model, weights = Net(), OrderedDict(first=1.0, second=2.0, third=4.0)
        optimizer = adamw(model)

        def loss_of_step(x: Any, y: Any) -> Any:
            name = next(iter(weights))
            weights.move_to_end(name)
            return nn.functional.cross_entropy(model(x), y) * weights[name]

        step = diary.step(loss_of_step, model=model, optimizer=optimizer)
        for x, y in batches(30):
            diary.write("loss", step(x, y))
            diary.write("order", list(weights))

    report = both(script, replays=8)
    assert any("move_to_end" in row.reason for row in report.fallbacks), report
