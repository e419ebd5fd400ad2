"""Work that no graph can hold runs between the parts of one: the CTC loss, whose lengths are read on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from training import Diary, both, sgd

from pygraph_train.gaps import leave_gap
from pygraph_train.graphs.emulated import EmulatedEngine
from pygraph_train.step.replays import Replays

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


@pytest.mark.parametrize(
    "loss_of",
    [of_products, plainly, with_flags, of_numbers, of_modules, of_one, twice, under_autocast, only_looked_at],
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


@pytest.mark.parametrize("on_cuda", [False, True])
def test_an_error_in_a_gap_leaves_python_as_the_step_leaves_it(
    on_cuda: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the step writes before its loss is written, and nothing behind it; its random numbers are drawn once."""
    if on_cuda:  # where only gaps are known to fail, and less is put back
        made = Replays.__init__

        def make(self: Any, *arguments: Any) -> None:
            made(self, *arguments)
            self._anywhere = False

        monkeypatch.setattr(Replays, "__init__", make)

    def script(diary: Diary) -> None:
        model = Speech()
        optimizer = sgd(model)
        seen: list[str] = []

        def step_fn(batch: dict[str, Tensor]) -> Tensor:
            seen.append("before")
            loss = F.ctc_loss(model(batch["x"]), batch["y"], batch["ends"], batch["sizes"])
            seen.append("after")
            return loss

        step = diary.step(step_fn, model=model, optimizer=optimizer)
        generator = torch.Generator().manual_seed(4)
        for number in range(40):
            batch = a_batch(generator)
            if number % 10 == 7:
                batch["ends"] = batch["ends"] + 100
            try:
                diary.write("loss", step(batch))
            except RuntimeError as error:
                diary.write("error", str(error).partition("\n")[0])
            diary.write("seen", list(seen))
            diary.write_state(model, optimizer)

    both(script, replays=20, plan="{F B O}")


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
