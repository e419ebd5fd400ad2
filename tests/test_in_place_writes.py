"""Tensors that a step changes in place, which a replay changes as well, and tensors that it replaces."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training import Diary, adamw, batches, both, loss_of


class Remembers(nn.Module):
    """What its forward does to a buffer and to an attribute is given by name."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 3)
        self.register_buffer("count", torch.zeros(()))
        self.mean, self.other = torch.zeros(3), torch.ones(3)
        self.change: Callable[[Tensor], None] = getattr(self, kind)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        self.change(h.detach())
        return h + 0.01 * self.count - 0.1 * self.mean * self.other

    def counts(self, h: Tensor) -> None:
        self.count += 1

    def averages(self, h: Tensor) -> None:
        self.count *= 0.9
        self.count += 0.1 * h.mean()

    def attribute(self, h: Tensor) -> None:
        self.mean += h.mean(0)
        self.mean /= 2

    def entry(self, h: Tensor) -> None:
        self.mean[0] += 1

    def returned(self, h: Tensor) -> None:
        self.mean = self.mean.lerp_(h.mean(0), 0.1)

    def new_buffer(self, h: Tensor) -> None:
        self.count = self.count + 1

    def new_attribute(self, h: Tensor) -> None:
        self.mean = self.mean * 0.9

    def swapped(self, h: Tensor) -> None:
        self.mean, self.other = self.other, self.mean

    def aliased(self, h: Tensor) -> None:
        self.other = self.mean

    def both_ways(self, h: Tensor) -> None:
        self.count += 1
        self.count = self.count * 1.0


def script_of(kind: str) -> Callable[[Diary], None]:
    def script(diary: Diary) -> None:
        model = Remembers(kind)
        optimizer = adamw(model)
        step = diary.step(loss_of(model), model=model, optimizer=optimizer)
        for index, batch in enumerate(batches(50)):
            diary.write("loss", step(batch))
            diary.write("attributes", [model.mean, model.other])
            diary.write_state(model, optimizer)
            if index == 30:
                model.count.zero_()
            if index == 40:
                model.mean = torch.zeros(3)

    return script


@pytest.mark.parametrize("kind", ["counts", "averages", "attribute", "entry", "returned"])
def test_a_tensor_that_the_step_changes_in_place(kind: str) -> None:
    both(script_of(kind), replays=35, plan="{F B O}")


@pytest.mark.parametrize("kind", ["new_buffer", "new_attribute", "swapped", "aliased"])
def test_another_tensor_in_the_same_place(kind: str) -> None:
    both(script_of(kind), replays=35, plan="{F B O}")


def test_another_tensor_in_the_place_of_one_that_was_changed() -> None:
    report: Any = both(script_of("both_ways"), replays=20, plan="{F} {B} {O}")
    assert report.steps_replayed == 0
    problem = next(f for f in report.fallbacks if ".count is changed in place by the step" in f.reason)
    assert problem.where is not None and "test_in_place_writes.py" in problem.where, str(report)


class Codebook(nn.Module):
    """Vectors that follow what was assigned to them, changed through `.data`, as VQ-VAEs have them."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(6, 4), nn.Linear(4, 6)
        self.register_buffer("vectors", torch.randn(8, 4))
        self.register_buffer("mean", self.vectors.clone())

    def forward(self, x: Tensor) -> Tensor:
        encoded = self.encoder(x)
        nearest = torch.cdist(encoded.detach(), self.vectors).argmin(1)
        quantized = self.vectors[nearest]
        with torch.no_grad():
            chosen = nn.functional.one_hot(nearest, 8).float()  # which asserts that the classes exist
            self.mean.mul_(0.9).add_(chosen.T @ encoded, alpha=0.1)
            self.vectors.data.copy_(self.mean)
        decoded = self.decoder(encoded + (quantized - encoded).detach())
        return nn.functional.mse_loss(decoded, x) + nn.functional.mse_loss(encoded, quantized.detach())


def test_regions_of_a_codebook_that_changes_through_its_data():
    def script(diary: Diary) -> None:
        model = Codebook()
        optimizer = adamw(model)
        step = diary.step(lambda batch: model(batch[0]), model=model, optimizer=optimizer)
        for batch in batches(20):
            diary.write("loss", step(batch))
            diary.write_state(model, optimizer)

    both(script, replays=15)
