"""Powers with a number that changes: torch has no gradient of them for a number without a value."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_backend import compiled, hostile, regions, same_as_plain, update  # noqa: F401
from torch import nn


class Power(nn.Module):
    def __init__(self, power: Callable[[torch.Tensor, int], torch.Tensor]) -> None:
        super().__init__()
        self.power, self.linear, self.n = power, nn.Linear(6, 6), 2

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.power(torch.sigmoid(self.linear(x)), self.n).mean()


def _of_keyword(x: torch.Tensor, n: int) -> torch.Tensor:
    return torch.pow(x, exponent=n)


def _of_keywords(x: torch.Tensor, n: int) -> torch.Tensor:
    return torch.pow(input=x, exponent=n)


@pytest.mark.parametrize(
    "power", [lambda x, n: x**n, torch.pow, lambda x, n: x.pow(n + 1), _of_keyword, _of_keywords]
)
def test_an_exponent_that_changes_has_a_graph_for_each_value(power: Any) -> None:
    def body(model: nn.Module, call: Any, opt: torch.optim.Optimizer) -> list[torch.Tensor]:
        losses = []
        for step in range(30):
            model.n = 2 + step % 3
            losses.append(update(call(torch.rand(4, 6)), opt))
        return losses

    with torch._dynamo.config.patch(allow_unspec_int_on_nn_module=True):
        same_as_plain(body, lambda: Power(power), least=40)
