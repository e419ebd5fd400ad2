"""Integers that change in each step: what they decide has graphs, and no graph is for one number alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training import Diary, adamw, batches, both

STEPS = 70


class Net(nn.Module):
    """A model, and what a step may write to."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        self.number = -3
        self.last: Any = None
        self.seen: dict[str, Any] = {}
        self.found: list[Any] = []

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.layers(x)
        return result


def loss_of(net: Net, batch: Any) -> Tensor:
    return nn.functional.cross_entropy(net(batch[0]), batch[1])


def every_tenth(net: Net, batch: Any, index: int) -> Tensor:
    loss = loss_of(net, batch)
    return loss * 2 if index % 10 == 0 else loss


def every_tenth_of_an_attribute(net: Net, batch: Any, index: int) -> Tensor:
    loss = loss_of(net, batch)
    if net.number % 10 == 0:
        net.found.append(net.number)
        return loss * 2
    return loss


def from_some_step_on(net: Net, batch: Any, index: int) -> Tensor:
    loss = loss_of(net, batch)
    return loss + 0.1 * sum((p**2).sum() for p in net.parameters()) if index >= 40 else loss


def written(net: Net, batch: Any, index: int) -> Tensor:
    net.last, net.seen["twice"] = index, 2 * net.number
    net.found.append(index + net.number)
    return loss_of(net, batch)


def two_conditions(net: Net, batch: Any, index: int) -> Tensor:
    loss = loss_of(net, batch)
    if index % 2:
        loss = loss * 0.5
    if index // 32 == 1:
        loss = loss + 0.125
    return loss


def one_of_a_list(net: Net, batch: Any, index: int) -> Tensor:
    return loss_of(net, batch) * [1.0, 0.5, 2.0][index % 3]


DECIDED: dict[str, tuple[Callable[[Net, Any, int], Tensor], int]] = {
    f.__name__: (f, replays)
    for f, replays in (
        (every_tenth, 55),
        (every_tenth_of_an_attribute, 55),
        (from_some_step_on, 50),
        (written, 55),
        (two_conditions, 40),
        (one_of_a_list, 45),
    )
}


def script_of(write: Callable[[Net, Any, int], Any], *, start: int = 0) -> Callable[[Diary], None]:
    def script(diary: Diary) -> None:
        net = Net()
        optimizer = adamw(net)
        step = diary.step(lambda batch, index: write(net, batch, index), model=net, optimizer=optimizer)
        for index, batch in enumerate(batches(STEPS)):
            net.number += 1
            result = step(batch, start + index)
            diary.write("result", result.detach() if isinstance(result, Tensor) else result)
            diary.write("written", [net.last, net.seen, net.found])
        diary.write_state(net, optimizer)

    return script


@pytest.mark.slow_after(3)
@pytest.mark.parametrize("start", [0, 5])
@pytest.mark.parametrize("kind", DECIDED)
def test_each_decision_has_a_graph(kind, start):
    write, replays = DECIDED[kind]
    both(script_of(write, start=start), replays=replays, plan="{F B O}")


def computed(net: Net, batch: Any, index: int) -> Tensor:
    return loss_of(net, batch) * (1 + 0.01 * index)


def as_a_size(net: Net, batch: Any, index: int) -> Tensor:
    return loss_of(net, batch) + torch.ones(index + 1).mean()


def as_an_index(net: Net, batch: Any, index: int) -> Tensor:
    return loss_of(net, batch) + net(batch[0])[index % 4, 0]


def counted_to(net: Net, batch: Any, index: int) -> Tensor:
    loss = loss_of(net, batch)
    for _ in range(index % 5):
        loss = loss * 1.5
    return loss


def in_a_text(net: Net, batch: Any, index: int) -> Tensor:
    net.seen[f"step {index}"] = len(net.seen)
    return loss_of(net, batch)


def returned(net: Net, batch: Any, index: int) -> dict[str, Any]:
    return {"loss": loss_of(net, batch), "index": index, "tenth": index % 10 == 0}


def decided_and_computed(net: Net, batch: Any, index: int) -> Tensor:
    loss = loss_of(net, batch)
    return loss * index if index % 7 == 3 else loss


def filled(net: Net, batch: Any, index: int) -> Tensor:
    return loss_of(net, batch) + torch.full((3,), index).sum() * 1e-3


def as_a_float(net: Net, batch: Any, index: int) -> Tensor:
    share = min(1.0, index / 30)
    return loss_of(net, batch) * share


OTHERS = [
    f.__name__
    for f in (computed, as_a_size, as_an_index, counted_to, in_a_text, returned, filled, as_a_float)
] + ["decided_and_computed"]


@pytest.mark.slow_after(3)
@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.passes_without_graphs("few of these steps can be replayed")
def test_numbers_that_tensors_depend_on_are_never_stale(kind, monkeypatch):
    """And the number of traces has a bound."""
    from pygraph_train.tracing.trace import Trace

    made, init = [0], Trace.__init__

    def counting(self: Any, *args: Any, **options: Any) -> None:
        made[0] += 1
        init(self, *args, **options)

    monkeypatch.setattr(Trace, "__init__", counting)
    both(script_of(globals()[kind]), replays=1)
    assert made[0] <= 10, made
