"""Dropout that drops nothing returns the very tensor that it gets. Steps may go by that."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.functional import cross_entropy, dropout
from training import Diary, Net, adamw, batches, both

_CALLS: dict[str, Callable[[Tensor], Tensor]] = {
    "not training": lambda x: dropout(x, 0.5, training=False),
    "not training, by place": lambda x: dropout(x, 0.5, False),
    "of a module": nn.Dropout(0.5).eval(),
    "nothing to drop": lambda x: dropout(x, 0.0),
    "something to drop": lambda x: dropout(x),
    "of torch itself": lambda x: torch.dropout(x, 0.5, False),
    "of torch itself, nothing to drop": lambda x: torch.dropout(x, 0.0, True),
    "alpha": lambda x: functional.alpha_dropout(x, 0.5, False),
    "alpha of features": lambda x: functional.feature_alpha_dropout(x, 0.5, False),
    "features of 1d": lambda x: x if _stays(functional.dropout1d, x[:, None]) else x.clone(),
    "features of 2d": lambda x: x if _stays(functional.dropout2d, x[:, None, None]) else x.clone(),
    "features of 3d": lambda x: x if _stays(functional.dropout3d, x[:, None, None, None]) else x.clone(),
}


def _stays(drop: Callable[..., Tensor], x: Tensor) -> bool:
    return drop(x, 0.5, False) is x


def _train(loss: Callable[..., Tensor], replays: int) -> Any:
    def script(diary: Diary) -> None:
        model, calls = Net(), list[int]()
        optimizer = adamw(model)

        @functools.lru_cache(maxsize=4)
        def size_of(tensor: Tensor) -> float:
            calls.append(1)
            return float(tensor.shape[0])

        step = diary.step(lambda x, y: loss(model, size_of, x, y), model=model, optimizer=optimizer)
        for x, y in batches(24):
            diary.write("loss", step(x, y))
            diary.write("calls", len(calls))
        diary.write_state(model, optimizer)

    return both(script, replays=replays)


@pytest.mark.parametrize("call", _CALLS)
@pytest.mark.quick
def test_a_step_may_ask_whether_it_is_the_same_tensor(call: str) -> None:
    def loss(model: nn.Module, size_of: Any, x: Tensor, y: Tensor) -> Tensor:
        dropped = _CALLS[call](x)
        return cross_entropy(model(dropped), y) * (2.0 if dropped is x else 3.0)

    report = _train(loss, replays=15)
    assert report.steps_replayed >= 15, str(report)


def test_a_probability_that_is_none_raises() -> None:
    with pytest.raises(ValueError, match="dropout probability"):
        _train(lambda model, size_of, x, y: cross_entropy(dropout(model(x), 1.5, False), y), replays=1)
