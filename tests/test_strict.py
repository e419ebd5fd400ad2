"""`on_failure="raise"`: a graph that is lost in mid-training ends the training with the reason."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training import Net, adamw, batches, loss_of

from pygraph_train import GraphedStep, PyGraphError

STEPS, LOST = 60, 20
STRICT: dict[str, Any] = {"engine": "emulated", "on_failure": "raise"}


class Changing(Net):
    """Whose forward is another one on each call, once it is told so."""

    changes, name = False, ""

    def forward(self, x: Tensor) -> Tensor:
        if self.changes:
            self.name += "a"
        return super().forward(x * 2 if self.name == "b" else x)


def new_addresses(model: Changing, optimizer: torch.optim.Optimizer, index: int) -> None:
    for p in model.parameters():
        p.data = p.data.clone()


def another_module(model: Changing, optimizer: torch.optim.Optimizer, index: int) -> None:
    model.first = nn.Linear(model.first.in_features, model.first.out_features)


def a_hook(model: Changing, optimizer: torch.optim.Optimizer, index: int) -> None:
    if index == LOST:
        optimizer.register_step_post_hook(lambda *arguments: None)


def another_forward(model: Changing, optimizer: torch.optim.Optimizer, index: int) -> None:
    model.changes = True


MOVED = "its parameters or buffers are at new addresses again and again"
NO_GRAPH = "it breaks the graph, or traces it anew in each step"
CHANGES: dict[str, tuple[Callable[..., None], str]] = {
    "new addresses": (new_addresses, MOVED),
    "another module": (another_module, MOVED),
    "a hook of the optimizer": (a_hook, "would not run in a replay"),
    "another forward in each step": (another_forward, NO_GRAPH),
}


def graphed_step(model: nn.Module, optimizer: torch.optim.Optimizer, before: Callable[[int], None]) -> None:
    step = GraphedStep(loss_of(model), model=model, optimizer=optimizer, warmup_steps=2, **STRICT)
    for index, batch in enumerate(batches(STEPS)):
        before(index)
        step(batch)


def lightning(model: nn.Module, optimizer: torch.optim.Optimizer, before: Callable[[int], None]) -> None:
    pl = pytest.importorskip("lightning.pytorch")
    from lightning_training import QUIET

    from pygraph_train import PyGraphCallback

    class Module(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = model

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            before(batch_idx)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return optimizer

    callback = PyGraphCallback(warmup_steps=2, **STRICT)
    trainer = pl.Trainer(accelerator="cpu", max_epochs=1, callbacks=[callback], **QUIET)
    trainer.fit(Module(), torch.utils.data.DataLoader(batches(STEPS), batch_size=None))


def accelerate(model: nn.Module, optimizer: torch.optim.Optimizer, before: Callable[[int], None]) -> None:
    accelerate_training = pytest.importorskip("accelerate_training", exc_type=ImportError)
    from pygraph_train import Accelerator, PyGraph

    with accelerate_training.fresh_state():
        accelerator = Accelerator(cpu=True, plugins=[PyGraph(warmup_steps=2, **STRICT)])
        prepared, stepped = accelerator.prepare(model, optimizer)
        for index, batch in enumerate(batches(STEPS)):
            before(index)
            accelerator.backward(loss_of(prepared)(batch))
            stepped.step()
            stepped.zero_grad()


def backend(model: nn.Module, optimizer: torch.optim.Optimizer, before: Callable[[int], None]) -> None:
    import pygraph_train.backend as pygraph

    compiled = pygraph.compile(model, compile=False, **STRICT)
    for index, batch in enumerate(batches(STEPS)):
        before(index)
        optimizer.zero_grad()
        loss_of(compiled)(batch).backward()
        optimizer.step()


@pytest.mark.slow_after(8)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("front_end", [graphed_step, lightning, accelerate, backend])
def test_a_graph_that_is_lost_ends_the_training(front_end: Callable[..., None], change: str) -> None:
    make, reason = CHANGES[change]
    if front_end is backend and change != "new addresses":
        pytest.skip(
            "the backend sees no optimizer, new parameters get graphs, and it is not called after many traces"
        )
    torch.compiler.reset()
    model = Changing()
    optimizer = adamw(model)
    seen = []

    def before(index: int) -> None:
        seen.append(index)
        if index >= LOST:
            make(model, optimizer, index)

    with pytest.raises(PyGraphError, match=reason):
        front_end(model, optimizer, before)
    assert LOST <= seen[-1] < STEPS - 1
