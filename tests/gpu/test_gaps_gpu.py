"""Graphs with gaps on a GPU: the loss of Connectionist Temporal Classification is computed between their parts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_same_as_plain_gpu import STEPS, Make, both
from torch import Tensor, nn
from torch.nn import functional as F

from pygraph_train.gaps import leave_gap, may_leave_gap
from pygraph_train.graphs.cuda import CudaEngine
from pygraph_train.graphs.engine import CaptureError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

BATCH, LENGTH, LABELS, CLASSES = 4, 40, 6, 9


class InAGap(torch.autograd.Function):
    """Multiplies with a number of the host, and notes what it has read."""

    seen: list[float] = []  # noqa: RUF012

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: list[float]) -> Tensor:
        ctx.factor, made = factor, torch.empty_like(x)

        def work() -> None:
            InAGap.seen.append(x.sum().item())
            made.copy_(x * factor[0])

        ctx.save_for_backward(x)
        leave_gap(work)
        return made

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        made, factor = torch.empty_like(grad), ctx.factor

        def work() -> None:
            made.copy_(grad * factor[0])

        leave_gap(work)
        return made, None


@pytest.mark.passes_without_graphs("the engine is tested itself")
def test_parts_of_a_graph_with_work_between_them_also_in_a_backward() -> None:
    engine = CudaEngine(torch.device("cuda"))
    weight = torch.randn(32, 32, device="cuda", requires_grad=True)
    x = torch.zeros(8, 32, device="cuda")
    factor = [2.0]
    weight.grad = torch.zeros_like(weight)

    def step() -> Tensor:
        assert may_leave_gap()
        assert weight.grad is not None
        weight.grad.zero_()
        hidden = F.dropout(x @ weight, 0.5)
        loss: Tensor = InAGap.apply(hidden, factor).square().mean()  # type: ignore[no-untyped-call]
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.detach()

    def plainly() -> tuple[Tensor, Tensor]:
        hidden = F.dropout(x @ weight, 0.5)
        loss = (hidden * factor[0]).square().mean()
        return loss.detach(), torch.autograd.grad(loss, weight)[0]

    plainly()
    graph, loss = engine.capture(step, gaps=True)
    assert not InAGap.seen
    for number in range(4):
        x.normal_()
        factor[0] = 1.0 + number
        state = torch.cuda.get_rng_state()
        expected = plainly()
        after = torch.cuda.get_rng_state()
        torch.cuda.set_rng_state(state)
        graph.replay()
        assert torch.equal(loss, expected[0]) and torch.equal(weight.grad, expected[1])
        assert torch.equal(torch.cuda.get_rng_state(), after)
    assert len(InAGap.seen) == 4
    graph.close()
    engine.close()


@pytest.mark.passes_without_graphs("a capture fails")
def test_a_capture_that_fails_behind_a_gap_leaves_everything_usable() -> None:
    engine, x = CudaEngine(torch.device("cuda")), torch.ones(4, device="cuda")

    def fails() -> Tensor:
        y = x + 1
        leave_gap(lambda: None)
        return y * y.sum().item()

    with pytest.raises(CaptureError):
        engine.capture(fails, gaps=True)
    graph, made = engine.capture(lambda: F.dropout(x * 2, 0.0))
    graph.replay()
    assert made.tolist() == [2.0] * 4
    graph.close()
    engine.close()


def test_a_ctc_loss_between_parts_of_a_whole_step() -> None:
    class Speech(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.convolution = nn.Conv1d(8, 32, 3, stride=2, padding=1)
            self.norm, self.head = nn.LayerNorm(32), nn.Linear(32, CLASSES)

        def forward(self, x: Tensor) -> Tensor:
            found = F.dropout(self.norm(self.convolution(x).transpose(1, 2)), 0.1)
            result: Tensor = self.head(found).log_softmax(-1).transpose(0, 1)
            return result

    def script(make: Make) -> list[Any]:
        model = Speech().cuda()
        optimizer = torch.optim.AdamW(model.parameters(), 1e-3, fused=True)

        def loss_of(x: Tensor, y: Tensor, ends: Tensor, sizes: Tensor) -> Tensor:
            found = model(x)
            with torch.backends.cudnn.flags(enabled=False):
                return F.ctc_loss(found, y, ends, sizes, zero_infinity=True)

        step = make(loss_of, model, optimizer)
        generator = torch.Generator().manual_seed(2)
        found = []
        for _ in range(STEPS):
            # each label once: the kernel of the gradient adds atomically where there are several
            x = torch.randn(BATCH, 8, 2 * LENGTH, generator=generator)
            y = (
                torch.stack([torch.randperm(CLASSES - 1, generator=generator)[:LABELS] for _ in range(BATCH)])
                + 1
            )
            ends = torch.randint(LENGTH - 9, LENGTH + 1, (BATCH,), generator=generator)
            sizes = torch.randint(1, LABELS + 1, (BATCH,), generator=generator)
            found.append(step(x.cuda(), y.cuda(), ends.cuda(), sizes.cuda()))
        return [*found, *(p.detach() for p in model.parameters())]

    report = both(script, replays=STEPS - 20, plan="{F B O}", fuse="on")
    assert not report.fallbacks
