"""Numbers that a step computes on a GPU, and takes for the shift of a roll or to take a column: nobody waits there."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from test_numbers_on_the_device import KINDS, Delays
from training import PlainStep, batches, differs, frozen

from pygraph_train import GraphedStep, PyGraphConfig

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
def test_the_same_bits_as_plain_training(kind: Callable[[Tensor, Tensor], Tensor]) -> None:
    def train(config: PyGraphConfig | None) -> tuple[list[Any], Any]:
        torch.manual_seed(0)
        net = Delays().cuda()
        optimizer = torch.optim.AdamW(net.parameters(), lr=2.0**-9, fused=True)

        def step_fn(batch: Any) -> Tensor:
            return nn.functional.cross_entropy(net(batch[0], kind), batch[1])

        made: dict[str, Any] = {"model": net, "optimizer": optimizer}
        step: Any = (
            PlainStep(step_fn, **made) if config is None else GraphedStep(step_fn, config=config, **made)
        )
        noted = [frozen(step((x.cuda(), y.cuda())).detach()) for x, y in batches(50)]
        return [*noted, frozen([p.detach() for p in net.parameters()])], step

    expected, _ = train(None)
    found, step = train(PyGraphConfig(compile=False))
    for index, (one, other) in enumerate(zip(expected, found, strict=True)):
        assert differs(one, other) is None, f"step {index}: {differs(one, other)}"
    assert step.report().steps_replayed >= 30, str(step.report())
