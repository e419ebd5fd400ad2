"""Optimizers with a `zero_grad` of their own in `accelerator.graphed_step`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

pytest.importorskip("accelerate")

import torch
from accelerate_training import Numbers, Script, both, fresh  # noqa: F401
from torch import Tensor, nn
from torch.utils.data import DataLoader
from training import Net


def _halve(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p.grad is not None:
                p.grad.mul_(0.5)


_LEAVES: dict[str, Callable[[torch.optim.Optimizer], None]] = {
    "none": lambda optimizer: torch.optim.Optimizer.zero_grad(optimizer),
    "zeros": lambda optimizer: torch.optim.Optimizer.zero_grad(optimizer, set_to_none=False),
    "half": _halve,
}


def _script(leaves: str, *, last: bool) -> Callable[[Script], None]:
    def script(script: Script) -> None:
        model, calls = Net(), list[int]()
        own = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, fused=True)

        def zero_grad(set_to_none: bool = True) -> None:
            calls.append(1)
            _LEAVES[leaves](own)

        own.zero_grad = zero_grad  # type: ignore[method-assign]
        loader: Any = DataLoader(Numbers(480), batch_size=8)
        optimizer: Any = own
        model, optimizer, loader = script.accelerator.prepare(model, optimizer, loader)

        def step(batch: dict[str, Tensor]) -> Tensor:
            if not last:
                optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(batch["x"]), batch["y"])
            script.accelerator.backward(loss)
            optimizer.step()
            if last:
                optimizer.zero_grad()
            return loss.detach()

        graphed = script.graphed(step)
        for batch in loader:
            script.write("loss", graphed(batch))
            script.write("calls", len(calls))
        script.write_state(script.accelerator.unwrap_model(model), optimizer)

    return script


@pytest.mark.parametrize("leaves", _LEAVES)
@pytest.mark.quick
def test_it_is_called_after_each_replay_of_a_whole_step(leaves: str) -> None:
    report = both(_script(leaves, last=True), replays=15)
    assert report.whole_steps["step"].steps_replayed >= 15, str(report)


@pytest.mark.parametrize("leaves", ["none", "half"])
def test_a_step_that_begins_with_it_runs_in_parts(leaves: str) -> None:
    report = both(_script(leaves, last=False), replays=15)
    assert report.whole_steps["step"].steps_replayed == 0, str(report)
    assert "zero_grad of SGD" in str(report.whole_steps["step"].fallbacks), str(report)
