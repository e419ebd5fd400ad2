"""What a step has held is free when the step is gone: a sweep of trainings does not grow."""

from __future__ import annotations

import gc
import io
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from replays import runs_of_graphs
from torch import Tensor, nn
from training import CONFIG, Net, adamw, batches

from pygraph_train import GraphedStep, PyGraphConfig, StepReport


def _host_read(model: nn.Module, losses: list[float]) -> Callable[[Any], Tensor]:
    def step_fn(batch: Any) -> Tensor:
        loss = nn.functional.cross_entropy(model(batch[0]), batch[1])
        losses.append(loss.item())
        print(losses[-1], file=io.StringIO())
        return loss

    return step_fn


def _plain(model: nn.Module, losses: list[float]) -> Callable[[Any], Tensor]:
    return lambda batch: nn.functional.cross_entropy(model(batch[0]), batch[1])


def _train(
    kind: Callable[..., Any], optimizer: Callable[..., Any], config: PyGraphConfig, close: bool, steps: int
) -> tuple[StepReport, dict[str, Any]]:
    """One training of a sweep. Nothing of it is left but its report."""
    model = Net()
    made = optimizer(model)
    step = GraphedStep(kind(model, []), model=model, optimizer=made, max_grad_norm=1.0, config=config)
    for batch in batches(steps):
        step(batch)
    if close:
        step.close()
    found = {"model": model, "optimizer": made, "a parameter": model.first.weight}
    return step.report(), {name: weakref.ref(thing) for name, thing in found.items()}


@pytest.mark.slow_after(3)
@pytest.mark.parametrize("close", [False, True], ids=["dropped", "closed"])
@pytest.mark.parametrize(
    ("kind", "optimizer", "config", "steps", "least"),
    [
        (_plain, adamw, CONFIG, 2, 0),
        (_plain, adamw, CONFIG, 20, 15),
        (_plain, adamw, PyGraphConfig(engine="emulated", fuse="off"), 60, 120),
        (_host_read, adamw, CONFIG, 60, 100),
    ],
    ids=["watched", "whole", "regions", "regions of a part"],
)
def test_a_training_that_is_over_is_freed(kind, optimizer, config, steps, least, close):
    report, things = _train(kind, optimizer, config, close, steps)
    assert runs_of_graphs(report) >= least, str(report)
    gc.collect()
    assert {name for name, ref in things.items() if ref() is not None} == set()
    assert str(report), "the report outlives it"
    torch._dynamo.reset()
