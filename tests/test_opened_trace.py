"""What a trace knows of a step whose hooks Dynamo cannot follow."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from pygraph_train.tracing.opened_trace import OpenedTrace


class Attention(nn.Module):
    """Attention that drops with a probability."""

    def __init__(self, probability: float) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.probability = probability

    def forward(self, x: Tensor) -> Tensor:
        q = self.linear(x).view(2, 4, 2, 4)
        return F.scaled_dot_product_attention(q, q, q, dropout_p=self.probability).view(8, 8)


class Checkpointed(nn.Module):
    """A module in a checkpoint."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Any:
        return checkpoint(self.inner, x, use_reentrant=False)


@pytest.mark.parametrize(
    ("module", "draws"),
    [
        (nn.Linear(8, 8), False),
        (nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.1)), True),
        (Attention(0.0), False),
        (Attention(0.1), True),
        (Checkpointed(Attention(0.0)), False),
        (Checkpointed(Attention(0.1)), True),
    ],
)
def test_a_trace_knows_whether_the_step_draws_random_numbers(module: nn.Module, draws: bool) -> None:
    trace = OpenedTrace(torch.device("cpu"), lambda: nullcontext(frozenset()))
    states = torch.utils.checkpoint.get_device_states
    trace(lambda x: module(x).sum(), (torch.randn(8, 8),), {})
    assert trace.problem is None and trace.draws is draws
    assert torch.utils.checkpoint.get_device_states is states
