"""Meters: Python computes with a number that a step reads of its tensors, when the graph has run."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from training import Diary, Net, adamw, batches, both, line_of

from pygraph_train.tracing import late_numbers
from pygraph_train.tracing.late_numbers import on_host

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


class OnlyReturned(Meters):
    """Sizes change with the shape of the batch."""

    def meter(self, loss: Tensor, right: Tensor, batch: Batch) -> Any:
        return (
            round(loss.item(), 2),
            right.item() / len(batch[0]),
            (loss.item() + right.item()) * len(batch[0]),
        )


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


class Smoothed:
    def __init__(self) -> None:
        self.window: deque[Any] = deque(maxlen=7)
        self.total, self.count = 0.0, 0

    def update(self, value: Any, n: int = 1) -> None:
        self.window.append(value)
        self.count += n
        self.total += value * n


class Logger(Meters):
    """As the training scripts of vision models have it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.meters = {"loss": Smoothed(), "accuracy": Smoothed()}

    def meter(self, loss: Tensor, right: Tensor, batch: Batch) -> Any:
        for name, value in {"loss": loss, "accuracy": 100.0 * right / 8}.items():
            number = value.item()
            assert isinstance(number, float | int)
            self.meters[name].update(number, n=8)

    def state(self) -> Any:
        return [(list(x.window), x.total, x.count) for x in self.meters.values()]


