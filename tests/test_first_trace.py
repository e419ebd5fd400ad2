"""What the trace of a first step does not do: work that grows with the step, or that only logs of Dynamo read."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch._dynamo.funcname_cache
import torch._dynamo.guards
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from pygraph_train import GraphedStep

pytestmark = pytest.mark.quick


def trained(layers: int, plainly: bool = False, steps: int = 8) -> tuple[list[Tensor], int]:
    """Losses, and how many steps were replayed."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(4, 4) for _ in range(layers)])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def loss_of(x: Tensor) -> Tensor:
        for layer in model:
            x = layer(x).relu() * 2 if layer.in_features >= 3 else x
        return x.square().mean()

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(x)
        loss.backward()
        optimizer.step()
        return loss.detach()

    call: Callable[[Tensor], Any] = step
    if not plainly:
        call = GraphedStep(loss_of, model=model, optimizer=optimizer, compile=False, engine="emulated")
    losses = [call(torch.full((2, 4), float(i))).clone() for i in range(steps)]
    return losses, 0 if plainly else call.report().steps_replayed  # type: ignore[attr-defined]


def replayed(layers: int) -> None:
    losses, replays = trained(layers)
    assert replays >= 2
    assert all(map(torch.equal, losses, trained(layers, plainly=True)[0]))


def test_versions_are_not_read_again_for_each_call() -> None:
    trained(1)  # what is decided once
    counts = []
    for layers in (2, 6):
        with mock.patch.object(
            TorchVersion, "_convert_to_version", autospec=True, side_effect=TorchVersion._convert_to_version
        ) as read:
            replayed(layers)
        counts.append(read.call_count)
    assert counts[0] == counts[1]


def test_no_file_is_read_for_names_in_logs_that_are_off() -> None:
    names = torch._dynamo.funcname_cache.cache
    with mock.patch.dict(names, clear=True):
        replayed(2)
        assert not names
        log = torch._dynamo.symbolic_convert.trace_call_log
        level = log.level
        log.setLevel(logging.DEBUG)
        try:
            replayed(2)
        finally:
            log.setLevel(level)
        assert __file__ in names


def test_guards_are_not_timed_for_a_log() -> None:
    with mock.patch.object(torch._dynamo.guards, "profile_guard_manager", return_value=0.0) as timed:
        replayed(2)
    assert not timed.called
