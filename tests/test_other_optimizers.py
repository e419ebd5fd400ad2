"""Optimizers of other libraries run as they are, with a reason; forward and backward have a graph."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from training import Diary, Net, batches, both, loss_of


class Lion(torch.optim.Optimizer):
    """Pure tensor math."""

    def __init__(self, params: Any, lr: float = 1e-3, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["mean"] = torch.zeros_like(p)
                update = state["mean"].lerp(p.grad, 0.3).sign()
                p.add_(update, alpha=-group["lr"])
                state["mean"].lerp_(p.grad, 1 - group["beta"])


class Reads(Lion):
    """Looks at the gradient on the host."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        norm = self.param_groups[0]["params"][0].grad.norm().item()
        if norm < 1e9:
            super().step()


class Counts(Lion):
    """A bias correction that is a Python number."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                place = self.state[p]
                place["count"] = place.get("count", 0) + 1
                p.add_(p.grad, alpha=-group["lr"] / (1 - 0.9 ** place["count"]))


@pytest.mark.parametrize("kind", [Lion, Reads, Counts])
def test_an_optimizer_of_another_library_runs_as_it_is(kind: type[Lion]) -> None:
    def script(diary: Diary) -> None:
        model = Net()
        optimizer = kind(model.parameters())
        step = diary.step(loss_of(model), model=model, optimizer=optimizer)
        for batch in batches(40):
            diary.write("loss", step(batch))
            diary.write_state(model, optimizer)

    report = both(script, replays=30, plan="{F B} O")
    assert report.optimizer_steps_replayed == 0
    assert any(f"{kind.__name__} is not one of torch.optim" in row.reason for row in report.fallbacks), str(
        report
    )
