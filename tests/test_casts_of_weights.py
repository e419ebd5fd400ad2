"""Under autocast a weight is cast once: regions share the cast as eager kernels do, also where gradients are off."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from accelerate_training import Script, both
from accelerate_training import fresh as fresh
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Recycled(nn.Module):
    """A layer whose weight is used without gradients and with them, in the order of `history`."""

    def __init__(self, history: tuple[bool, ...], switch: Any = torch.set_grad_enabled) -> None:
        super().__init__()
        self.inner, self.last = nn.Linear(8, 8), nn.Linear(8, 4)
        self.history, self.switch = history, switch

    def forward(self, x: Tensor) -> Tensor:
        for grad in self.history:
            with self.switch(grad):
                x = torch.tanh(self.inner(x))
        return self.last(x)  # type: ignore[no-any-return]


def no_grad_where(off: bool) -> Any:
    return nullcontext() if off else torch.no_grad()


def train(model: nn.Module) -> Any:
    def script(script: Script) -> None:
        accelerator = script.accelerator
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
        state = {name: value.clone() for name, value in model.state_dict().items()}
        prepared, optimizer = accelerator.prepare(model, optimizer)
        for _ in range(30):
            x = torch.randn(4, 8)
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = prepared(x).float().square().mean()
            accelerator.backward(loss)
            script.write("loss", loss)
            script.write("gradients", {name: p.grad for name, p in model.named_parameters()})
            optimizer.step()
            optimizer.zero_grad()
        model.load_state_dict(state)

    return script


ORDERS = [(False, True), (False, False, True), (True, False, True), (False, True, False, True)]


@pytest.mark.slow_after(4)
@pytest.mark.parametrize("switch", [torch.set_grad_enabled, no_grad_where])
@pytest.mark.parametrize("history", ORDERS)
def test_a_weight_that_is_used_without_gradients_too(history: tuple[bool, ...], switch: Any) -> None:
    torch.manual_seed(0)
    both(train(Recycled(history, switch)), replays=70)


class Checkpointed(nn.Module):
    """A checkpoint, and a weight that is used twice."""

    def __init__(self, where: str) -> None:
        super().__init__()
        self.inner, self.last, self.where = nn.Linear(8, 8), nn.Linear(8, 4), where

    def forward(self, x: Tensor) -> Tensor:
        def once(x: Tensor) -> Tensor:
            return self.inner(torch.tanh(x))  # type: ignore[no-any-return]

        def other(x: Tensor) -> Tensor:
            return self.last(torch.tanh(x))  # type: ignore[no-any-return]

        if self.where == "in one":
            x = checkpoint(lambda x: once(once(x)), x, use_reentrant=False)
        elif self.where == "in two":
            x = checkpoint(once, checkpoint(once, x, use_reentrant=False), use_reentrant=False)
        elif self.where == "inside and outside":
            x = once(checkpoint(once, x, use_reentrant=False))
        elif self.where == "outside":
            return checkpoint(other, once(once(x)), use_reentrant=False)  # type: ignore[no-any-return]
        else:
            x = checkpoint(once, x, use_reentrant=False)
        return self.last(x)  # type: ignore[no-any-return]


@pytest.mark.slow_after(5)
@pytest.mark.parametrize("where", ["in one", "in two", "inside and outside", "outside", "nowhere"])
def test_a_weight_that_is_used_twice_beside_a_checkpoint(where: str) -> None:
    torch.manual_seed(0)
    script = train(Checkpointed(where))
    if where in ("outside", "nowhere"):
        both(script, replays=70)
    else:
        report = both(script, replays=4)  # of the update
        assert report.optimizer_steps_replayed and not report.regions(), str(report)
        assert ["under autocast a checkpoint uses a weight" in f.reason for f in report.fallbacks] == [True]
