"""Layers of one class that Dynamo compiles once: a graph break in a layer makes a region that runs for each of them.

On the hostile engine of test_backend.py: what a replay may overwrite is overwritten.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_backend import Body, batches, compiled, hostile, regions, same_as_plain, update  # noqa: F401
from torch import nn

import pygraph_train.backend as backend


class Layer(nn.Module):
    """Two parts with a graph break between them, each with a parameter."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        torch._dynamo.graph_break()
        return x + torch.tanh(self.last(hidden))


class Layers(nn.Module):
    """Each layer has parameters of its own, which its graphs read where they are."""

    depth = 6

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(6) for _ in range(self.depth))
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Waves(nn.Module):
    """The part that all layers share has no parameters: any of its graphs can run for any layer."""

    depth = 6

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        for _ in range(self.depth):
            x = wave(x)
        return self.head(x)


def wave(x: torch.Tensor) -> torch.Tensor:
    x = torch.sin(x)
    torch._dynamo.graph_break()
    return torch.tanh(x)


def lately(body: Body, settled: int, counted: dict[str, tuple[int, int]]) -> Body:
    """`body` after so many steps, and how often each region is replayed and run without a graph in its steps."""

    def run(model: nn.Module, call: Any, opt: torch.optim.Optimizer) -> list[torch.Tensor]:
        losses = [update(F.cross_entropy(call(x), y), opt) for x, y in batches(settled)]
        before = {r.name: (r.replays, r.plain_runs) for r in backend.report().regions}
        losses += body(model, call, opt)
        for r in backend.report().regions:
            replays, plain = before[r.name]
            counted[r.name] = (r.replays - replays, r.plain_runs - plain)
        return losses

    return run


def steps(count: int) -> Body:
    def body(model: nn.Module, call: Any, opt: torch.optim.Optimizer) -> list[torch.Tensor]:
        return [update(F.cross_entropy(call(x), y), opt) for x, y in batches(count)]

    return body


@pytest.mark.parametrize("kind", [Waves, Layers])
def test_every_layer_of_one_region_runs_from_a_graph(kind: type[Layers | Waves]) -> None:
    counted: dict[str, tuple[int, int]] = {}
    same_as_plain(lately(steps(3), 30, counted), kind, least=8 * kind.depth)
    ran = {name: runs for name, runs in counted.items() if any(runs)}
    assert sum(replays for replays, _ in ran.values()) >= 3 * 4 * kind.depth, ran
    assert not any(plain for _, plain in ran.values()), ran
