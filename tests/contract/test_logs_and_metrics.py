"""What a `training_step` of Lightning logs and measures, in the idioms of torchmetrics."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from torch import Tensor

from pygraph_train.torch_private.stock_dynamo import traces

from .compare import Run, same_as_plain
from .frameworks import fit, loader, memory_logger
from .models import batches, cross_entropy

pytest.importorskip("lightning.pytorch")
torchmetrics = pytest.importorskip("torchmetrics")

from .lightning_module import Module  # noqa: E402


class Measured(Module):
    """Has the accuracy of an epoch."""

    def __init__(self, idiom: str, average: str) -> None:
        super().__init__()
        self.idiom = idiom
        self.accuracy = torchmetrics.Accuracy("multiclass", num_classes=3, average=average)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        out = self.net(batch[0])
        loss = cross_entropy(out, batch[1])
        if self.idiom == "forward and log":
            self.accuracy(out, batch[1])
            self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        elif self.idiom == "value":
            self.log("accuracy", self.accuracy(out, batch[1]), prog_bar=True)
        else:
            self.accuracy.update(out, batch[1])
        self.log("loss", loss)
        return loss

    def on_train_epoch_end(self) -> None:
        if self.idiom == "update and compute":
            self.log("accuracy", self.accuracy.compute())
            self.accuracy.reset()


@pytest.mark.parametrize(
    ("idiom", "average"),
    [
        ("forward and log", "micro"),
        ("forward and log", "macro"),
        ("value", "micro"),
        ("update and compute", "macro"),
    ],
)
@pytest.mark.quick
@same_as_plain(replays=8)
def test_torchmetrics_in_a_training_step(run: Run, idiom: str, average: str) -> None:
    """No graph holds the counts by class of a macro average."""
    measured = Measured(idiom, average)
    before = traces()
    fit(run, measured, loader(batches(14)), max_epochs=2, logger=memory_logger()())
    most = (
        2 if average == "macro" else 1
    )  # a counter that changes, and functions of the metric, take no further ones
    assert traces() - before <= most
    run.note("state of the metric", [measured.accuracy.tp, measured.accuracy.update_count])


@same_as_plain(replays=8)
def test_logs_on_some_batches_only(run: Run) -> None:
    seen: list[Any] = []

    class Rarely(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            out = self.net(batch[0])
            loss = cross_entropy(out, batch[1])
            if batch_idx % 10 == 0:
                self.log("rare", loss, on_step=True)
                seen.append(loss.item())
            self.log_dict({"a": loss, "b": out.detach().mean()}, on_step=False, on_epoch=True)
            seen.append(self.global_step)
            return loss

    fit(run, Rarely(), loader(batches(40)), logger=memory_logger()())
    run.note("seen", seen)


@same_as_plain(replays=12)
def test_batches_that_are_objects(run: Run) -> None:
    @dataclasses.dataclass
    class Example:
        x: Tensor
        y: Tensor

    class OfObjects(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = cross_entropy(self.net(batch.x), batch.y)
            self.log("loss", loss, batch_size=len(batch.x))
            return loss

    fit(run, OfObjects(), loader([Example(*batch) for batch in batches()]))


@same_as_plain(refused="the step skips its update where it returns None")
def test_a_step_that_returns_none_skips_its_update(run: Run) -> None:
    class Skipping(Module):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = cross_entropy(self.net(batch[0]), batch[1])
            return None if batch_idx % 7 == 3 and loss.item() > 0 else loss

    trainer = fit(run, Skipping(), loader(batches(32)))
    if run.ours:
        notes = trainer.callbacks[0].report().to_dict()["notes"]
        assert any("training_step returned None" in note for note in notes)
