"""Work that no graph can hold runs between the parts of one: the CTC loss, whose lengths are read on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from training import Diary, both, sgd

from pygraph_train.gaps import leave_gap
from pygraph_train.graphs.emulated import EmulatedEngine
from pygraph_train.step.replays import Replays
from pygraph_train.torch_private.ctc_loss import ctc_loss, reader
from pygraph_train.torch_private.memory import storages

BATCH, LENGTH, LABELS, CLASSES = 3, 12, 4, 7


class Speech(nn.Module):
    """Samples of sound to logarithms of probabilities, as (time, batch, classes)."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(2, 8, 3, stride=2, padding=1)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, CLASSES)
        self.drop = nn.Dropout(0.2)

    def forward(self, x: Tensor) -> Tensor:
        found = self.norm(self.convolution(x)).relu().transpose(1, 2)
        result: Tensor = self.head(self.drop(found)).log_softmax(-1).transpose(0, 1)
        return result


def a_batch(generator: torch.Generator) -> dict[str, Tensor]:
    """With other lengths each time."""
    return {
        "x": torch.randn(BATCH, 2, 2 * LENGTH, generator=generator),
        "y": torch.randint(1, CLASSES, (BATCH, LABELS), generator=generator),
        "ends": torch.randint(LENGTH - 3, LENGTH + 1, (BATCH,), generator=generator),
        "sizes": torch.randint(1, LABELS + 1, (BATCH,), generator=generator),
    }


def train(
    loss_of: Callable[[nn.Module, dict[str, Tensor]], Any],
    *,
    steps: int = 30,
    replays: int | None = 20,
    plan: str = "{F B O}",
    make_batch: Callable[[torch.Generator], dict[str, Tensor]] = a_batch,
    **config: Any,
) -> Any:
    def script(diary: Diary) -> None:
        model = Speech()
        optimizer = sgd(model)
        step = diary.step(lambda batch: loss_of(model, batch), model=model, optimizer=optimizer)
        generator = torch.Generator().manual_seed(4)
        for _ in range(steps):
            diary.write("loss", step(make_batch(generator)))
            diary.write_state(model, optimizer)

    return both(script, replays=replays, plan=plan, **config)


