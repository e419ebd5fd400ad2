"""A step that sets the learning rate of its own update: the update has the new one, as in plain training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import accelerate_training
import fabric_training
import pytest
import torch
import training
from accelerate_training import fresh  # noqa: F401
from lightning_training import Module, parity
from replays import text_of
from torch import Tensor
from training import Diary, Net, adamw, batches, loss_of

Change = Callable[[torch.optim.Optimizer, int], None]


def rate(optimizer: torch.optim.Optimizer, i: int) -> None:
    """A warm-up."""
    for group in optimizer.param_groups:
        group["lr"] = 1e-2 * min(1.0, (i + 1) / 20)


def decay(optimizer: torch.optim.Optimizer, i: int) -> None:
    """Changes once in a while."""
    optimizer.param_groups[0]["weight_decay"] = 0.1 * (i // 10)


changes = pytest.mark.parametrize("change", [rate, decay], ids=lambda change: change.__name__)


@changes
@pytest.mark.parametrize("every", [1, 2], ids=["", "accumulated"])
def test_a_graphed_step(change: Change, every: int) -> None:
    def script(diary: Diary) -> None:
        model, i = Net(), [0]
        optimizer = adamw(model)

        def step_fn(batch: tuple[Tensor, Tensor]) -> Tensor:
            change(optimizer, i[0])
            return loss_of(model)(batch)

        step = diary.step(step_fn, model=model, optimizer=optimizer)
        for index, batch in enumerate(batches(40)):
            i[0] = index
            diary.write("loss", step(batch) if index % every == every - 1 else step.accumulate(batch))
            diary.write_state(model, optimizer)

    report = training.both(script, replays=20)
    assert "a parameter group of an optimizer, is written by the step" in text_of(report)
    assert f"{__file__.rpartition('/')[2]}:" in text_of(report)


@changes
def test_a_graphed_step_of_accelerate(change: Change) -> None:
    def script(script: accelerate_training.Script) -> None:
        model, optimizer, loader, _ = accelerate_training.setup(script)
        i = [0]

        def step(batch: dict[str, Tensor]) -> Tensor:
            change(optimizer.optimizer, i[0])
            loss = accelerate_training.loss_of(model, batch)
            script.accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            return loss

        made = script.graphed(step)
        for i[0], batch in enumerate(loader):
            script.write("loss", made(batch))
            script.write_state(model, optimizer)

    accelerate_training.both(script, replays=60)


@changes
def test_a_graphed_step_of_fabric(change: Change) -> None:
    def script(script: fabric_training.Script) -> None:
        model, optimizer, loader, _ = fabric_training.setup(script)
        i = [0]

        def loss(batch: list[Tensor]) -> Tensor:
            change(optimizer.optimizer, i[0])
            return fabric_training.loss_of(model, batch)

        step = script.whole(loss, model, optimizer)
        for i[0], batch in enumerate(loader):
            script.write("loss", step(batch))
            script.write_state(model, optimizer)

    fabric_training.both(script, replays=60)


@changes
@pytest.mark.parametrize("manual", [False, True], ids=["", "manual"])
def test_a_step_of_lightning(change: Change, manual: bool) -> None:
    class Changes(Module):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = not manual

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            optimizer = self.trainer.optimizers[0]
            change(optimizer, batch_idx)
            loss = self.loss(batch)
            if manual:
                optimizer.zero_grad()
                self.manual_backward(loss)
                optimizer.step()
            return loss

    parity(Changes, replays=20)
