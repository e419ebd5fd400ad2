"""Backwards that autograd does not make, where nobody listens, and those that it has to make."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from pygraph_train import GraphedStep
from pygraph_train.core.node import made_directly
from pygraph_train.step import loss_program

from .models import DEVICE, adamw, batches

STEPS = 24
ENGINE = "cuda" if DEVICE == "cuda" else "emulated"


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 3)).to(DEVICE)


@pytest.fixture
def by_autograd(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Losses whose backwards autograd has made."""
    seen: list[Tensor] = []
    stock = Tensor.backward

    def backward(loss: Tensor, *args: Any, **kwargs: Any) -> None:
        seen.append(loss)
        stock(loss, *args, **kwargs)

    monkeypatch.setattr(Tensor, "backward", backward)
    return seen


def trained(
    change: Callable[[Tensor], Any], accumulate: int = 1, seen: list[Tensor] | None = None
) -> GraphedStep:
    """Train plainly and with the library, which has to be the same. The step, after its training."""
    kept: list[list[Tensor]] = []
    for ours in (False, True):
        model = net()
        optimizer = adamw(model)
        torch.manual_seed(1)

        def loss_of(x: Tensor, y: Tensor, model: nn.Module = model) -> Tensor:
            return change(cross_entropy(model(x), y))

        step = GraphedStep(loss_of, model=model, optimizer=optimizer, engine=ENGINE, forward="on")
        made = []
        if ours and seen is not None:
            seen.clear()
        for number, (x, y) in enumerate(batches(STEPS)):
            update = (number + 1) % accumulate == 0
            if ours:
                loss = step(x, y) if update else step.accumulate(x, y)
            else:
                loss = loss_of(x, y)
                loss.backward()
                if update:
                    optimizer.step()
                    optimizer.zero_grad()
            made.append(loss.detach().clone())
        kept.append([*made, *(p.detach().clone() for p in model.parameters())])
    assert all(map(torch.equal, *kept))
    return step


@pytest.mark.parametrize("accumulate", [1, 3])
def test_replayed_steps_need_no_autograd(by_autograd: list[Tensor], accumulate: int) -> None:
    step = trained(lambda loss: loss, accumulate, by_autograd)
    report = step.report().to_dict()["phases_from_graphs"]
    assert report["F"] == report["B"] >= STEPS - 8
    assert len(by_autograd) == STEPS - report["B"], "each backward was made once"


def test_anomalies_are_looked_for(by_autograd: list[Tensor]) -> None:
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        trained(lambda loss: loss, seen=by_autograd)
    assert len(by_autograd) == STEPS


def test_a_hook_of_the_loss_is_called(by_autograd: list[Tensor]) -> None:
    """It is registered behind the forward of the module, and sees the gradient of each loss."""
    calls: list[float] = []

    def change(loss: Tensor) -> Tensor:
        loss.register_hook(lambda gradient: calls.append(float(gradient)))
        return loss

    trained(change, seen=by_autograd)
    assert calls == [1.0] * 2 * STEPS


def test_a_second_backward_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody has kept the loss of a replayed step."""
    kept: list[Tensor] = []
    monkeypatch.setattr(loss_program, "made_directly", lambda loss: kept.append(loss) or made_directly(loss))
    trained(lambda loss: loss)
    with pytest.raises(RuntimeError, match="a second time"):
        kept[-1].backward()