def plainly(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.ctc_loss(model(batch["x"]), batch["y"], batch["ends"], batch["sizes"])


def with_flags(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """As models of transformers do it."""
    found = model(batch["x"])
    with torch.backends.cudnn.flags(enabled=False):
        assert not torch.backends.cudnn.enabled
        loss = F.ctc_loss(
            found, batch["y"], batch["ends"], batch["sizes"], reduction="sum", zero_infinity=True
        )
    assert torch.backends.cudnn.enabled
    return loss


def of_numbers(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.ctc_loss(model(batch["x"]), batch["y"], (LENGTH,) * BATCH, (LABELS,) * BATCH)


def of_modules(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """One for each sample, weighted; and the probabilities are used elsewhere, too."""
    found = model(batch["x"])
    losses = nn.CTCLoss(reduction="none")(found, batch["y"], batch["ends"], batch["sizes"])
    return (losses * torch.linspace(1, 2, BATCH)).mean() + found.square().mean() * 0.1


def of_one(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Without a batch."""
    found = model(batch["x"])[:, 0]
    return torch.ctc_loss(found, batch["y"][0], batch["ends"][0], torch.tensor(LABELS), 0, 1, False)


def twice(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    found = model(batch["x"])
    first = F.ctc_loss(found, batch["y"], batch["ends"], batch["sizes"])
    return first + F.ctc_loss(found.roll(1, 0), batch["y"], batch["ends"], batch["sizes"]).sqrt()


def of_products_under_autocast(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return of_products(model, batch)


def under_autocast(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        found = model(batch["x"])
        return F.ctc_loss(found.float(), batch["y"], batch["ends"], batch["sizes"])


def only_looked_at(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """No gradient goes through the loss."""
    found = model(batch["x"])
    with torch.no_grad():
        seen = F.ctc_loss(found, batch["y"], batch["ends"], batch["sizes"])
    return {"loss": found.square().mean(), "seen": seen}


def of_products(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """As in the rendering of radiance fields; some factors are zero."""
    found = (1 - 0.2 * model(batch["x"]).exp()) * (batch["y"].sum() % 3 != 0)
    through = torch.cumprod(found + 1e-3 * found.roll(1, -1), -1) * found.permute(2, 1, 0).cumprod(
        dim=0
    ).permute(2, 1, 0)
    products = (
        found.prod(-1).mean() + torch.prod(found + 1, dim=0, keepdim=True).mean() + found[:, 0, 0].prod()
    )
    return (through * found).square().mean() + found.cumprod(0)[-1].mean() + products


def of_made_lengths(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Targets and lengths are made by the step, and nobody else holds them."""
    found = model(batch["x"])
    return F.ctc_loss(found, batch["y"] % 3 + 1, torch.full((BATCH,), LENGTH), batch["sizes"].clamp(max=3))


def with_its_gradient(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The loss has two backwards."""
    found = model(batch["x"])
    loss = F.ctc_loss(found, batch["y"], batch["ends"], batch["sizes"])
    (gradient,) = torch.autograd.grad(loss, found, retain_graph=True)
    return loss + gradient.square().mean()


def seen_and_never_differentiated(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    found = model(batch["x"])
    seen = F.ctc_loss(found, batch["y"], batch["ends"], batch["sizes"])
    return {"loss": found.square().mean(), "seen": seen}


@pytest.mark.parametrize(
    "loss_of",
    [
        *(
            of_products,
            of_products_under_autocast,
            plainly,
            with_flags,
            of_numbers,
            of_modules,
            of_one,
            twice,
        ),
        *(under_autocast, only_looked_at, of_made_lengths, with_its_gradient, seen_and_never_differentiated),
    ],
)
def test_a_ctc_loss_is_computed_between_parts_of_the_graph(loss_of: Callable[..., Any]) -> None:
    report = train(loss_of)
    assert not report.fallbacks, str(report)


def test_switches_of_cudnn_are_those_of_the_step() -> None:
    """Also where no loss is computed on the host."""
    seen: list[bool] = []

    def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        with torch.backends.cudnn.flags(enabled=True, deterministic=True):
            found = model(batch["x"])
        seen.append(torch.backends.cudnn.deterministic)
        return found.square().mean()

    train(lambda model, batch: loss_of(model, batch))
    assert not torch.backends.cudnn.deterministic


def test_switches_that_the_step_reads_are_those_of_the_line() -> None:
    def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        factor = 1 if torch.backends.cudnn.enabled else 2
        with torch.backends.cudnn.flags(enabled=False):
            factor += 10 if torch.backends.cudnn.enabled else 20
            found = model(batch["x"])
        return found.square().mean() * factor * (3 if torch.backends.cudnn.enabled else 4)

    train(loss_of)


def test_lengths_that_torch_refuses_raise_its_error_and_training_goes_on() -> None:
    def script(diary: Diary) -> None:
        model = Speech()
        optimizer = sgd(model)
        step = diary.step(lambda batch: with_flags(model, batch), model=model, optimizer=optimizer)
        generator = torch.Generator().manual_seed(4)
        for number in range(40):
            batch = a_batch(generator)
            if number % 10 == 7:
                batch["ends"] = batch["ends"] + 100
            try:
                diary.write("loss", step(batch))
            except RuntimeError as error:
                diary.write("error", str(error).partition("\n")[0])
            diary.write("enabled", torch.backends.cudnn.enabled)
            diary.write_state(model, optimizer)

    both(script, replays=20, plan="{F B O}")


class Catches:
    """Catches what torch says about the lengths, and keeps notes."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.kept: list[Any] = []
        self.steps = 0

    def __call__(self, batch: dict[str, Tensor]) -> Tensor:
        self.steps += 1
        found = self.model(batch["x"])
        self.kept.append("before the loss")
        try:
            loss = F.ctc_loss(found, batch["y"], batch["ends"], batch["sizes"])
        except RuntimeError:
            loss = found.square().mean()
            self.kept.append("an error")
        self.kept.append(self.steps)
        return loss


class Notes(Catches):
    """Keeps notes before and after the error that it does not catch."""

    def __call__(self, batch: dict[str, Tensor]) -> Tensor:
        self.steps += 1
        found = self.model(batch["x"])
        self.kept.append("before the loss")
        loss = F.ctc_loss(found, batch["y"], batch["ends"], batch["sizes"])
        self.kept.append(self.steps)
        return loss


@pytest.mark.parametrize("kind", [Catches, Notes])
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_a_replay_that_raises_between_its_parts_is_made_as_it_is_written(
    kind: type[Catches], micro_batches: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a CUDA device, where nothing else raises in a replay, and no parameter is copied to be put back."""
    made = Replays.__init__

    def init(self: Replays, *args: Any) -> None:
        made(self, *args)
        self._may_fail = False

    monkeypatch.setattr(Replays, "__init__", init)

    def script(diary: Diary) -> None:
        model = Speech()
        optimizer = sgd(model)
        fn = kind(model)
        step = diary.step(fn, model=model, optimizer=optimizer)
        generator = torch.Generator().manual_seed(4)
        for number in range(45):
            batch = a_batch(generator)
            if number > 20 and number % 6 in (1, 3):  # when all is captured
                batch["ends"] = batch["ends"] + 100
            try:
                update = number % micro_batches == micro_batches - 1
                diary.write("loss", step(batch) if update else step.accumulate(batch))
            except RuntimeError as error:
                diary.write("error", str(error).partition("\n")[0])
            diary.write("kept", [fn.steps, *fn.kept])
            diary.write_state(model, optimizer)

    assert not both(script, replays=20, plan="{F B O}").fallbacks


@pytest.mark.parametrize("verify", ["always", "off"])
def test_an_error_that_the_step_catches_while_it_is_captured(verify: str) -> None:
    def script(diary: Diary) -> None:
        model = Speech()
        optimizer = sgd(model)
        fn = Catches(model)
        step = diary.step(fn, model=model, optimizer=optimizer)
        generator = torch.Generator().manual_seed(4)
        for number in range(40):
            batch = a_batch(generator)
            if number in (3, 4, 5, 20):  # the first capture is made in one of these
                batch["ends"] = batch["ends"] + 100
            diary.write("loss", step(batch))
            diary.write("kept", [fn.steps, *fn.kept])
            diary.write_state(model, optimizer)

    assert not both(script, replays=20, plan="{F B O}", verify=verify).fallbacks


def in_checkpoint(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    def loss_of(found: Tensor) -> Tensor:
        return F.ctc_loss(found, batch["y"], batch["ends"], batch["sizes"]) * 1.0

    return checkpoint(loss_of, model(batch["x"]), use_reentrant=False)  # type: ignore[no-any-return]


def with_second_gradient(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    found = model(batch["x"]).exp()
    loss = found.cumprod(-1).mean()
    (gradient,) = torch.autograd.grad(loss, found, create_graph=True)
    return loss + gradient.square().mean()


@pytest.mark.parametrize(
    ("loss_of", "plan", "reason"),
    [
        (in_checkpoint, "{F} {B} {O}", "reads the lengths"),
        (with_second_gradient, "F B {O}", "differentiates the gradient of torch.cumprod"),
    ],
)
def test_what_no_gap_can_compute_is_refused(loss_of: Callable[..., Any], plan: str, reason: str) -> None:
    report = train(loss_of, replays=1, plan=plan, verify="off")  # of regions or the optimizer
    assert report.steps_replayed == 0 and reason in report.fallbacks[0].reason, str(report)


def test_a_capture_holds_what_the_backward_of_a_gap_reads() -> None:
    """The memory of the targets is not given to what comes between the loss and its backward."""
    engine, given = EmulatedEngine(), torch.randn(LENGTH, BATCH, CLASSES, requires_grad=True)
    held: list[bool] = []

    def captured() -> Tensor:
        targets = torch.ones(BATCH, LABELS, dtype=torch.long)
        loss = ctc_loss(given.log_softmax(-1), targets, (LENGTH,) * BATCH, (LABELS,) * BATCH)
        saved = loss.grad_fn.saved_tensors  # type: ignore[union-attr]
        held.append(targets.data_ptr() in [x.data_ptr() for x in saved])
        return torch.autograd.grad(loss, given)[0]

    graph, _ = engine.capture(captured, gaps=True)
    assert held == [True]
    graph.close()
    engine.close()


def test_a_tensor_of_the_host_outlives_the_capture() -> None:
    """Lengths that the step makes on the host: no pool of a graph holds them."""
    lengths = torch.full((BATCH,), LENGTH)
    read, borrowed = reader(lengths, torch.device("meta")), reader(lengths, lengths.device)
    assert borrowed().data_ptr() == lengths.data_ptr()
    (memory,) = storages([lengths])
    del lengths
    assert not memory.expired()  # type: ignore[attr-defined]
    assert read().tolist() == [LENGTH] * BATCH


def test_gaps_are_of_one_capture() -> None:
    with pytest.raises(RuntimeError, match="takes no work"):
        leave_gap(lambda: None)
    engine, x, order = EmulatedEngine(), torch.zeros(3), []

    def work() -> None:
        order.append(x.tolist())
        x.mul_(10)

    def captured() -> Tensor:
        x.add_(1)
        leave_gap(work)
        return x.add(2)

    with pytest.raises(RuntimeError, match="takes no work"):
        engine.capture(captured)
    graph, result = engine.capture(captured, gaps=True)
    assert not order and x.tolist() == [0, 0, 0]
    graph.replay()
    graph.replay()
    assert order == [[1, 1, 1], [11, 11, 11]]
    assert x.tolist() == [110, 110, 110] and result.tolist() == [112, 112, 112]
    graph.close()
    engine.close()


def test_a_capture_that_is_not_compared_is_replayed_at_once() -> None:
    """A step without a graph beside it would need its memory twice."""
    report = train(plainly, verify="off", steps=20, replays=10)
    assert report.first_replay_step == report.captures[0].step
