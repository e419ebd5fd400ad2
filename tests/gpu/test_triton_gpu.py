"""Kernels that the user wrote in Triton are part of graphs, as those of Liger and TRL are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from pygraph_train import GraphedStep

triton: Any = pytest.importorskip("triton", reason="needs Triton")
tl: Any = pytest.importorskip("triton.language", reason="needs Triton")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@triton.jit  # type: ignore[untyped-decorator]
def _scaled(x, y, count, by, size: tl.constexpr):  # type: ignore[no-untyped-def]  # Triton reads annotations
    at = tl.program_id(0) * size + tl.arange(0, size)
    tl.store(y + at, tl.load(x + at, mask=at < count) * by, mask=at < count)


def _launch(x: Tensor, y: Tensor, by: float) -> None:
    _scaled[(triton.cdiv(x.numel(), 64),)](x, y, x.numel(), by, 64)


class Scaled(torch.autograd.Function):
    """Both directions are a kernel."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = torch.empty_like(x)
        _launch(x, y, 2.0)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        found = torch.empty_like(gradient)
        _launch(gradient.contiguous(), found, 2.0)
        return found


class Net(nn.Module):
    """A layer, a kernel with its backward, and one that writes a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.register_buffer("seen", torch.zeros(4, 8))

    def forward(self, x: Tensor) -> Tensor:
        hidden = Scaled.apply(self.first(x))
        _launch(hidden.detach(), self.seen, 0.5)
        return self.last(hidden)  # type: ignore[no-any-return]


def test_a_step_with_kernels_of_the_user_replays() -> None:
    found = []
    for ours in (True, False):
        torch.manual_seed(0)
        model = Net().cuda()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)

        def loss_of(x: Tensor, y: Tensor, model: nn.Module = model) -> Tensor:
            return cross_entropy(model(x), y)

        step = GraphedStep(loss_of, model=model, optimizer=optimizer, forward="on") if ours else None
        losses = []
        for n in range(16):
            torch.manual_seed(n)
            x, y = torch.randn(4, 6, device="cuda"), torch.randint(3, (4,), device="cuda")
            if step is None:
                optimizer.zero_grad()
                loss = loss_of(x, y)
                loss.backward()
                optimizer.step()
            else:
                loss = step(x, y)
            losses.append(loss.detach().clone())
        if step is not None:
            assert step.report().steps_replayed >= 8, str(step.report())
            step.close()
        found.append([*losses, *(t.detach().clone() for t in model.state_dict().values())])
    assert all(map(torch.equal, *found))
