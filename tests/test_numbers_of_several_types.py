"""Meters whose numbers may be integers, floats or NumPy's, and meters in other classes of dicts."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from typing import Any

import numpy as np
import pytest
from test_late_arithmetic import Batch, Meters, train
from torch import Tensor, nn


class Regioned(Meters):
    """What is done to the list keeps the step out of one graph, but not its parts."""

    def meter(self, loss: Tensor, right: Tensor, batch: Batch) -> Any:
        self.kept.insert(0, 1)
        return self.of(loss, right)

    def of(self, loss: Tensor, right: Tensor) -> Any:
        raise NotImplementedError


class Chosen(Regioned):
    def of(self, loss: Tensor, right: Tensor) -> Any:
        return min(1, loss.item()), max(1, loss.item()), max(right.item(), 1.5)


class ChosenOfList(Regioned):
    def of(self, loss: Tensor, right: Tensor) -> Any:
        return max([loss.item(), 1]), min((right.item(), 2.0))


class ChosenOfSizes(Regioned):
    def meter(self, loss: Tensor, right: Tensor, batch: Batch) -> Any:
        self.kept.insert(0, 1)
        return min(len(batch[0]), 6.5), max([len(batch[0]), 6.5])


class OfNumPy(Regioned):
    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.factor, self.offset = np.float64(0.5), np.int64(3)

    def of(self, loss: Tensor, right: Tensor) -> Any:
        return float(loss.item() * self.factor), type(right.item() + self.offset).__name__


class SumOfNumPy(Regioned):
    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.total = np.float64(0)

    def of(self, loss: Tensor, right: Tensor) -> Any:
        self.total += loss.item()

    def reset(self) -> None:
        self.total = np.float64(0)


@pytest.mark.parametrize("kind", [Chosen, ChosenOfList, OfNumPy, SumOfNumPy])
def test_numbers_keep_their_types_where_a_step_is_no_graph(kind: type[Meters]) -> None:
    train(kind, steps=30, replays=10, plan=None)


def test_the_lesser_of_a_size_and_a_float_keeps_its_type() -> None:
    train(ChosenOfSizes, steps=60, sizes=(8, 6), replays=10, plan=None)


class OfDefaultDict(Meters):
    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.sums: dict[str, Any] = defaultdict(float)

    def meter(self, loss: Tensor, right: Tensor, batch: Batch) -> Any:
        self.sums["loss"] += loss.item()
        self.sums["steps"] += 1

    def reset(self) -> None:
        self.sums.clear()


class OfOrderedDict(Meters):
    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.sums: dict[str, Any] = OrderedDict(loss=0.0)

    def meter(self, loss: Tensor, right: Tensor, batch: Batch) -> Any:
        self.sums["loss"] += loss.item()
        self.sums.update(right=right.item())


@pytest.mark.parametrize("kind", [OfDefaultDict, OfOrderedDict])
def test_meters_in_other_dicts(kind: type[Meters]) -> None:
    report = train(kind)
    assert not report.fallbacks, str(report)
