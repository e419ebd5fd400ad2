"""Batches of changing shapes: few traces, a graph for a shape that pays for it, and nothing computed differently."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from training import Diary, Net, adamw, batches, both, loss_of

from pygraph_train import StepReport
from pygraph_train.tracing.trace import Trace


@contextmanager
def traces() -> Iterator[list[Trace]]:
    """What is traced inside, once for each time that Dynamo's backend is called."""
    found: list[Trace] = []
    backend = Trace._backend

    def counted(self: Trace, *args: Any) -> Any:
        found.append(self)
        return backend(self, *args)

    Trace._backend = counted  # type: ignore[method-assign]
    try:
        yield found
    finally:
        Trace._backend = backend  # type: ignore[method-assign]


class Text(nn.Module):
    """A small encoder: positions from `arange`, an attention mask, `view(-1, n)`, dropout."""

    def __init__(self, words: int = 11, width: int = 8, dropout: float = 0.1) -> None:
        super().__init__()
        self.words = nn.Embedding(words, width)
        self.places = nn.Embedding(256, width)
        self.heads = nn.Linear(width, 3 * width)
        self.norm = nn.LayerNorm(width)
        self.dropout = nn.Dropout(dropout)
        self.out = nn.Linear(width, words)

    def forward(self, tokens: Tensor, mask: Tensor) -> Tensor:
        count, length = tokens.shape
        x = self.words(tokens) + self.places(torch.arange(length, device=tokens.device))
        q, k, v = self.heads(x).view(count, length, 3, 2, -1).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None, :])
        x = self.norm(x + self.dropout(attended.transpose(1, 2).reshape(count, length, -1)))
        return self.out(x).view(count * length, -1)


def text_loss(model: nn.Module) -> Callable[[dict[str, Tensor]], dict[str, Tensor]]:
    """A loss over the tokens that the mask leaves."""

    def step_fn(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        logits = model(batch["tokens"], batch["mask"])
        loss = nn.functional.cross_entropy(logits, batch["labels"].view(-1), ignore_index=-100)
        return {"loss": loss, "mean": logits.mean()}

    return step_fn


def text(length: int, count: int = 4, seed: int = 0) -> dict[str, Tensor]:
    """A batch with padding; the default random state is left alone."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 11, (count, length), generator=generator)
    used = torch.randint(1, length + 1, (count, 1), generator=generator) if length else torch.zeros(count, 1)
    mask = torch.arange(length)[None] < used
    return {"tokens": tokens, "mask": mask, "labels": tokens.masked_fill(~mask, -100)}


def train(lengths: list[int], counts: list[int] | None = None, **options: Any) -> Callable[[Diary], None]:
    """A script that trains on texts of these lengths."""

    def script(diary: Diary) -> None:
        model = Text()
        optimizer = adamw(model)
        step = diary.step(text_loss(model), model=model, optimizer=optimizer, **options)
        for index, length in enumerate(lengths):
            count = 4 if counts is None else counts[index]
            diary.write("loss", step(text(length, count, seed=index)))
            if index % 20 == 0:
                diary.write_state(model, optimizer)
        diary.write_state(model, optimizer)

    return script


def drawn(lengths: range | list[int], steps: int, seed: int = 0) -> list[int]:
    return random.Random(seed).choices(list(lengths), k=steps)


def fused_captures(report: StepReport) -> int:
    return sum(capture.plan == "{F B O}" for capture in report.captures)


def test_49_lengths_have_two_traces() -> None:
    with traces() as found:
        report = both(train(drawn(range(16, 65), 400)), replays=60, plan="{F B O}")
    assert len(found) == 2
    assert report.shapes.met == 49
    assert fused_captures(report) == report.shapes.with_graphs <= 49
    assert not report.fallbacks, str(report)


def test_few_lengths_replay_nearly_always() -> None:
    with traces() as found:
        report = both(train(drawn([16, 24, 32, 40, 48], 150)), replays=115, plan="{F B O}")
    assert len(found) == 2
    assert fused_captures(report) == 5


def test_ever_new_lengths_cost_nothing() -> None:
    """No shape comes back: nothing is captured, and what is remembered is bounded."""

    def script(diary: Diary) -> None:
        model = Net(dropout=0.0)
        step = diary.step(loss_of(model), model=model, optimizer=adamw(model))
        x, y = batches(1, size=2100)[0]
        for length in range(2, 2100):
            loss = step((x[:length], y[:length]))
        diary.write("loss", loss)
        if diary.graphed:
            assert len(step._runner._signatures._by_key) <= 1024

    with traces() as found:
        report = both(script, never="every shape is there once")
    assert len(found) <= 3
    assert not report.captures
    assert report.shapes.met == 2098
