"""Regions of eager kernels (`compile=False`): bit for bit as plain training around what no graph can hold."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from replays import text_of
from torch import Tensor, nn
from training import Diary, adamw, both

from pygraph_train import StepReport

SIZE, WIDTH, CLASSES = 12, 16, 5


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(1)


class Tagger(nn.Module):
    """Tokens, of which a mask picks those that the loss is made of."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, WIDTH)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.1, batch_first=True)
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, CLASSES)

    def loss(self, tokens: Tensor, picked: Tensor, labels: Tensor) -> Tensor:
        hidden = self.norm(self.layer(self.embedding(tokens)))
        return nn.functional.cross_entropy(self.head(hidden[picked]), labels[picked])

    @staticmethod
    def batches(steps: int) -> list[tuple[Tensor, ...]]:
        g, found = generator(), []
        for _ in range(steps):
            tokens, labels = (torch.randint(n, (4, SIZE), generator=g) for n in (20, CLASSES))
            picked = torch.zeros(4 * SIZE, dtype=torch.bool)
            picked[torch.randperm(4 * SIZE, generator=g)[:10]] = True
            found.append((tokens, picked.view(4, SIZE), labels))
        return found


class Experts(nn.Module):
    """Each token goes to one expert: `torch.where` says which tokens an expert gets."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.GELU())
        self.gate = nn.Linear(WIDTH, 3)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 32), nn.ReLU(), nn.Linear(32, WIDTH)) for _ in range(3)
        )
        self.last = nn.Sequential(nn.LayerNorm(WIDTH), nn.Dropout(0.1), nn.Linear(WIDTH, CLASSES))

    def loss(self, x: Tensor, labels: Tensor) -> Tensor:
        hidden = self.first(x)
        weights = self.gate(hidden).softmax(-1)
        best, chosen = weights.max(-1)
        mixed = torch.zeros_like(hidden)
        for number, expert in enumerate(self.experts):
            (where,) = torch.where(chosen == number)
            mixed = mixed.index_add(0, where, expert(hidden[where]) * best[where, None])
        return nn.functional.cross_entropy(self.last(mixed), labels)

    @staticmethod
    def batches(steps: int) -> list[tuple[Tensor, ...]]:
        g = generator()
        return [
            (torch.randn(SIZE, WIDTH, generator=g), torch.randint(CLASSES, (SIZE,), generator=g))
            for _ in range(steps)
        ]


class Graph(nn.Module):
    """Graph convolutions, with a loop at each node in place of those that the graph has."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList((nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)))
        self.norm = nn.LayerNorm(WIDTH)

    def loss(self, x: Tensor, edges: Tensor, labels: Tensor) -> Tensor:
        for layer in self.layers:
            others = edges[:, edges[0] != edges[1]]
            nodes = torch.arange(len(x))
            sources, targets = torch.cat([others, nodes.expand(2, -1)], 1)
            degree = torch.zeros(len(x)).scatter_add(0, targets, torch.ones(len(targets)))
            factor = degree.pow(-0.5)
            messages = layer(x)[sources] * (factor[sources] * factor[targets])[:, None]
            x = torch.zeros(len(x), messages.shape[1]).index_add(0, targets, messages)
            x = self.norm(x).relu() if layer is self.layers[0] else x
        return nn.functional.cross_entropy(x, labels)

    @staticmethod
    def batches(steps: int) -> list[tuple[Tensor, ...]]:
        g, edges = generator(), torch.tensor([[0, 1, 2, 2, 5, 7, 7, 3], [1, 1, 3, 2, 4, 0, 7, 6]])
        return [
            (torch.randn(SIZE, WIDTH, generator=g), edges, torch.randint(CLASSES, (SIZE,), generator=g))
            for _ in range(steps)
        ]


def training(kind: Any, steps: int = 40, **options: Any) -> Any:
    def script(diary: Diary) -> None:
        model = kind()
        optimizer = adamw(model)
        step = diary.step(model.loss, model=model, optimizer=optimizer, **options)
        for batch in kind.batches(steps):
            diary.write("loss", step(*batch))
            diary.write_state(model, optimizer)

    return script


@pytest.fixture
def no_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("something was compiled by Inductor")

    monkeypatch.setattr("pygraph_train.regions.inductor.compile_with_inductor", refuse)
    monkeypatch.setattr("torch._inductor.compile_fx.compile_fx", refuse)


def in_regions(report: StepReport, least: int = 20) -> StepReport:
    assert report.plan == "{F} {B} {O}", str(report)
    assert {r.phase for r in report.regions() if r.replays >= least} >= {"forward", "backward"}, text_of(
        report
    )
    return report


@pytest.mark.parametrize("kind", [Tagger, Experts, Graph])
def test_parts_around_what_depends_on_data_are_in_graphs(kind: Any, no_inductor: None) -> None:
    report = in_regions(both(training(kind), compile=False, replays=20))
    assert report.steps_replayed == 0
    assert "compiled" not in str(report.controllers[0].best)
