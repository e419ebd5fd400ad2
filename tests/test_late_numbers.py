"""Numbers that a step reads of its tensors and only returns, keeps or logs: read when its graph has run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.nn.functional as F
from lightning_training import parity
from torch import Tensor, nn
from training import Diary, Net, adamw, batches, both, line_of

from pygraph_train.problems import NotLegal
from pygraph_train.step.outputs import Outputs
from pygraph_train.tracing.late_marks import LateFloat, LateInt, LateTensor
from pygraph_train.tracing.late_numbers import LateNumbers
from pygraph_train.tracing.reproducing import ReproducingTrace
from pygraph_train.tracing.silent_call import SilentCall

Batch = tuple[Tensor, Tensor]


def train(make: Callable[[nn.Module], Callable[[Batch], Any]], *, steps: int = 30, **expected: Any) -> Any:
    """Train, and compare all that is returned, and what the function keeps in `kept`."""

    def script(diary: Diary) -> None:
        model = Net()
        optimizer = adamw(model)
        fn = make(model)
        step = diary.step(fn, model=model, optimizer=optimizer)
        for batch in batches(steps):
            diary.write("returned", step(batch))
            diary.write("kept", list(getattr(fn, "kept", ())))
            diary.write_state(model, optimizer)

    return both(script, **{"replays": 20, "plan": "{F B O}", **expected})


def returned(model: nn.Module) -> Callable[[Batch], Any]:
    def step_fn(batch: Batch) -> dict[str, Any]:
        found = model(batch[0])
        loss = F.cross_entropy(found, batch[1])
        right = (found.argmax(1) == batch[1]).sum()
        return {
            "loss": loss,
            "value": loss.item(),
            "deep": [(float(loss.detach().double()), int(right)), right.item() / 8, -loss.item() * 2 + 1],
            "again": right.item(),
        }

    return step_fn


def of_changed_tensors(model: nn.Module) -> Callable[[Batch], Any]:
    """What is read is what the tensor was at that line."""

    def step_fn(batch: Batch) -> dict[str, Any]:
        loss = F.cross_entropy(model(batch[0]), batch[1])
        total = loss.detach().clone()
        first = total.item()
        total += 1
        weight = model.second.bias[0].item()  # type: ignore[index, union-attr]
        return {"loss": loss, "numbers": (first, total.item(), weight)}

    return step_fn


class Keeps:
    """Writes numbers to Python."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.kept: list[float] = []
        self.last: float | None = None
        self.steps = 0

    def __call__(self, batch: Batch) -> Tensor:
        loss = F.cross_entropy(self.model(batch[0]), batch[1])
        self.steps += 1
        self.kept.append(loss.item())
        self.last = float(loss) / 2
        return loss


def of_one_element(model: nn.Module) -> Callable[[Batch], Any]:
    def step_fn(batch: Batch) -> dict[str, Any]:
        loss = F.cross_entropy(model(batch[0]), batch[1])
        with torch.no_grad():
            norm = model.first.weight.norm(keepdim=True)  # type: ignore[operator, union-attr]
        return {"loss": loss, "norm": norm.item(), "half": norm.bfloat16().item()}

    return step_fn


def computed(model: nn.Module) -> Callable[[Batch], Any]:
    """What raises nothing is computed later, also with numbers that 64 bits do not hold."""

    def step_fn(batch: Batch) -> dict[str, Any]:
        found = model(batch[0])
        loss = F.cross_entropy(found, batch[1])
        right = (found.argmax(1) == batch[1]).sum()
        large = (right + 2**62).item()
        size = len(batch[1])
        numbers = (
            right.item() / size,
            1 - right.item() / size,
            size - right.item(),
            right.item() // 2,
            large * 4 + 1,
        )
        return {"loss": loss, "numbers": numbers, "kinds": (int(right), float(right), float(right.item()))}

    return step_fn


class KeepsMore(Keeps):
    """In containers, in objects, and a tensor that is made of a number."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.held: dict[str, Any] = {"deep": {}}
        self.made: Tensor | None = None

    def __call__(self, batch: Batch) -> Tensor:
        loss = super().__call__(batch)
        self.held["deep"]["loss"] = [loss.item(), (loss.item() * 3,)]
        self.made = torch.scalar_tensor(loss.item(), dtype=torch.float64)
        self.kept.append(self.held["deep"]["loss"][0])
        return loss


@pytest.mark.parametrize("make", [returned, of_changed_tensors, Keeps, of_one_element, computed, KeepsMore])
def test_numbers_that_nothing_depends_on_are_read_after_the_replay(make: Callable[[nn.Module], Any]) -> None:
    report = train(make)
    assert not report.fallbacks, str(report)


def test_what_depends_on_a_number_is_refused_with_the_line() -> None:
    def make(model: nn.Module) -> Callable[[Batch], Any]:
        def step_fn(batch: Batch) -> dict[str, Any]:
            loss = F.cross_entropy(model(batch[0]), batch[1])
            return {"loss": loss * (1 + 1e-3 * loss.item()), "value": loss.item()}

        return step_fn

    report = train(make, replays=1, plan=None)  # of regions and the optimizer
    assert report.steps_replayed == 0 and "read on the host" in report.fallbacks[0].reason, str(report)


def right_answers(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    found = model(batch[0])
    return F.cross_entropy(found, batch[1]), (found.argmax(1) == batch[1]).sum()


class Raises:
    """The step ends with an error before its backward, after it has written to Python."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.kept = model, list[Any]()

    def __call__(self, batch: Batch) -> Any:
        loss, right = right_answers(self.model, batch)
        self.kept.append("before")
        self.kept.append(self.of(loss, right))
        return loss

    def of(self, loss: Tensor, right: Tensor) -> Any:
        return 12 // (right % 3).item()


