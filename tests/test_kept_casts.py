"""One autocast block around a whole loop: plain training goes on with the casts of its first step."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager

import pytest
import torch
from torch import Tensor, nn
from training import Diary, adamw, batches, both


def block(*, cache: bool = True) -> AbstractContextManager[None]:
    return torch.autocast("cpu", torch.bfloat16, cache_enabled=cache)


def train(s: Diary, around_loop: AbstractContextManager[None], *, in_step: bool, micro: int = 1) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = adamw(model, lr=0.1)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(x).float(), y)

    step = s.step(loss_of, model=model, optimizer=optimizer)
    with around_loop:
        for x, y in batches(30):
            with block() if in_step else contextlib.nullcontext():
                for _ in range(micro - 1):
                    s.write("loss", step.accumulate(x, y))
                s.write("loss", step(x, y))
    s.write_state(model, optimizer)


@pytest.mark.quick
def test_a_block_around_the_loop_is_noticed() -> None:
    report = both(
        lambda s: train(s, block(), in_step=False), refused="one autocast block is around several steps"
    )
    assert "Enter autocast in each step" in str(report)


@pytest.mark.quick
def test_autocast_that_is_switched_on_for_good_is_noticed() -> None:
    """Without any block its cache is never emptied."""

    @contextlib.contextmanager
    def switched_on() -> Iterator[None]:
        torch.set_autocast_enabled("cpu", True)
        try:
            yield
        finally:
            torch.set_autocast_enabled("cpu", False)
            torch.clear_autocast_cache()

    both(
        lambda s: train(s, switched_on(), in_step=False), refused="one autocast block is around several steps"
    )


@pytest.mark.quick
def test_a_block_without_a_cache_may_be_around_the_loop() -> None:
    both(lambda s: train(s, block(cache=False), in_step=False), replays=20)


@pytest.mark.quick
def test_each_step_may_have_a_block() -> None:
    both(lambda s: train(s, contextlib.nullcontext(), in_step=True), replays=20)


def test_the_micro_batches_of_an_update_may_have_one() -> None:
    both(lambda s: train(s, contextlib.nullcontext(), in_step=True, micro=3), replays=60)
