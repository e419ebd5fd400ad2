"""The report is written and never asked: with one that forgets everything, all decisions are the same."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from replays import enough
from torch import Tensor, nn
from training import Net, adamw, batches, loss_of

import pygraph_train.backend as backend
from pygraph_train import GraphedStep, PyGraphConfig, StepReport
from pygraph_train.selection import timing
from pygraph_train.step import loss_program
from pygraph_train.step.flight import StepInFlight

EVENTS = (
    "began",
    "step_began",
    "step_ended",
    "replayed",
    "replay_undone",
    "update_replayed",
    "ran_without_graph",
    "compiled",
    "compared",
    "runs_with",
    "compares",
    "left_alone",
    "captured",
    "fell_back",
    "start_over",
    "decided",
    "note",
)


class NoReport(StepReport):
    """Takes everything and keeps nothing."""


for event in EVENTS:
    assert callable(getattr(StepReport, event))
    setattr(NoReport, event, lambda self, *args, **kwargs: None)


class HostRead(Net):
    """A step that is not one graph: forward and backward get graphs of their own."""

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        for _ in range(int(out.detach().sum() == 1e9)):
            out = out * 2
        return out


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch.compiler.reset()
    backend.reset()
    yield
    torch.compiler.reset()


def decisions(monkeypatch: pytest.MonkeyPatch, report: type[StepReport], make: Any, config: Any) -> Any:
    """What every step ran with, whether it was replayed, and what it computed."""
    torch.manual_seed(0)
    seen: list[tuple[str, bool]] = []
    finish = StepInFlight.finish

    def finish_and_look(self: StepInFlight) -> None:
        finish(self)
        seen.append((str(self.arm), self.replayed))

    costs = random.Random(1)
    with monkeypatch.context() as patch:
        patch.setattr(loss_program, "StepReport", report)
        patch.setattr(StepInFlight, "finish", finish_and_look)
        patch.setattr(timing, "declared_seconds", lambda arm: costs.choice([1e-3, 2e-3, 3e-3]))
        model: nn.Module = make()
        optimizer = adamw(model)
        options = PyGraphConfig(engine="emulated", **config)
        losses = []
        with GraphedStep(loss_of(model), model=model, optimizer=optimizer, config=options) as step:
            for index, batch in enumerate(batches(120)):
                if index == 70:
                    optimizer.param_groups[0]["betas"] = (0.8, 0.9)
                losses.append(step(batch))
            kept = step.report()
    return seen, losses, kept


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("make", [Net, HostRead])
@pytest.mark.parametrize("config", [{}, {"fuse": "off"}, {"optimizer": "off"}, {"verify": "always"}])
def test_decisions_are_the_same_without_a_report(
    make: Any, config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, losses, report = decisions(monkeypatch, StepReport, make, config)
    torch.compiler.reset()
    found, others, nothing = decisions(monkeypatch, NoReport, make, config)
    enough([report], replays=100)
    assert nothing.steps == 0 and not nothing.captures, "the report kept nothing"
    assert found == expected
    assert all(map(torch.equal, losses, others))
    assert len({arm for arm, _ in expected}) > 1, "there was something to decide"


def test_the_records_of_the_backend_are_not_asked_either() -> None:
    torch.manual_seed(0)
    model = HostRead()
    config = PyGraphConfig(engine="emulated")
    step = GraphedStep(loss_of(model), model=model, optimizer=adamw(model), config=config)
    for index, batch in enumerate(batches(120)):
        if index in (5, 20, 60):
            backend.reset()
        step(batch)
    report = step.report()
    assert report.plan == "{F} {B} {O}", str(report)
    assert min(region.replays for region in report.regions()) > 40, str(report)
