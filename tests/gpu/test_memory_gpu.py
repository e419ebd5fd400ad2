"""How much memory recordings take."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from pygraph_train import GraphedStep

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def test_results_of_many_shapes_share_memory() -> None:
    """A language model returns its logits in each step, and each length of a batch has a recording."""
    torch.compiler.reset()
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 1 << 16)).cuda()

    def step_fn(x: Tensor) -> dict[str, Tensor]:
        logits = model(x)
        return {"loss": logits.logsumexp(1).mean(), "logits": logits}

    optimizer = torch.optim.SGD(model.parameters(), 1e-3, fused=True)
    step = GraphedStep(step_fn, model=model, optimizer=optimizer, forward="on", warmup_steps=2)
    lengths, reserved = [64, *range(72, 136, 4)], []
    for length in lengths:
        for _ in range(4):
            step(torch.randn(length, 32, device="cuda"))
        reserved.append(torch.cuda.memory_reserved())
    assert step.report().to_dict()["phases_from_graphs"]["F"] >= 3 * len(lengths)
    all_logits = sum(lengths) * 4 << 16  # bytes
    assert reserved[-1] - reserved[1] < all_logits / 2
