"""A graphed step of Accelerate that, in some steps only, does more behind its backward, or makes other calls.

The library puts the backward and what follows off until the function is over. The first call shows whether it may.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

pytest.importorskip("accelerate")

from accelerate_training import Script, both, fresh, loss_of, setup  # noqa: F401
from torch import Tensor, nn

More = Callable[[nn.Module], Any]


def halves_a_gradient(model: nn.Module) -> None:
    model.second.weight.grad.mul_(0.5)


def halves_all_gradients(model: nn.Module) -> None:
    for p in model.parameters():
        if p.grad is not None:
            p.grad.mul_(0.5)


def replaces_a_gradient(model: nn.Module) -> None:
    model.second.weight.grad = model.second.weight.grad * 0.5


def drops_a_gradient(model: nn.Module) -> None:
    model.second.weight.grad = None


def drops_gradients_of_a_part(model: nn.Module) -> None:
    model.first.zero_grad()


def changes_parameters(model: nn.Module) -> None:
    for p in model.parameters():
        p.data.clamp_(-0.1, 0.1)


def changes_a_part_of_a_parameter(model: nn.Module) -> None:
    with torch.no_grad():
        model.second.weight.view(-1)[:2].mul_(0.5)


def freezes_a_part(model: nn.Module) -> None:
    model.first.requires_grad_(not model.first.weight.requires_grad)


BETWEEN = [
    halves_a_gradient,
    halves_all_gradients,
    replaces_a_gradient,
    drops_a_gradient,
    drops_gradients_of_a_part,
    changes_parameters,
    changes_a_part_of_a_parameter,
    freezes_a_part,
]


def follows(model: nn.Module) -> None:
    """An average of the weights."""
    with torch.no_grad():
        for p, average in zip(model.parameters(), model.averages, strict=True):  # type: ignore[arg-type]
            average.lerp_(p, 0.1)


def looks(model: nn.Module) -> Tensor:
    return model.second.weight.norm()  # type: ignore[no-any-return,operator]


def tries(model: nn.Module) -> Tensor:
    with torch.no_grad():
        return model.first(torch.ones(2, 6))  # type: ignore[no-any-return,operator]


BEHIND = [follows, looks, tries, changes_parameters]


def training(
    more: More, *, between: bool, when: Callable[[int], bool], clip: bool = False
) -> Callable[[Script], None]:
    """A script whose step does `more`, between the backward and the update or behind them."""

    def script(script: Script) -> None:
        model, optimizer, loader, schedule = setup(script)
        accelerator, i = script.accelerator, [0]
        model.averages = copy.deepcopy(list(model.parameters()))

        def step(batch: dict[str, Tensor]) -> Any:
            loss, seen = loss_of(model, batch), None
            accelerator.backward(loss)
            if between and when(i[0]):
                seen = more(model)
            norm = accelerator.clip_grad_norm_(model.parameters(), 0.5) if clip else None
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            if not between and when(i[0]):
                seen = more(model)
            return loss, seen, norm

        made = script.graphed(step)
        for i[0], batch in enumerate(loader):
            script.write("result", made(batch))
            script.write("averages", model.averages)
            script.write_state(model, optimizer)
            script.write("rate", schedule.get_last_lr())

    return script


def seldom(i: int) -> bool:
    return i % 5 == 4


def late(i: int) -> bool:
    return i >= 10


@pytest.mark.parametrize("when", [seldom, late])
@pytest.mark.parametrize("more", BETWEEN)
def test_work_before_the_update_that_comes_later(more: More, when: Callable[[int], bool]) -> None:
    both(training(more, between=True, when=when), replays=5)


@pytest.mark.parametrize("when", [seldom, late])
@pytest.mark.parametrize("more", BEHIND)
def test_work_behind_the_update_that_comes_later(more: More, when: Callable[[int], bool]) -> None:
    both(training(more, between=False, when=when), replays=5)


def test_clipping_comes_at_its_place() -> None:
    both(training(halves_all_gradients, between=True, when=seldom, clip=True), replays=5)


@pytest.mark.parametrize("more", [drops_a_gradient, drops_gradients_of_a_part])
def test_gradients_that_are_dropped_in_each_step(more: More) -> None:
    both(training(more, between=True, when=lambda i: True), replays=51)


@pytest.mark.parametrize("skipped", ["backward", "update"])
@pytest.mark.parametrize("first", [1, 2, 3, 4, 12])
def test_calls_that_are_left_out_in_a_step(first: int, skipped: str) -> None:
    def script(script: Script) -> None:
        model, optimizer, loader, _ = setup(script)
        i = [0]

        def step(batch: dict[str, Tensor]) -> Tensor:
            skips = i[0] % 13 == first
            loss = loss_of(model, batch)
            if skips and skipped == "backward":
                return loss
            script.accelerator.backward(loss)
            if not skips:
                optimizer.step()
            optimizer.zero_grad()
            return loss

        made = script.graphed(step)
        for i[0], batch in enumerate(loader):
            script.write("loss", made(batch))
            script.write_state(model, optimizer)

    both(script, replays=20)
