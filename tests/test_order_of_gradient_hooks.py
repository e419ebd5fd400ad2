"""The order in which gradient hooks of different parameters run in regions: that of `torch.compile`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from replays import regions_ran
from torch import Tensor, nn
from training import batches

from pygraph_train import backend


class _Deep(nn.Module):
    """Uses one of its layers twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(6, 8), nn.LayerNorm(8)
        self.twice, self.last = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.norm(self.first(x)))
        out: Tensor = self.last(self.twice(x) + self.twice(torch.tanh(x)))
        return out


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_run_in_the_order_of_torch_compile(register: str) -> None:
    """Its order is not that of a model that is not compiled. Each hook runs once, and gets the same gradient."""

    def orders(how: str) -> list[list[str]]:
        torch._dynamo.reset()
        backend.reset()
        torch.manual_seed(0)
        model, called, found = _Deep(), list[str](), list[list[str]]()
        for name, parameter in model.named_parameters():
            getattr(parameter, register)(lambda _, name=name: called.append(name))
        compiled: Any = model
        if how == "pygraph":
            compiled = backend.compile(model, engine="emulated", compile=False)
        elif how:
            compiled = torch.compile(model, backend=how)
        for x, y in batches(8):
            called.clear()
            nn.functional.cross_entropy(compiled(x), y).backward()
            found.append([*called])
        return found

    plain, of_compile, ours = orders(""), orders("aot_eager"), orders("pygraph")
    regions_ran(6)
    assert ours == of_compile
    assert [sorted(order) for order in ours] == [sorted(order) for order in plain]
