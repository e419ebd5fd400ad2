"""Batches of changing lengths on a GPU: few traces, a graph for each length that pays for it, no other numbers."""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from test_changing_shapes import traces
from torch import Tensor, nn

from pygraph_train import GraphedStep

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

WORDS = 97


class Encoder(nn.Module):
    def __init__(self, dropout: float = 0.1, width: int = 64, layers: int = 3) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.places = nn.Embedding(512, width)
        self.layers = nn.ModuleList(
            nn.ModuleDict(
                {
                    "heads": nn.Linear(width, 3 * width),
                    "norm": nn.LayerNorm(width),
                    "mix": nn.Linear(width, width),
                }
            )
            for _ in range(layers)
        )
        self.dropout = nn.Dropout(dropout)
        self.out = nn.Linear(width, WORDS)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        count, length = tokens.shape
        x = self.words(tokens) + self.places(torch.arange(length, device=tokens.device))
        for layer in self.layers:
            q, k, v = layer["heads"](x).view(count, length, 3, 4, -1).permute(2, 0, 3, 1, 4)
            scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
            attended = scores.masked_fill(~mask[:, None, None, :], -1e4).softmax(-1) @ v
            x = layer["norm"](
                x + self.dropout(layer["mix"](attended.transpose(1, 2).reshape(count, length, -1)).relu())
            )
        return self.out(x).view(count * length, -1)


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(batch["tokens"], batch["mask"])
    return nn.functional.cross_entropy(logits, batch["labels"].view(-1), ignore_index=-100)


def texts(lengths: list[int], count: int = 4) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    found = []
    for length in lengths:
        tokens = torch.randint(0, WORDS, (count, length), generator=generator)
        mask = torch.arange(length)[None] < torch.randint(1, length + 1, (count, 1), generator=generator)
        batch = {"tokens": tokens, "mask": mask, "labels": tokens.masked_fill(~mask, -100)}
        found.append({name: value.cuda() for name, value in batch.items()})
    return found


def drawn(lengths: range | list[int], steps: int) -> list[int]:
    return random.Random(0).choices(list(lengths), k=steps)


@pytest.fixture(autouse=True)
def deterministic() -> Iterator[None]:
    """Embeddings add gradients with atomics otherwise."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(before)


def plain(model: nn.Module, data: list[dict[str, Tensor]]) -> list[Tensor]:
    torch.manual_seed(7)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2.0**-9, fused=True, capturable=True)
    losses = []
    for batch in data:
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses


def graphed(model: nn.Module, data: list[dict[str, Tensor]], **options: Any) -> tuple[list[Tensor], Any]:
    torch.manual_seed(7)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2.0**-9, fused=True)
    step = GraphedStep(
        lambda batch: loss_of(model, batch), model=model, optimizer=optimizer, fuse="on", **options
    )
    losses = [step(batch) for batch in data]
    report = step.report()
    step.close()
    return losses, report


@pytest.mark.parametrize("lengths", [range(20, 69), [24, 32, 40, 48, 56]], ids=["49", "5"])
def test_eager_kernels_give_the_same_bits(lengths: range | list[int]) -> None:
    torch.manual_seed(0)
    model = Encoder().cuda()
    twin = copy.deepcopy(model)
    data = texts(drawn(lengths, 2000 if len(lengths) == 49 else 600))
    expected = plain(twin, data)
    with traces() as found:
        losses, report = graphed(model, data, compile=False)
    assert all(map(torch.equal, expected, losses)), str(report)
    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(p, q)
    assert len(found) <= 3
    assert not any("signatures are in use" in f.reason for f in report.fallbacks)
    whole = [c for c in report.captures if c.plan.startswith("{F B O}")]
    assert len(whole) <= 2 * len(lengths)
    assert report.steps_replayed >= (600 if len(lengths) == 49 else 350), str(report.verbose())


def test_inductor_compiles_for_all_lengths() -> None:
    torch.manual_seed(0)
    model = Encoder(dropout=0.0).cuda()
    twin = copy.deepcopy(model)
    data = texts(drawn(range(20, 69), 2000))
    expected = plain(twin, data)
    with traces() as found:
        losses, report = graphed(model, data, compile=True)
    torch.testing.assert_close(torch.stack(losses), torch.stack(expected), rtol=2e-2, atol=2e-2)
    assert any(c.compiled for c in report.captures), str(report.verbose())
    assert len(set(map(id, found))) <= 4, "the traces, and those that Inductor has compiled"
    assert report.steps_replayed >= 400, str(report.verbose())


def test_memory_does_not_grow_with_each_length() -> None:
    """All graphs share one pool: 25 lengths reserve little more than two of them.

    Steps of lengths without a graph use the default pool, and the graphs have a pool of their own.
    """

    def peak(lengths: list[int]) -> int:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        torch.manual_seed(0)
        model = Encoder(width=256).cuda()
        _, report = graphed(model, texts(lengths, count=16), compile=False)
        assert report.steps_replayed > 20
        return torch.cuda.max_memory_reserved()

    one = peak([64] * 60)
    many = peak([64] * 12 + drawn(range(40, 65), 1200))
    assert many <= one * 2


def test_lengths_that_never_return_cost_no_memory() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 8)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    step = GraphedStep(lambda x: model(x).square().mean(), model=model, optimizer=optimizer, compile=False)
    x = torch.randn(2100, 32, device="cuda")
    with traces() as found:
        for length in range(2, 300):
            step(x[:length])
        before = torch.cuda.memory_allocated()
        for length in range(300, 2100):
            step(x[:length])
    assert len(found) <= 2
    assert not step.report().captures
    assert torch.cuda.memory_allocated() <= before + (8 << 20)
    step.close()
