"""Values that a step computes decide its way, in steps that also keep numbers for later or have modules in gaps."""

from __future__ import annotations

import gc
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_islands import CountsLater, Experts, ExpertsApart, Model, a_batch, adam
from test_islands import train as train_islands
from test_other_ways import taken_back
from torch import Tensor, nn
from training import Diary, Net, adamw, batches, both, line_of

from pygraph_train.step.ungraphed import UngraphedSteps
from pygraph_train.torch_private.islands import BackwardChanged, IslandRun, Unlike
from pygraph_train.torch_private.late_decisions import OtherWay

__all__ = ["taken_back"]

Batch = tuple[Tensor, Tensor]


class Meters:
    """A step that keeps numbers, and decides by them."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.total, self.average = 0.0, 0.0
        self.count, self.skipped = 0, 0
        self.best = 1e9
        self.kept: list[Any] = []

    def __call__(self, batch: Batch) -> Any:
        loss = F.cross_entropy(self.model(batch[0]), batch[1]) * batch[0].abs().max()
        return self.decide(loss, len(batch[0]))

    def decide(self, loss: Tensor, rows: int) -> Any:
        raise NotImplementedError

    def state(self) -> Any:
        return {k: list(v) if k == "kept" else v for k, v in vars(self).items() if k != "model"}


class Skips(Meters):
    """The number that decides is the one that is added."""

    def decide(self, loss: Tensor, rows: int) -> Any:
        value = loss.item()
        if value > 20:
            self.skipped += 1
            return loss * 0.0
        self.total += value * rows
        self.count += rows
        return {"loss": loss, "mean": self.total / self.count}


class AddsFirst(Meters):
    """What was added before the condition is taken back with the replay, and added again."""

    def decide(self, loss: Tensor, rows: int) -> Any:
        self.total += loss.item()
        self.kept.append(round(loss.item(), 3))
        if not math.isfinite(loss.item() * 1e307):
            self.kept.append("large")
            loss = loss / 100
        self.average = 0.9 * self.average + 0.1 * loss.item()
        return loss


class Raises(Meters):
    def decide(self, loss: Tensor, rows: int) -> Any:
        self.total += max(loss.item(), 0.5)
        if loss > 20:
            raise ValueError(f"diverged: {loss.item():.2f}")
        self.kept.append(f"{loss.item():.4f}")
        return {"loss": loss, "text": f"{self.total}"}


class Divides(Meters):
    """Python raises an exception where the divisor is zero. The report names the decision."""

    def decide(self, loss: Tensor, rows: int) -> Any:
        self.total += rows / loss.item()
        return loss / 100 if loss.item() > 20 else loss


class Best(Meters):
    """A number that is known when the graph has run decides about the next step."""

    def decide(self, loss: Tensor, rows: int) -> Any:
        if loss.item() < self.best:
            self.best = loss.item()
        return loss


def train_meters(kind: type[Meters], *, rare: int = 13, **expected: Any) -> Any:
    """Train. Each so many steps the batch is large, and the loss with it."""

    def script(diary: Diary) -> None:
        model = Net()
        optimizer, step_fn = adamw(model), kind(model)
        step = diary.step(step_fn, model=model, optimizer=optimizer)
        for number, (x, y) in enumerate(batches(60)):
            try:
                diary.write("returned", step((x * 100 if number % rare == rare - 1 else x, y)))
            except ValueError as error:
                diary.write("error", str(error))
            diary.write("meters", step_fn.state())
            diary.write_state(model, optimizer)

    return both(script, **{"replays": 30, "plan": "{F B O}", **expected})


@pytest.mark.parametrize("kind", [Skips, AddsFirst, Raises])
@pytest.mark.parametrize("rare", [13, 25])
def test_numbers_that_decide_are_kept_as_well(
    kind: type[Meters], rare: int, taken_back: list[Exception]
) -> None:
    report = train_meters(kind, rare=rare)
    assert len(taken_back) >= 2 and all(isinstance(error, OtherWay) for error in taken_back)
    assert not report.fallbacks, str(report)


@pytest.mark.parametrize(
    ("kind", "source"), [(Divides, "loss.item() > 20"), (Best, "loss.item() < self.best")]
)
def test_what_python_does_with_numbers_at_their_line_is_refused(kind: type[Meters], source: str) -> None:
    report = train_meters(kind, replays=1, plan=None)
    assert report.steps_replayed == 0, str(report)
    assert report.fallbacks[0].where == line_of(kind.decide, source), str(report)


def with_spikes(generator: torch.Generator, rows: int) -> dict[str, Tensor]:
    batch = a_batch(generator, rows)
    return {**batch, "scale": torch.where(torch.rand((), generator=generator) < 0.05, 100.0, 1.0)}


def scaled(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    found = model(batch["x"]) * batch["scale"].square().sqrt()
    return F.cross_entropy(found, batch["y"])


def decides_behind(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    loss = scaled(model, batch)
    return loss / 100 if loss.item() > 20 else loss


def decides_before(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    x = model.inside(batch["x"]) * batch["scale"]  # type: ignore[operator]
    if x.detach().abs().max() > 50:
        x = x / 50
    for block in model.blocks:  # type: ignore[union-attr]
        x = block(x)
    return F.cross_entropy(model.head(x), batch["y"])  # type: ignore[operator]


def decides_between(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    x = model.inside(batch["x"])  # type: ignore[operator]
    for block in model.blocks:  # type: ignore[union-attr]
        x = block(x)
        if (x.detach().abs().max() * batch["scale"]).item() > 60:
            x = x * 0.5
    return F.cross_entropy(model.head(x), batch["y"])  # type: ignore[operator]


@pytest.mark.parametrize("loss", [decides_behind, decides_before, decides_between])
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_a_decision_and_modules_in_gaps(
    loss: Callable[..., Any], micro_batches: int, taken_back: list[Exception]
) -> None:
    report = train_islands(
        lambda: Model(Experts(0.2), Experts(0.2)),
        loss,
        make_batch=with_spikes,
        steps=60,
        micro_batches=micro_batches,
        optimizer=adam,
    )
    assert taken_back and all(isinstance(error, OtherWay) for error in taken_back)
    assert not report.fallbacks, str(report)


@pytest.mark.parametrize("loss", [decides_behind, decides_before])
def test_modules_in_gaps_do_not_fit_the_graph_in_a_step_with_a_decision(
    loss: Callable[..., Any], taken_back: list[Exception]
) -> None:
    report = train_islands(
        lambda: Model(ExpertsApart(hit_only=True)),
        loss,
        make_batch=with_spikes,
        rows=13,
        steps=90,
        plan=None,
        optimizer=adam,
    )
    kinds = {type(error) for error in taken_back}
    assert OtherWay in kinds and kinds & {Unlike, BackwardChanged}, kinds
    assert report.steps_replayed >= 40, str(report)


class Limits(Experts):
    """What it is given decides what it computes, another way in every second or third step."""

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        x = F.linear(x, self.up[0, :8]) + weights.sum(-1, keepdim=True)
        if chosen.sum() % 2:
            x = x * 0.5
        return F.linear(x, self.down[0, :, :8])


def test_a_module_with_a_decision_that_keeps_flipping_runs_in_a_gap(taken_back: list[Exception]) -> None:
    report = train_islands(lambda: Model(Limits()), steps=80, replays=40, optimizer=adam)
    assert len(taken_back) > 5 and not report.fallbacks, str(report)


@pytest.mark.parametrize("loss", [decides_behind, scaled])
def test_nothing_of_a_replay_that_is_taken_back_stays_while_the_step_runs(
    loss: Callable[..., Any], taken_back: list[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[int] = []
    plainly = UngraphedSteps.plainly

    def counted(self: Any, run: Any) -> Any:
        if taken_back:
            found.append(sum(type(x) is IslandRun for x in gc.get_objects()))
        return plainly(self, run)

    monkeypatch.setattr(UngraphedSteps, "plainly", counted)
    train_islands(
        lambda: Model(*(ExpertsApart(hit_only=loss is scaled) for _ in range(2))),
        loss,
        make_batch=with_spikes,
        rows=11,
        steps=60,
        plan=None,
        optimizer=adam,
    )
    assert {type(error) for error in taken_back} & {OtherWay, Unlike}
    assert found and set(found) == {0}, found


def test_a_module_that_counts_its_calls_is_not_called_for_a_decision() -> None:
    """What decides is computed once more in the trace: a module that begins to change its attributes is found."""

    def each(model: nn.Module, number: int) -> None:
        model.blocks[0].experts.begins = number > 0  # type: ignore[index,union-attr,assignment]

    train_islands(
        lambda: Model(CountsLater()), decides_behind, make_batch=with_spikes, each=each, replays=1, plan=None
    )
