"""What the trace of a first step does not do: work that grows with the step, or that only logs of Dynamo read."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch._dynamo.config
import torch._dynamo.convert_frame
import torch._dynamo.funcname_cache
import torch._dynamo.guards
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from pygraph_train import GraphedStep
from pygraph_train.torch_private.beside_tracing import old_objects_wait

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


def test_whether_dynamo_is_verbose_is_not_looked_up_for_each_instruction() -> None:
    kind = type(torch._dynamo.config)
    look_up, names, counts = kind.__getattr__, list[str](), list[int]()

    def noted(self: Any, name: str) -> Any:
        names.append(name)
        return look_up(self, name)

    with mock.patch.object(kind, "__getattr__", noted):
        for layers in (2, 6):
            names.clear()
            replayed(layers)
            counts.append(names.count("verbose"))
    assert 0 < counts[0] == counts[1]
    assert "verbose" not in vars(torch._dynamo.config)
    with torch._dynamo.config.patch(verbose=True):
        assert torch._dynamo.config.verbose


def test_guards_are_not_timed_for_a_log() -> None:
    with mock.patch.object(torch._dynamo.guards, "profile_guard_manager", return_value=0.0) as timed:
        replayed(2)
    assert not timed.called


def test_the_garbage_collector_looks_at_new_objects_only_while_a_step_is_traced() -> None:
    thresholds: list[tuple[int, ...]] = []
    compile_frame = torch._dynamo.convert_frame.compile_frame

    def seen(*args: Any, **kwargs: Any) -> Any:
        thresholds.append(gc.get_threshold())
        return compile_frame(*args, **kwargs)

    before = gc.get_threshold()
    with mock.patch.object(torch._dynamo.convert_frame, "compile_frame", seen):
        replayed(2)
    assert thresholds and all(third > 1 << 20 for _, _, third in thresholds)
    assert gc.get_threshold() == before


@pytest.mark.passes_without_graphs("the garbage collector only")
def test_old_objects_wait_for_the_end_of_a_trace() -> None:
    looks: list[int] = []

    def looked(phase: str, info: dict[str, int]) -> None:
        looks.append(info["generation"]) if phase == "start" else None

    before = gc.get_threshold()
    gc.callbacks.append(looked)
    try:
        gc.set_threshold(300, 2, 2)
        with old_objects_wait():
            kept = [[i] for i in range(100_000)]
        assert kept and looks and 2 not in looks, "young objects only"
        assert gc.get_threshold() == (300, 2, 2)
        gc.set_threshold(0)
        with old_objects_wait():
            assert gc.get_threshold()[0] == 0, "nor does it begin where it is off"
    finally:
        gc.set_threshold(*before)
        gc.callbacks.remove(looked)
