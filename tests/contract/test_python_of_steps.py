"""What steps do in Python: counters, lists, metrics, prints, host reads, conditions on the number of the batch."""

from __future__ import annotations

import dataclasses
import random
from collections import Counter, defaultdict
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn

from .compare import Run, same_as_plain
from .models import Net, adamw, batches, cross_entropy


def trains(run: Run, step_fn: Any, model: nn.Module, count: int = 24, note: Any = None) -> None:
    """A loop over `step_fn`; `note` is compared after each step."""
    step = run.step(step_fn, model=model, optimizer=adamw(model))
    for batch in batches(count):
        step(*batch)
        run.note("state of Python", note() if callable(note) else note)


@same_as_plain(replays=15)
def test_a_counter_counts_and_enters_the_loss(run: Run) -> None:
    model, state = Net(), {"steps": 0}

    def step_fn(x: Tensor, y: Tensor) -> Tensor:
        state["steps"] += 1
        out = model(x)
        return cross_entropy(out, y) + 1e-3 * state["steps"] * out.square().mean()

    trains(run, step_fn, model, note=state)


@same_as_plain(replays=15)
def test_lists_and_other_containers_grow(run: Run) -> None:
    model = Net()
    losses: list[Any] = []
    seen: Counter[str] = Counter()
    by_size = defaultdict(list)

    def step_fn(x: Tensor, y: Tensor) -> Tensor:
        loss = cross_entropy(model(x), y)
        losses.append(loss.detach())
        seen["batches"] += 1
        by_size[len(x)].append(loss.detach() * 2)
        return loss

    trains(run, step_fn, model, note=lambda: [losses, seen, by_size])


@same_as_plain(replays=12)
def test_the_loss_is_read_and_printed(run: Run, capsys: pytest.CaptureFixture[str]) -> None:
    model, state = Net(), {"best": 9e9, "steps": 0, "mean": 0.0}

    def step_fn(x: Tensor, y: Tensor) -> Tensor:
        loss = cross_entropy(model(x), y)
        value = loss.item()
        state["steps"] += 1
        state["mean"] += (value - state["mean"]) / state["steps"]
        if value < state["best"]:
            state["best"] = value
        if state["steps"] % 5 == 0:
            print(f"step {state['steps']}: {value:.6f}")
        return loss

    trains(run, step_fn, model, note=state)
    run.note("printed", capsys.readouterr().out)


@same_as_plain(replays=10)
def test_every_tenth_step_does_more(run: Run) -> None:
    model, state, extra = Net(), {"step": 0}, []

    def step_fn(x: Tensor, y: Tensor) -> Tensor:
        state["step"] += 1
        out = model(x)
        loss = cross_entropy(out, y)
        if state["step"] % 10 == 0:
            loss = loss + 0.1 * out.abs().mean()
            extra.append(loss.detach())
        return loss

    trains(run, step_fn, model, 40, note=lambda: [state, extra])


@same_as_plain(replays=4, updates=2)
def test_weights_and_gradients_are_read_behind_the_loss(run: Run) -> None:
    """They are those of the step before: nothing has happened yet."""
    model, norms = Net(), []

    def step_fn(x: Tensor, y: Tensor) -> Tensor:
        loss = cross_entropy(model(x), y)
        loss.item()
        empty = [p.grad is None for p in model.parameters()]
        norms.append([model.first.weight.norm().item(), empty])
        return loss

    trains(run, step_fn, model, note=norms)


@same_as_plain(replays=15)
def test_random_numbers_of_the_host(run: Run) -> None:
    """Mixup with numpy, jitter with Python, and a permutation of torch."""
    model = Net()

    def step_fn(x: Tensor, y: Tensor) -> Tensor:
        share, order = float(numpy.random.beta(1.0, 1.0)), torch.randperm(len(x))
        out = model(share * x + (1 - share) * x[order] + random.random())
        return share * cross_entropy(out, y) + (1 - share) * cross_entropy(out, y[order])

    trains(run, step_fn, model, 30)


@same_as_plain(replays=12)
def test_objects_of_the_user_are_changed(run: Run) -> None:
    @dataclasses.dataclass
    class Meter:
        total: float = 0.0
        count: int = 0
        last: Any = None

        def update(self, value: Tensor, count: int) -> None:
            self.count += count
            self.last = value

    model, meter = Net(), Meter()

    def step_fn(x: Tensor, y: Tensor) -> Tensor:
        loss = cross_entropy(model(x), y)
        meter.update(loss.detach(), len(x))
        return loss

    trains(run, step_fn, model, note=meter)


@same_as_plain(replays=12)
def test_values_that_the_loop_changes_between_steps(run: Run) -> None:
    """An annealed weight, a temperature in a tensor, and a flag."""
    model = Net()
    model.flag, model.weight = False, 0.0
    temperature = torch.ones(())

    def step_fn(x: Tensor, y: Tensor) -> Tensor:
        out = model(x) / temperature
        loss = cross_entropy(out, y) + model.weight * out.square().mean()
        return loss * 2 if model.flag else loss

    step = run.step(step_fn, model=model, optimizer=adamw(model))
    for number, batch in enumerate(batches(40)):
        model.flag, model.weight = 20 <= number < 30, number * 0.01
        temperature.fill_(1 + number * 0.1)
        step(*batch)
