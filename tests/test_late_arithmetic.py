"""Meters: Python computes with a number that a step reads of its tensors, when the graph has run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from training import Diary, Net, adamw, batches, both

Batch = tuple[Tensor, Tensor]


class Meters:
    """A step that keeps numbers. Subclasses say how."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.total: Any = 0.0
        self.count = 0
        self.kept: list[Any] = []

    def __call__(self, batch: Batch) -> Any:
        found = self.model(batch[0])
        loss = F.cross_entropy(found, batch[1])
        result = self.meter(loss, (found.argmax(1) == batch[1]).sum(), batch)
        return loss if result is None else {"loss": loss, "result": result}

    def meter(self, loss: Tensor, right: Tensor, batch: Batch) -> Any:
        raise NotImplementedError

    def state(self) -> Any:
        return {k: v for k, v in vars(self).items() if k != "model"}

    def reset(self) -> None:
        self.total, self.count = 0, 0


class Sum(Meters):
    def meter(self, loss: Tensor, right: Tensor, batch: Batch) -> Any:
        self.total += loss.item()


class Weighted(Meters):
    def meter(self, loss: Tensor, right: Tensor, batch: Batch) -> Any:
        self.total += loss.item() * batch[0].size(0)
        self.count += batch[0].size(0)


class Counts(Meters):
    """Also integers that 64 bits do not hold."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.count, self.large = 2**62, 2**90

    def meter(self, loss: Tensor, right: Tensor, batch: Batch) -> Any:
        self.count += int(right)
        self.large -= right.item()
        return self.large


class Average(Meters):
    """Exponential."""

    def meter(self, loss: Tensor, right: Tensor, batch: Batch) -> Any:
        self.total = 0.9 * self.total + 0.1 * loss.item()


class FirstIsNone(Meters):
    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.total = None

    def meter(self, loss: Tensor, right: Tensor, batch: Batch) -> Any:
        self.total = loss.item() if self.total is None else 0.9 * self.total + 0.1 * loss.item()

    def reset(self) -> None:
        self.total = None


class AverageMeter:
    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.val, self.avg, self.sum, self.count = 0, 0, 0, 0

    def update(self, val: Any, n: int = 1) -> None:
        self.val = val
        self.sum += val * n
        self.count += n
        self.avg = self.sum / self.count


class OfObjects(Meters):
    """One of them has two names."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.losses, self.accuracies = AverageMeter(), AverageMeter()
        self.meters = {"loss": self.losses, "more": AverageMeter()}

    def meter(self, loss: Tensor, right: Tensor, batch: Batch) -> Any:
        n = len(batch[1])
        self.losses.update(loss.item(), n)
        self.accuracies.update(100.0 * right.item() / n, n)
        self.meters["loss"].update(2 * loss.item())
        return self.losses.avg

    def reset(self) -> None:
        self.losses.reset()
        self.accuracies.reset()

    def state(self) -> Any:
        return [vars(x).copy() for x in (self.losses, self.accuracies, *self.meters.values())]


class OfDict(Meters):
    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.sums = {"loss": 0.0, "right": 0}

    def meter(self, loss: Tensor, right: Tensor, batch: Batch) -> Any:
        self.sums["loss"] += loss.item()
        self.sums["right"] += right.item()

    def reset(self) -> None:
        self.sums["loss"] = 0.0


class Returned(Meters):
    """Numbers that change with each step are in the results."""

    def meter(self, loss: Tensor, right: Tensor, batch: Batch) -> Any:
        self.total += loss.item()
        self.count += len(batch[1])
        total = self.total / self.count
        return {
            "mean": total,
            "deep": [self.total, (round(total, 3),)],
            "text": f"{total:.4f} of {self.count}",
        }


class Rounded(Meters):
    def meter(self, loss: Tensor, right: Tensor, batch: Batch) -> Any:
        self.kept.append(round(loss.item(), 4))
        self.total = round(100.0 * right.item() / len(batch[0]), ndigits=2)
        return round(right.item()), round(right.item(), 1), loss.item() // 0.25, loss.item() % 0.5


class Best(Meters):
    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.total, self.most = float("inf"), 0

    def meter(self, loss: Tensor, right: Tensor, batch: Batch) -> Any:
        self.total = min(self.total, loss.item())
        self.most = max(self.most, int(right))
        return right.item() / max(int(right), 1), max(0.5, loss.item(), right.item())

    def reset(self) -> None:
        self.total = float("inf")


class Texts(Meters):
    def meter(self, loss: Tensor, right: Tensor, batch: Batch) -> Any:
        value = loss.item()
        self.total = f"loss {value:.4f}, {right.item():>4d}"
        self.kept.append(f"{value}")
        return f"{value!r:>30}", "{:.2f}".format(value), str(right.item()), f"{12.5 * right.item():.1f}%"  # noqa: UP032

    def reset(self) -> None:
        self.total = ""


class NotFinite(Meters):
    def meter(self, loss: Tensor, right: Tensor, batch: Batch) -> Any:
        seen = torch.where(loss > 1.1, loss / 0, -loss / 0 * 0)
        self.total += seen.item()
        self.count = max(self.count, loss.item())  # type: ignore[assignment]
        return min(1.0, seen.item()), round(seen.item(), 2), f"{seen.item():.3f}"


KINDS = [Sum, Weighted, Counts, Average, OfObjects, OfDict, Returned, Rounded, Best, NotFinite, Texts]


def train(kind: Callable[[nn.Module], Meters], *, steps: int = 50, sizes: Any = (8,), **expected: Any) -> Any:
    """Train with resets now and then, and compare all that is returned and kept."""

    def script(diary: Diary) -> None:
        model = Net()
        optimizer = adamw(model)
        fn = kind(model)
        step = diary.step(fn, model=model, optimizer=optimizer)
        for index, (x, y) in enumerate(batches(steps)):
            if index and index % 17 == 0:
                fn.reset()
            size = sizes[index % len(sizes)]
            diary.write("returned", step((x[:size], y[:size])))
            diary.write("kept", fn.state())
            diary.write_state(model, optimizer)

    return both(script, **{"replays": 35, "plan": "{F B O}", **expected})


@pytest.mark.parametrize("kind", KINDS)
def test_meters_are_those_of_plain_training(kind: Callable[[nn.Module], Meters]) -> None:
    report = train(kind)
    assert not report.fallbacks, str(report)


def test_a_meter_that_begins_with_none() -> None:
    assert not train(FirstIsNone).fallbacks


@pytest.mark.parametrize("kind", [Sum, Weighted, OfObjects, Returned])
def test_meters_of_steps_of_several_shapes(kind: Callable[[nn.Module], Meters]) -> None:
    train(kind, steps=80, sizes=(8, 8, 6, 8, 5), replays=40)


@pytest.mark.parametrize("kind", [Sum, Weighted, OfObjects, Returned])
def test_meters_of_steps_of_many_shapes(kind: Callable[[nn.Module], Meters]) -> None:
    train(kind, steps=80, sizes=(8, 7, 6, 4, 5, 3), replays=20)
