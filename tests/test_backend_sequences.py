"""Random sequences of what a training loop may do, next to the same sequence in plain PyTorch.

On the hostile engine of test_backend.py: what a replay may overwrite is overwritten. The seeds are fixed.
"""

from __future__ import annotations

import copy
import gc
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from backend_training import Square
from test_backend import compiled, graphed_regions, hostile  # noqa: F401
from test_backend_retained import kept  # noqa: F401
from torch import nn

import pygraph_train.backend as backend
from pygraph_train.regions.arena import Arena

SEEDS = range(6)
OPERATIONS = 40
WEIGHTS = {
    "train": 8,
    "train again and again": 1,
    "leave a loss for later": 3,
    "differentiate a loss of before": 3,
    "differentiate a loss and keep it": 4,
    "forget a loss": 1,
    "empty gradients": 1,
    "zero gradients": 1,
    "evaluate": 1,
    "keep an output": 3,
    "forget an output": 2,
    "keep a gradient": 1,
    "change gradients in place": 1,
    "update parameters": 2,
    "capture again": 1,
    "go without a graph": 0.4,
    "collect garbage": 1,
}


class Normed(nn.Module):
    """Outputs that are used or not, BatchNorm statistics."""

    breaks = False

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.scale = nn.Parameter(torch.randn(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.tanh(self.norm(self.first(x)))
        if self.breaks:
            torch._dynamo.graph_break()
        return self.last(hidden) + self.scale * x[:, :3], hidden


class TwoRegions(Normed):
    breaks = True


class ThreeRegions(nn.Module):
    """The one in the middle hands a large tensor on, and its gradient back."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 600), nn.Linear(600, 5)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        wide = torch.tanh(self.first(x)).repeat(100, 1)
        torch._dynamo.graph_break()
        hidden = torch.sin(wide) * 2
        torch._dynamo.graph_break()
        return torch.tanh(self.last(hidden)), hidden


class SavesItsInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Parameter(torch.randn(6)), nn.Parameter(torch.randn(6))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = x * self.first
        return (hidden * self.last).square(), hidden


class InReusedMemory(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Square(depth=3), Square(depth=1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.first(x)
        return self.last(hidden), hidden


class Large(nn.Module):
    """Outputs and gradients of more than 1 MiB."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 600), nn.Linear(600, 600)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = torch.sin(self.first(x)).repeat(200, 1)
        return self.last(hidden), hidden


LOSSES: list[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = [
    lambda y, hidden: y.square().mean(),
    lambda y, hidden: y.mean() + hidden.square().mean(),
    lambda y, hidden: hidden.sum() * 0.1,
]


class World:
    """A model, and what its loop holds."""

    def __init__(self, model: nn.Module, call: Callable[..., Any]) -> None:
        self.model, self.call = model, call
        self.losses: list[torch.Tensor] = []
        self.kept: list[torch.Tensor] = []

    def gradients(self) -> list[torch.Tensor]:
        """None is told from zeros."""
        return [torch.empty(0) if p.grad is None else p.grad for p in self.model.parameters()]

    def do(
        self, what: str, x: torch.Tensor, loss: Callable[..., torch.Tensor], set_to_none: Any, n: int
    ) -> None:
        """One operation. `n` picks among what is held; `set_to_none`: None leaves gradients to be added to."""
        parameters = list(self.model.parameters())
        if what.startswith("train"):
            for _ in range(3 if "again" in what else 1):
                if set_to_none is not None:
                    self.model.zero_grad(set_to_none)
                loss(*self.call(x)).backward()
        elif what == "leave a loss for later":
            self.losses.append(loss(*self.call(x)))
        elif what == "differentiate a loss of before" and self.losses:
            self.losses.pop(n % len(self.losses)).backward()
        elif what == "differentiate a loss and keep it":
            if not self.losses or n % 2:
                self.losses.append(loss(*self.call(x)))
            self.losses[n % len(self.losses)].backward(retain_graph=True)
        elif what == "forget a loss" and self.losses:
            self.losses.pop(n % len(self.losses))
        elif what.endswith("gradients"):
            self.model.zero_grad(what == "empty gradients")
        elif what == "evaluate":
            with torch.no_grad():
                self.model.eval()
                self.kept.append(self.call(x)[0])
                self.model.train()
        elif what == "keep an output":
            outputs = self.call(x)
            self.kept.append(outputs[n % 2].detach())
            loss(*outputs).backward()
        elif what == "forget an output" and self.kept:
            self.kept.pop(n % len(self.kept))
        elif what == "keep a gradient":
            self.kept.append(self.gradients()[n % len(parameters)])
            parameters[n % len(parameters)].grad = None
        elif what == "change gradients in place":
            for p in parameters:
                if p.grad is not None:
                    p.grad.mul_(0.5)
        elif what == "update parameters" and not self.losses:
            with torch.no_grad():
                for p in parameters:
                    if p.grad is not None:
                        p -= 0.01 * p.grad


def a_batch(rng: random.Random, sizes: tuple[int, ...] = ()) -> torch.Tensor:
    rows = rng.choice(sizes) if sizes else 7 if rng.random() < 0.2 else 6
    return torch.randn(1, 6).expand(rows, 6) if rng.random() < 0.15 else torch.randn(rows, 6)


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("kind", [Normed, TwoRegions, ThreeRegions, SavesItsInput, InReusedMemory, Large])
@pytest.mark.parametrize("seed", SEEDS)
def test_random_sequences(hostile: Arena, seed: int, kind: type[nn.Module]) -> None:  # noqa: F811
    a_random_sequence(hostile, seed, kind)


@pytest.mark.slow_after(1)
@pytest.mark.parametrize("kind", [Normed, TwoRegions, ThreeRegions, SavesItsInput, InReusedMemory, Large])
@pytest.mark.parametrize("seed", SEEDS)
def test_random_sequences_of_changing_shapes(hostile: Arena, seed: int, kind: type[nn.Module]) -> None:  # noqa: F811
    most = random.Random(seed).choice([None, 1, 2])
    a_random_sequence(hostile, 300 + seed, kind, (3, 4, 6, 8), operations=70, max_signatures=most)


def a_random_sequence(
    hostile: Arena,  # noqa: F811
    seed: int,
    kind: type[nn.Module],
    sizes: tuple[int, ...] = (),
    operations: int = OPERATIONS,
    **more: Any,
) -> None:
    rng = random.Random(seed)
    torch.manual_seed(seed)
    model = kind()
    options: dict[str, Any] = {"indirection": rng.choice(["auto", "auto", "host", "device"])}
    options |= {
        "direct": rng.random() < 0.8,
        "phases": rng.choice(["both", "both", "both", "forward", "backward"]),
    }
    ours = World(model, compiled(model, **options, **more))
    plain = copy.deepcopy(model)
    theirs = World(plain, plain)
    for i in range(operations):
        what = rng.choices(list(WEIGHTS), list(WEIGHTS.values()))[0]
        if what == "collect garbage":
            gc.collect()
        elif what == "capture again":
            for region in graphed_regions(hostile):
                if rng.random() < 0.6:
                    region.capture_again()
        elif what == "go without a graph":
            graphed = graphed_regions(hostile)
            if len(graphed) > 2:
                rng.choice(graphed).give_up("for the test")
        else:
            given = (
                a_batch(rng, sizes),
                rng.choice(LOSSES),
                rng.choice([True, True, False, None]),
                rng.randrange(100),
            )
            for world in (ours, theirs):
                world.do(what, *given)
        states = [[*w.gradients(), *w.kept, *w.model.state_dict().values()] for w in (ours, theirs)]
        for a, b in zip(*states, strict=True):
            assert torch.allclose(a.float(), b.float(), rtol=1e-4, atol=1e-5), f"after operation {i}: {what}"
    assert sum(row.replays for row in backend.report().regions) > 0
