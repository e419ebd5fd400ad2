"""A step moves entries of an `OrderedDict` that it has not made."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from torch import nn
from training import Diary, Net, adamw, batches, both


def test_a_step_that_moves_entries_is_no_graph() -> None:
    def script(diary: Diary) -> None:
        model, weights = Net(), OrderedDict(first=1.0, second=2.0, third=4.0)
        optimizer = adamw(model)

        def loss_of_step(x: Any, y: Any) -> Any:
            weights.move_to_end("first")
            return nn.functional.cross_entropy(model(x), y) * weights["second"]

        step = diary.step(loss_of_step, model=model, optimizer=optimizer)
        for x, y in batches(30):
            diary.write("loss", step(x, y))
            diary.write("order", list(weights))

    report = both(script, replays=8)
    assert any("move_to_end" in row.reason for row in report.fallbacks), report