class RaisesForNaN(Raises):
    def of(self, loss: Tensor, right: Tensor) -> Any:
        return int(torch.where(right % 3 == 0, loss / 0 - loss / 0, loss) * 100)


class RaisesAndCatches(Raises):
    def of(self, loss: Tensor, right: Tensor) -> Any:
        try:
            return 1.0 / (right % 3).item()
        except ZeroDivisionError:
            return None


class RaisesForLarge(Raises):
    def of(self, loss: Tensor, right: Tensor) -> Any:
        return (loss.item() * 10.0 ** (right % 3 + 1).item()) ** 140


@pytest.mark.parametrize("kind", [Raises, RaisesForNaN, RaisesAndCatches, RaisesForLarge])
def test_a_number_whose_computing_may_raise_is_read_at_its_line(kind: type[Raises]) -> None:
    """A replay would raise when the step is made."""
    errors: list[int] = [0]

    def script(diary: Diary) -> None:
        model = Net()
        optimizer = adamw(model)
        fn = kind(model)
        step = diary.step(fn, model=model, optimizer=optimizer)
        for batch in batches(30):
            try:
                diary.write("returned", step(batch))
            except (ArithmeticError, ValueError) as error:
                diary.write("error", str(error))
                errors[0] += 1
            diary.write("kept", list(fn.kept))
            diary.write_state(model, optimizer)

    report = both(script, replays=1)  # of regions, or the optimizer
    assert report.steps_replayed == 0 and "read on the host" in report.fallbacks[0].reason, str(report)
    assert errors[0] or kind is RaisesAndCatches


def made_of_a_number(model: nn.Module) -> Callable[[Batch], Any]:
    def step_fn(batch: Batch) -> dict[str, Any]:
        loss = F.cross_entropy(model(batch[0]), batch[1])
        return {"loss": loss, "made": torch.scalar_tensor(loss.item(), dtype=torch.float64)}

    return step_fn


def made_and_read(model: nn.Module) -> Callable[[Batch], Any]:
    def step_fn(batch: Batch) -> dict[str, Any]:
        loss = F.cross_entropy(model(batch[0]), batch[1])
        return {"loss": loss, "read": torch.scalar_tensor(loss.item(), dtype=torch.float64).item()}

    return step_fn


def made_without_dtype(model: nn.Module) -> Callable[[Batch], Any]:
    def step_fn(batch: Batch) -> dict[str, Any]:
        loss = F.cross_entropy(model(batch[0]), batch[1])
        return {"loss": loss, "made": torch.scalar_tensor(loss.item())}

    return step_fn


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (made_of_a_number, "returns a tensor that it makes of a number"),
        (made_and_read, "read on the host"),
        (made_without_dtype, "read on the host"),
    ],
)
def test_tensors_that_are_made_of_a_number_are_refused(
    make: Callable[[nn.Module], Callable[[Batch], Any]], reason: str
) -> None:
    report = train(make, replays=1, plan=None)  # of regions, or the optimizer
    assert report.steps_replayed == 0 and reason in report.fallbacks[0].reason, str(report)


@pytest.mark.passes_without_graphs("a trace is tested itself")
def test_a_result_of_the_step_has_no_marks() -> None:
    """Where Inductor fails behind the forward, the step's result comes from a run that writes nothing to Python."""
    model = Net(dropout=0.0)
    fn, batch = Keeps(model), batches(1)[0]
    trace = ReproducingTrace(torch.device("cpu"))

    def step_fn(batch: Batch) -> dict[str, Any]:
        loss = fn(batch)
        return {"loss": loss, "value": loss.item()}

    first = trace(step_fn, (batch,), {})
    found = SilentCall(trace, reads=True)(step_fn, (batch,), {})
    assert type(found["value"]) is float and found["value"] == first["value"] and len(fn.kept) == 1
    assert type(SilentCall(trace)(step_fn, (batch,), {})["value"]) is LateFloat and len(fn.kept) == 1


