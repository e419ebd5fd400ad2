"""Bad batches that the loop catches."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
from torch import Tensor, nn
from training import CONFIG, Net, adamw, batches

from pygraph_train import GraphedStep, PyGraph


@pytest.mark.parametrize("way", ["a whole step", "manual optimization", "a loop of Accelerate"])
@pytest.mark.quick
@pytest.mark.passes_without_graphs("looks at what is printed")
def test_a_bad_batch_that_the_loop_catches_prints_no_pages(way: str) -> None:
    model: Any = Net()
    optimizer: Any = adamw(model)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(x), y)

    def by_hand(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(x, y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    if way == "a loop of Accelerate":
        accelerate = pytest.importorskip("accelerate")
        accelerator = accelerate.Accelerator(cpu=True)
        PyGraph(CONFIG).attach(accelerator)
        model, optimizer = accelerator.prepare(model, optimizer)

    def of_accelerate(x: Tensor, y: Tensor) -> Tensor:
        loss = loss_of(x, y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    steps: dict[str, Callable[..., Any]] = {
        "a whole step": GraphedStep(loss_of, model=model, optimizer=optimizer, config=CONFIG),
        "manual optimization": GraphedStep(
            by_hand, model=model, optimizer=optimizer, manual_optimization=True, config=CONFIG
        ),
        "a loop of Accelerate": of_accelerate,
    }
    printed: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = printed.append  # type: ignore[method-assign]
    log = logging.getLogger("torch._subclasses.fake_tensor")
    log.addHandler(handler)
    caught = 0
    try:
        for index, (x, y) in enumerate(batches(24)):
            try:
                steps[way](x[:, :3] if index in (0, 1, 3, 6, 15) else x, y)
            except RuntimeError:
                caught += 1
    finally:
        log.removeHandler(handler)
    assert caught == 5
    assert not printed, [record.getMessage() for record in printed]
    assert not log.disabled
