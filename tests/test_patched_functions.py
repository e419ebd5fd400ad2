"""Functions of torch that somebody has replaced by others, which call the original."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from replays import regions_ran
from torch import Tensor, nn
from torch.nn import functional
from training import Diary, Net, adamw, batches, both

import pygraph_train.backend as backend
from pygraph_train.torch_private.patched_functions import call_originals


def larger(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def replacement(*args: Any, **kwargs: Any) -> Tensor:
        return original(*args, **kwargs) * 1.5

    return replacement


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


@pytest.mark.parametrize("name", ["relu", "dropout", "cross_entropy"])
def test_a_replacement_is_applied_once(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Whole steps of the emulated engine are not replayed: its modes see the replacement, and a comparison says so."""
    monkeypatch.setattr(functional, name, larger(getattr(functional, name)))

    def script(diary: Diary) -> None:
        model = Classifier()
        optimizer = adamw(model)
        step = diary.step(
            lambda x, y: functional.cross_entropy(model(x), y), model=model, optimizer=optimizer
        )
        for x, y in batches(30):
            diary.write("loss", step(x, y))
        diary.write_state(model, optimizer)

    both(script, replays=10)


@pytest.mark.parametrize("engine", ["emulated", "off"])
def test_a_region_applies_a_replacement_once(monkeypatch: pytest.MonkeyPatch, engine: str) -> None:
    monkeypatch.setattr(functional, "relu", larger(functional.relu))
    torch._dynamo.reset()
    backend.reset()
    model = Classifier().eval()
    compiled = backend.compile(model, engine=engine, compile=False)
    for x, _ in batches(8):
        assert torch.equal(compiled(x), model(x))
    if engine == "emulated":
        regions_ran(3)


def test_graphs_of_functions_that_nobody_replaced_stay_as_they_are() -> None:
    graphs = []

    def look(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        before = [node.target for node in graph.graph.nodes]
        graphs.append(call_originals(graph) or before != [node.target for node in graph.graph.nodes])
        return graph.forward

    torch._dynamo.reset()
    model = Net()
    x, y = batches(1)[0]

    def loss() -> Tensor:
        z = functional.gelu(torch.einsum("ab,bc->ac", model(x), torch.eye(3)).softmax(1).norm() + model(x))
        return functional.cross_entropy(functional.max_pool1d(z[None], 2)[0].sum(1, keepdim=True) + z, y)

    torch.compile(loss, backend=look)().backward()
    assert graphs == [False]
