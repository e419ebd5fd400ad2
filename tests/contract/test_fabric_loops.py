"""`PyGraphFabric`: a loop as it is, and `graphed_step`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from .compare import Run, compare, same_as_plain
from .frameworks import ACCELERATOR, fabric, loader, train_compiled
from .models import Net, adamw, batches, cross_entropy

Fabric = pytest.importorskip("lightning.fabric").Fabric


def set_up(run: Run, made: Any, steps: int = 24) -> tuple[Any, ...]:
    """Model, optimizer and loader, watched."""
    model = Net()
    model, optimizer = made.setup(model, adamw(model))
    run.watch(model, optimizer.optimizer)
    return model, optimizer, made.setup_dataloaders(loader(batches(steps)))


@pytest.mark.parametrize("options", [{}, {"precision": "bf16-mixed"}], ids=str)
@pytest.mark.quick
@same_as_plain(replays=12)
def test_a_stock_loop(run: Run, options: dict[str, Any]) -> None:
    made = fabric(run, **options)
    model, optimizer, data = set_up(run, made)
    for x, y in run.each(data):
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        made.backward(loss)
        run.note("norm", made.clip_gradients(model, optimizer, max_norm=0.5))
        optimizer.step()
        run.note("loss", loss)


@same_as_plain(replays=12)
def test_a_backward_that_is_not_fabrics(run: Run) -> None:
    """Fabric allows it where strategy and precision have none of their own, as a gradient penalty needs it."""
    made = fabric(run)
    model, optimizer, data = set_up(run, made)
    for x, y in run.each(data):
        out = model(x)
        run.note(
            "asked", torch.autograd.grad(out.square().sum(), list(model.parameters()), retain_graph=True)
        )
        cross_entropy(out, y).backward()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("lbfgs", [False, True])
@pytest.mark.quick
def test_a_stock_loop_with_closures(lbfgs: bool) -> None:
    def train(run: Run) -> None:
        made = fabric(run)
        model = Net(dropout=0.0)
        optimizer: Any = torch.optim.LBFGS(model.parameters(), max_iter=3) if lbfgs else adamw(model)
        model, optimizer = made.setup(model, optimizer)
        run.watch(model)

        for x, y in run.each(batches()):

            def closure(x: Any = x, y: Any = y) -> torch.Tensor:
                optimizer.zero_grad()
                loss = cross_entropy(model(x), y)
                made.backward(loss)
                return loss

            run.note("loss", optimizer.step(closure))

    compare(train, replays=18, updates=0 if lbfgs else 15)


@same_as_plain(replays=8)
def test_a_stock_loop_that_accumulates_and_saves(run: Run) -> None:
    made = fabric(run)
    model, optimizer, data = set_up(run, made, 48)
    for number, (x, y) in enumerate(run.each(data)):
        update = number % 3 == 2
        with made.no_backward_sync(model, enabled=not update):
            made.backward(cross_entropy(model(x), y) / 3)
        if update:
            optimizer.step()
            optimizer.zero_grad()
        if number == 20:
            made.save(run.folder / "saved.pt", {"model": model, "optimizer": optimizer})
        if number == 32:
            made.load(run.folder / "saved.pt", {"model": model, "optimizer": optimizer})


@same_as_plain(replays=15)
def test_a_graphed_step(run: Run) -> None:
    made = fabric(run)
    model, optimizer, data = set_up(run, made)

    def loss_of(x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(model(x), y)

    def stock(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(x, y)
        made.backward(loss)
        stock.norm = made.clip_gradients(model, optimizer, max_norm=0.5, error_if_nonfinite=False)
        optimizer.step()
        return loss

    step: Any = stock
    if run.ours:
        clipping: dict[str, Any] = {"max_norm": 0.5, "error_if_nonfinite": False}
        step = made.pygraph.graphed_step(loss_of, model=model, optimizer=optimizer, **clipping)
    for batch in run.each(data):
        run.note("loss", step(*batch))
        run.note("norm", step.norm)
    made.print("done")


@same_as_plain(replays=12)
def test_a_graphed_step_that_makes_its_backwards_and_updates(run: Run) -> None:
    made = fabric(run)
    model, optimizer, data = set_up(run, made)

    def step(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        made.backward(loss)
        optimizer.step()
        return loss.detach()

    if run.ours:
        step = made.pygraph.graphed_step(step, model=model, optimizer=optimizer, manual_optimization=True)
    for batch in run.each(data):
        run.note("loss", step(*batch))


@same_as_plain(replays=12, updates=0)
def test_the_compile_backend_with_a_stock_fabric(run: Run) -> None:
    made = Fabric(accelerator=ACCELERATOR, devices=1)
    train_compiled(run, made.setup, made.backward)