class OfVariables(Meters):
    """One of a closure, and an item of a list."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        total, self.sums = 0.0, [0.0, 0]

        def add(number: float) -> float:
            nonlocal total
            total += number
            return total

        self.add = add

    def meter(self, loss: Tensor, right: Tensor, batch: Batch) -> Any:
        self.sums[1] += int(right)
        return self.add(loss.item())

    def state(self) -> Any:
        return list(self.sums)


class NotFinite(Meters):
    def meter(self, loss: Tensor, right: Tensor, batch: Batch) -> Any:
        seen = torch.where(loss > 1.1, loss / 0, -loss / 0 * 0)
        self.total += seen.item()
        self.count = max(self.count, loss.item())  # type: ignore[assignment]
        return min(1.0, seen.item()), round(seen.item(), 2), f"{seen.item():.3f}"


KINDS = [
    OnlyReturned,
    Sum,
    Weighted,
    Counts,
    Average,
    OfObjects,
    OfDict,
    Returned,
    Rounded,
    Best,
    NotFinite,
    Texts,
    Logger,
    OfVariables,
]


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


@pytest.mark.parametrize("kind", [OnlyReturned, Sum, Weighted, OfObjects, Returned])
def test_meters_of_steps_of_several_shapes(kind: Callable[[nn.Module], Meters]) -> None:
    train(kind, steps=80, sizes=(8, 8, 6, 8, 5), replays=40)


@pytest.mark.parametrize("kind", [OnlyReturned, Sum, Weighted, OfObjects, Returned])
def test_meters_of_steps_of_many_shapes(kind: Callable[[nn.Module], Meters]) -> None:
    train(kind, steps=80, sizes=(8, 7, 6, 4, 5, 3), replays=20)


class Raises(Meters):
    """The operation raises for some losses, and the step ends there."""

    def meter(self, loss: Tensor, right: Tensor, batch: Batch) -> Any:
        self.total += 1
        self.total += self.of(loss, right)

    def of(self, loss: Tensor, right: Tensor) -> Any:
        return 12 / (right % 3).item()


class RaisesForLarge(Raises):
    def of(self, loss: Tensor, right: Tensor) -> Any:
        return math.exp(loss.item() * 10.0 ** int(right % 4))


class RaisesForInfinite(Raises):
    def of(self, loss: Tensor, right: Tensor) -> Any:
        return round(torch.where(right % 3 == 0, loss / 0, loss).item())


class RaisesForZeroCount(Raises):
    """The divisor is known before the step."""

    def of(self, loss: Tensor, right: Tensor) -> Any:
        self.count = (self.count + 1) % 12
        return loss.item() / self.count


class RaisesForGreatIntegers(Raises):
    """No float holds the number from some step on."""

    def of(self, loss: Tensor, right: Tensor) -> Any:
        self.count = self.count * 2**50 + 1
        self.kept.append(1)
        return loss.item() / self.count


@pytest.mark.parametrize(
    ("kind", "replays"),
    [
        *((k, 0) for k in (Raises, RaisesForLarge, RaisesForInfinite)),
        (RaisesForZeroCount, 15),
        (RaisesForGreatIntegers, 3),
    ],
)
def test_what_may_raise_is_done_at_its_line(kind: type[Raises], replays: int) -> None:
    """A replay would raise when the step is made."""
    errors: list[int] = [0]

    def script(diary: Diary) -> None:
        model = Net()
        optimizer = adamw(model)
        fn = kind(model)
        step = diary.step(fn, model=model, optimizer=optimizer)
        for batch in batches(40):
            try:
                diary.write("returned", step(batch))
            except (ArithmeticError, ValueError) as error:
                diary.write("error", str(error))
                errors[0] += 1
            diary.write("kept", fn.state())
            diary.write_state(model, optimizer)

    report = both(script, replays=1)  # of regions, or the optimizer
    assert report.steps_replayed >= replays and errors[0], str(report)
    assert replays or (report.steps_replayed == 0 and report.fallbacks[0].where == line_of(kind, "return"))


class Decides(Meters):
    def meter(self, loss: Tensor, right: Tensor, batch: Batch) -> Any:
        self.total += loss.item()
        return 1 if self.total > 20.0 else 2


class IsIn(Meters):
    def meter(self, loss: Tensor, right: Tensor, batch: Batch) -> Any:
        self.total += right.item()
        return 40 in [self.total, 3], self.total in {1: 0, 40: 1}


class IntoTensor(Meters):
    def __call__(self, batch: Batch) -> Any:
        loss = F.cross_entropy(self.model(batch[0]), batch[1])
        self.total = 0.5 * self.total + loss.item()
        return loss * self.total


class IntoTensorLater(Meters):
    """As a running mean of losses weighs the next one: it is known before the step."""

    def __call__(self, batch: Batch) -> Any:
        loss = F.cross_entropy(self.model(batch[0]), batch[1]) * (1 + 1e-3 * self.total)
        self.total = 0.5 * self.total + loss.item()
        return loss


@pytest.mark.parametrize(
    ("kind", "line"), [(Decides, "if self.total"), (IsIn, "in [self"), (IntoTensor, "self.total = 0.5")]
)
def test_what_depends_on_such_a_number_is_refused_with_the_line(kind: type[Meters], line: str) -> None:
    report = train(kind, replays=1, plan=None)  # of regions, or the optimizer
    refused = report.fallbacks[0]
    assert report.steps_replayed == 0 and refused.where == line_of(kind, line) and refused.fix, str(report)
    assert "read on the host" in refused.reason or "does not know" in refused.reason, str(report)


def test_a_number_that_the_next_step_takes_into_a_tensor() -> None:
    assert not train(IntoTensorLater).fallbacks


def test_meters_of_accumulated_gradients() -> None:
    def script(diary: Diary) -> None:
        model = Net()
        optimizer = adamw(model)
        fn = OfObjects(model)
        step = diary.step(fn, model=model, optimizer=optimizer)
        for index, batch in enumerate(batches(80)):
            run = step if index % 2 else step.accumulate
            diary.write("returned", run(batch))
            diary.write("kept", fn.state())
            diary.write_state(model, optimizer)

    assert not both(script, replays=60, plan="{F B O}").fallbacks


def test_one_meter_of_two_models() -> None:
    def script(diary: Diary) -> None:
        models = [Net(), Net()]
        meters = [OfObjects(model) for model in models]
        meters[1].losses = meters[0].losses
        optimizers = [adamw(model) for model in models]
        steps = [
            diary.step(fn, model=model, optimizer=optimizer)
            for fn, model, optimizer in zip(meters, models, optimizers, strict=True)
        ]
        for batch in batches(40):
            for fn, step in zip(meters, steps, strict=True):
                diary.write("returned", step(batch))
                diary.write("kept", fn.state())
        for model, optimizer in zip(models, optimizers, strict=True):
            diary.write_state(model, optimizer)

    assert not both(script, replays=30, plan="{F B O}").fallbacks


class Fails(Sum):
    """A batch with a label that there is not."""

    def meter(self, loss: Tensor, right: Tensor, batch: Batch) -> Any:
        super().meter(loss, right, batch)
        self.count += 1
        return F.nll_loss(torch.zeros(len(batch[1]), 3), batch[1])


def test_a_batch_that_fails_after_the_meter() -> None:
    errors = [0]

    def script(diary: Diary) -> None:
        model = Net()
        optimizer = adamw(model)
        fn = Fails(model)
        fn.model = nn.Sequential(model, nn.Linear(3, 9))
        step = diary.step(fn, model=fn.model, optimizer=optimizer)
        for index, (x, y) in enumerate(batches(40)):
            try:
                diary.write("returned", step((x, y + (5 if index % 9 == 8 else 0))))
            except IndexError as error:
                diary.write("error", str(error))
                errors[0] += 1
            diary.write("kept", fn.state())
            diary.write_state(model, optimizer)

    both(script, replays=20, plan="{F B O}")
    assert errors[0] == 8


@pytest.mark.passes_without_graphs("a function is tested itself")
def test_the_host_waits_once_for_several_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[Any] = []

    class OnDevice:
        is_cuda, device = True, "cuda:0"

        def to(self, device: str, *, non_blocking: bool) -> str:
            done.append((device, non_blocking))
            return "copy"

    class Stream:
        def synchronize(self) -> None:
            done.append("waits")

    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream())
    assert on_host([OnDevice(), OnDevice()]) == ["copy", "copy"]  # type: ignore[list-item]
    assert done == [("cpu", True), ("cpu", True), "waits"]


def test_numbers_of_a_replay_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether they are returned, written to Python, or both."""
    reads: list[int] = []

    def counted(tensors: Any) -> Any:
        reads.append(len(tensors))
        return on_host(tensors)

    monkeypatch.setattr(late_numbers, "on_host", counted)
    report = train(Returned)
    assert len(reads) < 1.3 * report.steps and set(reads) == {1}, (len(reads), report.steps)
