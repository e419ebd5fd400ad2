"""Lightning Fabric on a GPU: whole steps have the bits of the plain loop."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("lightning.fabric")

from lightning.fabric import Fabric

from pygraph_train import PyGraphFabric

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.usefixtures("same_block_sizes", "matmul_precision_put_back"),
]

STEPS = 60
ACCELERATOR, ENGINE = "cuda", "cuda"


def train(pygraph: PyGraphFabric | None, precision: str, clipping: dict[str, Any]) -> tuple[list[Any], Any]:
    """Losses and parameters of one training, and the report of its graphed step."""
    torch.manual_seed(0)
    fabric = Fabric(accelerator=ACCELERATOR, devices=1, precision=precision)  # type: ignore[arg-type]
    if pygraph is not None:
        pygraph.attach(fabric)
    net = nn.Sequential(nn.Linear(16, 64), nn.LayerNorm(64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 8))
    # a power of two: the learning rate is a float32 in graphs
    optimizer = torch.optim.AdamW(net.parameters(), lr=2.0**-8, fused=True)
    model, optimizer = fabric.setup(net, optimizer)

    def loss_of(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(model(x), y)

    def plain(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(x, y)
        fabric.backward(loss)
        if clipping:
            fabric.clip_gradients(model, optimizer, **clipping)
        optimizer.step()
        return loss.detach()

    step: Any = plain
    if pygraph is not None:
        step = pygraph.graphed_step(loss_of, model=model, optimizer=optimizer, **clipping)
    generator = torch.Generator().manual_seed(1)
    found: list[Any] = []
    for _ in range(STEPS):
        x = torch.randn(32, 16, generator=generator).to(fabric.device)
        y = torch.randint(0, 8, (32,), generator=generator).to(fabric.device)
        found.append(step(x, y))
    found += [p.detach().clone() for p in model.parameters()]
    report = None if pygraph is None else step.report()
    if pygraph is not None:
        pygraph.detach()
    return found, report


@pytest.mark.parametrize("clipping", [{}, {"max_norm": 0.5, "error_if_nonfinite": False}, {"max_norm": 0.5}])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true", "16-mixed"])
def test_whole_steps(precision: str, clipping: dict[str, Any]) -> None:
    if precision == "16-mixed" and clipping:
        pytest.skip("Fabric does not clip gradients of an optimizer that unscales them itself")
    expected, _ = train(None, precision, clipping)
    found, report = train(PyGraphFabric(engine=ENGINE, compile=False), precision, clipping)
    assert all(map(torch.equal, expected, found)), str(report)
    assert report.steps_replayed > 20, str(report)