@pytest.mark.passes_without_graphs("a graph is tested itself")
def test_each_tensor_is_read_once_in_a_replay() -> None:
    reads: list[str] = []

    class Reads(Tensor):
        def item(self) -> Any:
            reads.append("read")
            return super().item()

    late = LateNumbers(
        2,
        (0, 1, None),
        (0, 1, 2),
        (True, True, False),
        (None,) * 3,
        lambda x, y: (x.item(), y.item(), x.item()),
    )
    marks = [
        x.item() if isinstance(x, LateTensor) else x
        for x in late.outputs(
            [torch.ones(()).as_subclass(Reads), torch.ones(()).as_subclass(Reads)], marked=True
        )
    ]
    outputs = Outputs({"one": marks[0], "more": marks}, [])
    assert not reads
    assert outputs([]) == {"one": 1.0, "more": [1.0, 1.0, 1.0]} and len(reads) == 3


def test_a_number_that_is_not_finite() -> None:
    def make(model: nn.Module) -> Callable[[Batch], Any]:
        def step_fn(batch: Batch) -> dict[str, Any]:
            loss = F.cross_entropy(model(batch[0]), batch[1])
            seen = torch.where(loss > 1.1, loss / 0, -loss / 0 * 0)
            return {"loss": loss, "value": seen.item(), "large": torch.full((), 2**62 + 1).item()}

        return step_fn

    train(make)


class Logs(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = Net()
        self.seen: list[float] = []

    def training_step(self, batch: Batch, batch_idx: int) -> dict[str, Any]:
        found = self.net(batch[0])
        loss = F.cross_entropy(found, batch[1])
        right = (found.argmax(1) == batch[1]).float().mean()
        self.log("accuracy", right.item(), on_step=True, on_epoch=True)
        self.log("loss", float(loss), prog_bar=True)
        self.seen.append(loss.item())
        return {"loss": loss, "right": right.item()}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return adamw(self)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
def test_numbers_that_lightning_logs_and_a_module_keeps(precision: str) -> None:
    plain, graphed = parity(Logs, replays=15, plan="{F B O}", precision=precision, max_epochs=3)
    assert plain.module.seen == graphed.module.seen and len(plain.module.seen) == 33
    assert not graphed.report.fallbacks


class LogsWeighted(Logs):
    """The size of the batch is read of a tensor, and weighs the mean of the epoch."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss, right = right_answers(self.net, batch)
        self.log("loss", loss, on_epoch=True, batch_size=right.item())  # type: ignore[arg-type]
        return loss


def test_a_size_of_the_batch_that_is_read_of_a_tensor() -> None:
    _, graphed = parity(LogsWeighted, replays=10, plan="{F} {B} {O}", max_epochs=3, config={"verify": "off"})
    assert "batch_size" in graphed.report.fallbacks[0].reason


class LogsMore(Logs):
    """What is logged is computed by Python."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self.net(batch[0]), batch[1])
        self.log("perplexity", 2 * loss.item(), on_epoch=True)
        return loss


def test_numbers_of_python_that_lightning_logs() -> None:
    _, graphed = parity(LogsMore, replays=10, plan="{F} {B} {O}", max_epochs=3)
    assert "self.log(...)" in graphed.report.fallbacks[0].reason


def test_a_number_in_a_key_is_refused_with_the_line() -> None:
    class Tells(Keeps):
        def __call__(self, batch: Batch) -> Tensor:
            loss = F.cross_entropy(self.model(batch[0]), batch[1])
            self.held = {f"loss {loss.item():.3f}": 1}
            return loss

    report = train(Tells, replays=1, plan="{F} {B} {O}")
    (refused,) = report.fallbacks
    assert refused.where == line_of(Tells, "self.held"), str(report)


@pytest.mark.passes_without_graphs("marks are tested themselves")
def test_who_computes_with_a_mark_is_refused() -> None:
    uses = (
        float,
        int,
        bool,
        str,
        repr,
        abs,
        hash,
        "{}".format,
        lambda m: m + 1,
        lambda m: 1 * m,
        lambda m: m == 0,
    )
    for mark in (LateFloat(), LateInt()):
        for use in uses:
            with pytest.raises(NotLegal, match="before its graph has run"):
                use(mark)


@pytest.mark.parametrize("make", [returned, Keeps])
def test_weights_may_be_swapped_in_mid_run(make: Callable[[nn.Module], Any]) -> None:
    """Torch refuses it for tensors with weak references, which traces must not leave."""

    def script(diary: Diary) -> None:
        model = Net()
        optimizer = adamw(model)
        step = diary.step(make(model), model=model, optimizer=optimizer)
        for index, batch in enumerate(batches(30)):
            if index in (1, 12):
                weight = nn.Parameter(torch.full_like(model.first.weight, 0.1))
                torch.utils.swap_tensors(model.first.weight, weight)
            diary.write("returned", step(batch))
            diary.write_state(model, optimizer)

    both(script, replays=10)
