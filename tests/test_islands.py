"""Modules in which values decide about shapes run on the host, between the parts of a graph with the rest of the step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from training import Diary, both, sgd

WIDTH, EXPERTS, ROWS = 8, 4, 6


class Experts(nn.Module):
    """As in transformers: all experts in one parameter, and a loop over those that have something to do."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(EXPERTS, 2 * WIDTH, WIDTH) * 0.3)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * WIDTH) * 0.3)
        self.dropout = dropout

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        found = torch.zeros_like(x)
        with torch.no_grad():
            mask = F.one_hot(chosen, EXPERTS).permute(2, 1, 0)
            hit = mask.sum((-1, -2)).greater(0).nonzero()
        for number in hit:
            number = number[0]
            place, row = torch.where(mask[number])
            hidden = F.dropout(F.silu(F.linear(x[row], self.up[number])), self.dropout, self.training)
            made = F.linear(hidden, self.down[number]) * weights[row, place, None]
            found.index_add_(0, row, made.to(found.dtype))
        return found


class ExpertsApart(nn.Module):
    """Each expert has parameters of its own."""

    def __init__(self, *, hit_only: bool) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(EXPERTS))
        self.hit_only = hit_only

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        found = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            row, place = torch.where(chosen == number)
            if self.hit_only and not len(row):
                continue
            found = found.index_add(0, row, expert(x[row]).tanh() * weights[row, place, None])
        return found


class Block(nn.Module):
    """The gate uses the rows before the experts, and a shared expert uses them before and after."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.experts = experts
        self.shared = nn.Linear(WIDTH, WIDTH)
        self.shared_gate = nn.Linear(WIDTH, 1)
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        shared = self.shared(h)
        weights, chosen = self.gate(h).softmax(-1).topk(2, -1)
        found = self.experts(h, chosen, weights=weights)
        found += self.shared_gate(h).sigmoid() * shared
        return x + self.drop(found) + h * 0.1 + h.square() * 0.1  # type: ignore[no-any-return]


class Model(nn.Module):
    def __init__(self, *experts: nn.Module) -> None:
        super().__init__()
        self.inside = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(map(Block, experts))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.inside(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["y"])


def under_autocast(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return loss_of(model, batch)


def a_batch(generator: torch.Generator, rows: int = ROWS) -> dict[str, Tensor]:
    return {
        "x": torch.randn(rows, WIDTH, generator=generator),
        "y": torch.randint(0, 3, (rows,), generator=generator),
    }


def train(
    make: Callable[[], nn.Module],
    loss_of: Callable[[nn.Module, dict[str, Tensor]], Any] = loss_of,
    *,
    steps: int = 30,
    replays: int | None = 20,
    plan: str = "{F B O}",
    rows: int = ROWS,
    micro_batches: int = 1,
    make_batch: Callable[..., dict[str, Tensor]] = a_batch,
    each: Callable[[nn.Module, int], None] = lambda model, number: None,
    optimizer: Callable[..., Any] = sgd,
    **config: Any,
) -> Any:
    def script(diary: Diary) -> None:
        model = make()
        rule = optimizer(model)
        step = diary.step(lambda batch: loss_of(model, batch), model=model, optimizer=rule)
        generator = torch.Generator().manual_seed(4)
        for number in range(steps * micro_batches):
            each(model, number)
            update = number % micro_batches == micro_batches - 1
            batch = make_batch(generator, rows)
            try:
                diary.write("loss", step(batch) if update else step.accumulate(batch))
            except ZeroDivisionError as error:
                diary.write("error", str(error))
            diary.write_state(model, rule)
            diary.write("attributes", [getattr(m, "calls", None) for m in model.modules()])

    return both(script, replays=replays, plan=plan, **config)


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), 1e-2, fused=True, weight_decay=0.1)


@pytest.mark.parametrize("optimizer", [sgd, adam])
@pytest.mark.parametrize("loss", [loss_of, under_autocast])
@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_experts_run_between_parts_of_the_graph(
    optimizer: Callable[..., Any], loss: Callable[..., Any], dropout: float
) -> None:
    report = train(lambda: Model(Experts(dropout), Experts(dropout)), loss, optimizer=optimizer)
    assert not report.fallbacks, str(report)
