"""What a step is given besides plain tensors, on a GPU: the model, and expanded tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pygraph_train import GraphedStep

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("same_block_sizes", "matmul_precision_put_back"),
]

STEPS = 40


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 16))

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.layers(x)
        return found


def train(step_fn: Callable[..., Tensor], call: Callable[[Model, Tensor], Any], *, graphed: bool) -> Any:
    """Losses and state of one training, and the steps that were replayed."""
    torch.manual_seed(0)
    model = Model().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2.0**-8, fused=True)
    step = GraphedStep(step_fn, model=model, optimizer=optimizer, compile=False) if graphed else None
    losses = []
    for x in torch.randn(STEPS, 32, 16, generator=torch.Generator().manual_seed(1)).cuda():
        if step is not None:
            losses.append(step(*call(model, x)))
            continue
        optimizer.zero_grad()
        loss = step_fn(*call(model, x))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    state = [*map(torch.clone, losses), *model.state_dict().values()]
    replayed = 0 if step is None else step.report().steps_replayed
    if step is not None:
        step.close()
    return state, replayed


def _model(model: Model, x: Tensor) -> Any:
    return model, x


def _expanded(model: Model, x: Tensor) -> Any:
    return model, x[:, :1].expand(32, 16), x[3:4].expand(32, 16)


def _loss(model: nn.Module, *tensors: Tensor) -> Tensor:
    return sum(model(x).square().mean() for x in tensors) + 0.0


@pytest.mark.parametrize("call", [_model, _expanded])
def test_a_model_and_expanded_tensors_as_arguments(call: Any) -> None:
    plain, _ = train(_loss, call, graphed=False)
    graphed, replayed = train(_loss, call, graphed=True)
    assert replayed >= 25
    assert all(map(torch.equal, plain, graphed))
