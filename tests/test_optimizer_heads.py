"""Heads that take turns: in each step some parameters have no gradient, and the optimizer has a graph for each set."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training import CONFIG, PlainStep, differs, frozen

from pygraph_train import GraphedStep
from pygraph_train.graphs.emulated import EmulatedEngine


class Heads(nn.Module):
    """One body, and heads of which a step uses one."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.body = nn.Linear(6, 8)
        self.heads = nn.ModuleList(nn.Linear(8, 3) for _ in range(count))
        self.turn = 0

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.heads[self.turn](torch.tanh(self.body(x)))
        return result


def train(made: type, heads: int, *, steps: int = 120, momentum: int = 0, **options: Any) -> tuple[Any, Any]:
    """What a run leaves after each step, and its step. From step `momentum` on that changes all the time."""
    torch.manual_seed(0)
    torch.compiler.reset()
    model = Heads(heads)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05, fused=True)

    def step_fn(x: Tensor) -> Tensor:
        return model(x).square().mean()

    step = made(step_fn, model=model, optimizer=optimizer, **options)
    seen = []
    for i in range(steps):
        model.turn = i % heads
        if momentum and i >= momentum:
            optimizer.param_groups[0]["betas"] = (0.9 - i * 1e-3, 0.99)
        loss = step(torch.randn(5, 6))
        grads = [p.grad for p in model.parameters()]
        seen.append(frozen((loss, list(model.parameters()), grads, optimizer.state_dict())))
    return seen, step


@pytest.mark.parametrize("forward", ["off", "auto"])
@pytest.mark.parametrize("heads", [2, 3])
def test_the_optimizer_replays_a_graph_for_each_head(heads: int, forward: str) -> None:
    options = {"fuse": "off"} if forward == "auto" else {"forward": "off", "backward": "off"}
    expected, _ = train(PlainStep, heads)
    found, step = train(GraphedStep, heads, config=dataclasses.replace(CONFIG, **options))
    report = step.report()
    for i, pair in enumerate(zip(expected, found, strict=True)):
        assert (difference := differs(*pair)) is None, f"step {i}: {difference}\n{report}"
    assert len([c for c in report.captures if c.plan == "{O}"]) == heads, str(report)
    assert report.optimizer_steps_replayed >= 40, str(report)
    assert not [f for f in report.fallbacks if "optimizer" in f.reason], str(report)


def test_too_many_heads_have_a_sentence_of_their_own() -> None:
    expected, _ = train(PlainStep, 40)
    found, step = train(GraphedStep, 40, config=dataclasses.replace(CONFIG, forward="off", backward="off"))
    for pair in zip(expected, found, strict=True):
        assert differs(*pair) is None
    (row,) = [f for f in step.report().fallbacks if "optimizer" in f.reason]
    assert "which parameters have gradients" in row.reason and "OneCycleLR" not in row.fix, row


def test_a_momentum_that_changes_is_told_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(EmulatedEngine, "rewrites_numbers", False)
    options = {"config": dataclasses.replace(CONFIG, forward="off", backward="off")}
    expected, _ = train(PlainStep, 1, momentum=30)
    found, step = train(GraphedStep, 1, momentum=30, **options)
    for pair in zip(expected, found, strict=True):
        assert differs(*pair) is None
    assert step.report().optimizer_steps_replayed >= 5
    (row,) = [f for f in step.report().fallbacks if "optimizer" in f.reason]
    assert "hyperparameter" in row.reason and "gradients" not in row.reason and "OneCycleLR" in row.fix, row
