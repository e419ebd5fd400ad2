"""What the report says of steps that are not one graph: a true sentence, and the line that it is about."""

from __future__ import annotations

import linecache
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from training import CONFIG

from pygraph_train import GraphedStep


def nonzero(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean() + x[:, 0].gt(0).nonzero().float().mean()  # here


def masked(model: nn.Module, x: Tensor) -> Tensor:
    y: Tensor = model(x)
    return y[y > -9].sum()  # here


def own_generator(model: nn.Module, x: Tensor) -> Tensor:
    noise = torch.randn(x.shape, generator=torch_generator)  # here
    return model(x + noise).square().mean()  # type: ignore[no-any-return]


def transformed(model: nn.Module, x: Tensor) -> Tensor:
    return torch.func.vmap(lambda row: model(row).square().sum())(x).mean()  # type: ignore[no-any-return]  # here


torch_generator = torch.Generator().manual_seed(0)


def row_of(model: nn.Module, fn: Callable[[nn.Module, Tensor], Tensor]) -> tuple[str, str | None]:
    torch.compiler.reset()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    step = GraphedStep(lambda x: fn(model, x), model=model, optimizer=optimizer, config=CONFIG)
    for _ in range(6):
        step(torch.randn(6, 4))
    if fn is transformed and not step.report().fallbacks:  # torch 2.11 traces it
        assert step.report().steps_replayed
        pytest.skip("this torch traces transforms of torch.func")
    row = step.report().fallbacks[0]
    return row.reason, row.where


@pytest.mark.parametrize(
    ("fn", "words"),
    [
        (nonzero, "shape depends on tensor values"),
        (masked, "shape depends on tensor values"),
        (own_generator, "torch.Generator of its own"),
        (transformed, "torch.func"),
    ],
)
def test_the_reason_names_what_it_is_and_its_line(
    fn: Callable[[nn.Module, Tensor], Tensor], words: str
) -> None:
    reason, where = row_of(nn.Linear(4, 3), fn)
    assert words in reason, reason
    file, _, line = str(where).rpartition(":")
    assert "# here" in linecache.getline(file, int(line)), where


def test_batch_norm_without_momentum_is_told_as_such() -> None:
    model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, momentum=None))
    reason, where = row_of(model, lambda model, x: model(x).square().mean() + model(x)[0].sum())
    assert "on the device" in reason and "momentum=None" in reason and str(where)[-1].isdigit(), (
        reason,
        where,
    )
