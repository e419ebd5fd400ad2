"""Backwards that autograd does not make, where nobody listens, and those that it has to make."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from pygraph_train import Accelerator, GraphedStep, PyGraph, PyGraphCallback
from pygraph_train.core.node import Delivery, made_directly
from pygraph_train.step import loss_program

from .frameworks import forget_accelerators
from .models import DEVICE, adamw, batches

STEPS = 24
ENGINE = "cuda" if DEVICE == "cuda" else "emulated"


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 3)).to(DEVICE)


@pytest.fixture
def by_autograd(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """Losses whose backwards autograd has made."""
    seen: list[Tensor] = []
    stock = Tensor.backward

    def backward(loss: Tensor, *args: Any, **kwargs: Any) -> None:
        if not seen or seen[-1] is not loss:  # torch calls it twice where a default device is set
            seen.append(loss)
        stock(loss, *args, **kwargs)

    monkeypatch.setattr(Tensor, "backward", backward)
    return seen


def trained(
    change: Callable[[Tensor], Any], accumulate: int = 1, seen: list[Tensor] | None = None
) -> GraphedStep:
    """Train plainly and with the library, which has to be the same. The step, after its training."""
    kept: list[list[Tensor]] = []
    for ours in (False, True):
        model = net()
        optimizer = adamw(model)
        torch.manual_seed(1)

        def loss_of(x: Tensor, y: Tensor, model: nn.Module = model) -> Tensor:
            return change(cross_entropy(model(x), y))

        step = GraphedStep(loss_of, model=model, optimizer=optimizer, engine=ENGINE, forward="on")
        made = []
        if ours and seen is not None:
            seen.clear()
        for number, (x, y) in enumerate(batches(STEPS)):
            update = (number + 1) % accumulate == 0
            if ours:
                loss = step(x, y) if update else step.accumulate(x, y)
            else:
                loss = loss_of(x, y)
                loss.backward()
                if update:
                    optimizer.step()
                    optimizer.zero_grad()
            made.append(loss.detach().clone())
        kept.append([*made, *(p.detach().clone() for p in model.parameters())])
    assert all(map(torch.equal, *kept))
    return step


@pytest.mark.parametrize("accumulate", [1, 3])
def test_replayed_steps_need_no_autograd(by_autograd: list[Tensor], accumulate: int) -> None:
    step = trained(lambda loss: loss, accumulate, by_autograd)
    report = step.report().to_dict()["phases_from_graphs"]
    assert report["F"] == report["B"] >= STEPS - 8
    assert len(by_autograd) == STEPS - report["B"], "each backward was made once"


def test_anomalies_are_looked_for(by_autograd: list[Tensor]) -> None:
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        trained(lambda loss: loss, seen=by_autograd)
    assert len(by_autograd) == STEPS


def test_a_hook_of_the_loss_is_called(by_autograd: list[Tensor]) -> None:
    """It is registered behind the forward of the module, and sees the gradient of each loss."""
    calls: list[float] = []

    def change(loss: Tensor) -> Tensor:
        loss.register_hook(lambda gradient: calls.append(float(gradient)))
        return loss

    trained(change, seen=by_autograd)
    assert calls == [1.0] * 2 * STEPS


def test_a_second_backward_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Somebody has kept the loss of a replayed step."""
    kept: list[Tensor] = []
    monkeypatch.setattr(loss_program, "made_directly", lambda loss: kept.append(loss) or made_directly(loss))
    trained(lambda loss: loss)
    with pytest.raises(RuntimeError, match="a second time"):
        kept[-1].backward()


def test_gradients_that_a_failed_backward_has_left_are_dropped() -> None:
    parameter = nn.Parameter(torch.zeros(3))
    delivery = Delivery()
    delivery.take([parameter], [torch.full((3,), 7.0)])  # something behind it has raised
    delivery.deliver([parameter], [torch.ones(3)])
    assert parameter.grad is not None and parameter.grad.tolist() == [1.0, 1.0, 1.0]


class WithLoss(nn.Module):
    """As models of transformers do, it computes its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(self.net(x), y)


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_stock_loop_of_accelerate(by_autograd: list[Tensor], accumulate: int) -> None:
    accelerate = pytest.importorskip("accelerate")
    kept, known = [], {"cpu": DEVICE == "cpu", "gradient_accumulation_steps": accumulate}
    for ours in (False, True):
        forget_accelerators()
        plugins = {"plugins": [PyGraph(engine=ENGINE, forward="on")]} if ours else {}
        accelerator = (Accelerator if ours else accelerate.Accelerator)(**known, **plugins)
        model = WithLoss().to(DEVICE)
        model, optimizer = accelerator.prepare(model, adamw(model))
        torch.manual_seed(1)
        by_autograd.clear()
        for x, y in batches(STEPS):
            with accelerator.accumulate(model):
                accelerator.backward(model(x, y))
                optimizer.step()
                optimizer.zero_grad()
        kept.append([p.detach().clone() for p in model.parameters()])
    assert all(map(torch.equal, *kept))
    assert len(by_autograd) <= 8, "those of the first steps"
    assert accelerator.pygraph.report().to_dict()["phases_from_graphs"]["B"] * accumulate >= STEPS - 9


def test_backwards_without_a_graph_are_counted() -> None:
    """Those inside of autocast, where the recorded one was called outside of it."""
    pytest.importorskip("accelerate")
    forget_accelerators()
    accelerator = Accelerator(cpu=DEVICE == "cpu", plugins=[PyGraph(engine=ENGINE, forward="on")])
    model, optimizer = accelerator.prepare(model := WithLoss().to(DEVICE), adamw(model))
    for number, (x, y) in enumerate(batches(STEPS)):
        loss = model(x, y)
        with torch.autocast(DEVICE, torch.bfloat16, enabled=number >= STEPS // 2):
            accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    report = accelerator.pygraph.report().to_dict()
    phases = report["phases_from_graphs"]
    assert phases["F"] >= STEPS - 9
    assert phases["F"] - phases["B"] == STEPS - STEPS // 2
    assert any("a backward runs without a graph" in each["reason"] for each in report["fallbacks"])


@pytest.mark.parametrize("accumulate", [1, 3])
def test_a_trainer_of_lightning(by_autograd: list[Tensor], accumulate: int) -> None:
    pl = pytest.importorskip("lightning.pytorch")
    kept = []

    class Module(pl.LightningModule):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.model, self.gradients = WithLoss(), []

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.model(*batch)

        def on_after_backward(self) -> None:
            if self.trainer.current_epoch == 0:
                self.gradients.append(self.model.net[0].weight.grad.clone())

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return adamw(self)

    off = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    for ours in (False, True):
        callback = PyGraphCallback(engine=ENGINE, forward="on", print_report=False)
        torch.manual_seed(0)
        module = Module()
        torch.manual_seed(1)
        by_autograd.clear()
        trainer = pl.Trainer(
            accelerator="cpu" if DEVICE == "cpu" else "gpu",
            devices=1,
            max_epochs=1,
            accumulate_grad_batches=accumulate,
            callbacks=[callback] if ours else [],
            **off,
        )
        trainer.fit(module, torch.utils.data.DataLoader(batches(STEPS), batch_size=None))
        kept.append([*module.gradients, *(p.detach().clone() for p in module.parameters())])
    assert all(map(torch.equal, *kept))
    assert len(by_autograd) <= 8, "those of the first steps"
    assert callback.report().to_dict()["phases_from_graphs"]["B"] >= STEPS - 8


def _in_micro_batches(model: nn.Module, optimizer: Any, options: Any, ours: bool) -> Any:
    step = GraphedStep(lambda x, y: cross_entropy(model(x), y), model=model, optimizer=optimizer, **options)
    for number, (x, y) in enumerate(batches(STEPS)):
        update = number % 3 == 2
        for p in model.parameters() if number % 6 == 2 else ():
            assert p.grad is not None
            p.grad.data = p.grad.data * 0.5
        if ours:
            step(x, y) if update else step.accumulate(x, y)
        else:
            cross_entropy(model(x), y).backward()
            if update:
                optimizer.step()
                optimizer.zero_grad()
    return step


def _two_forwards_a_step(model: Any, optimizer: Any, options: Any, ours: bool) -> Any:
    accelerator = Accelerator(cpu=DEVICE == "cpu", plugins=[PyGraph(**options)] if ours else [])
    model, optimizer = accelerator.prepare(model, optimizer)
    for x, y in batches(STEPS):
        loss = cross_entropy(model(x), y) + cross_entropy(model(2 * x), y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    forget_accelerators()
    return accelerator.pygraph if ours else None


@pytest.mark.parametrize("loop", [_in_micro_batches, _two_forwards_a_step])
def test_gradients_are_added_where_they_lie(loop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs add gradients of later backwards, so that nobody needs a second copy of all gradients."""
    copies: list[dict[int, Tensor]] = []
    stock = Delivery.__init__

    def made(self: Delivery) -> None:
        stock(self)
        copies.append(self._sums)

    monkeypatch.setattr(Delivery, "__init__", made)
    kept = []
    for ours in (False, True):
        model = net()
        optimizer = adamw(model)
        torch.manual_seed(1)
        ran = loop(model, optimizer, {"engine": ENGINE, "forward": "on"}, ours)
        kept.append([p.detach().clone() for p in model.parameters()])
    assert all(map(torch.equal, *kept))
    replays = ran.report().to_dict()["phases_from_graphs"]
    assert replays["B"] >= STEPS - 8, replays
    assert copies and not any(copies)


def test_zeros_keep_their_sign_where_gradients_are_added() -> None:
    """The gradients of pruned weights are zeros of both signs."""
    kept: list[list[Tensor]] = [[], []]
    for ours in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(6, 3).to(DEVICE)
        mask = (torch.arange(18, device=DEVICE) % 2).view(3, 6)

        def loss_of(x: Tensor, y: Tensor, model: Any = model, mask: Tensor = mask) -> Tensor:
            return cross_entropy(x @ (model.weight * mask).T, y)

        optimizer = torch.optim.SGD([model.weight], 0.0, fused=True)
        step = GraphedStep(loss_of, model=model, optimizer=optimizer, engine=ENGINE, forward="on")
        for number, (x, y) in enumerate(batches(STEPS)):
            if ours:
                step(x, y) if number % 3 == 2 else step.accumulate(x, y)
            else:
                if number % 3 == 0:
                    optimizer.zero_grad()
                loss_of(x, y).backward()
            assert model.weight.grad is not None
            kept[ours].append(model.weight.grad.clone())
    assert all(map(torch.equal, *kept))
    signs = [torch.stack(gradients).signbit() for gradients in kept]
    assert torch.equal(*signs) and (signs[0] & (torch.stack(kept[0]) == 0)).any()
    assert step.report().to_dict()["phases_from_graphs"]["B"] >= STEPS - 8


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("frozen", ["0.weight", "3.bias", "0.weight 0.bias 3.weight"])
@pytest.mark.slow_after(3)
def test_parameters_freeze_between_forward_and_backward(accumulate: int, frozen: str) -> None:
    """Those get no gradient in that backward, and the ones that lie there stay as they are."""
    kept = []
    for ours in (False, True):
        accelerator = Accelerator(
            cpu=DEVICE == "cpu", plugins=[PyGraph(engine=ENGINE, forward="on")] if ours else []
        )
        model = net()
        model, optimizer = accelerator.prepare(model, adamw(model))
        chosen = [model.get_parameter(name) for name in frozen.split()]
        for number, (x, y) in enumerate(batches(STEPS)):
            loss = cross_entropy(model(x), y)
            for p in chosen if number % 6 == 5 else ():
                p.requires_grad_(False)
            accelerator.backward(loss)
            for p in chosen:
                p.requires_grad_(True)
            if number % accumulate == accumulate - 1:
                optimizer.step()
                optimizer.zero_grad()
        kept.append([p.detach().clone() for p in model.parameters()])
        forget_accelerators()
    assert all(map(torch.equal, *kept))
    replays = accelerator.pygraph.report().to_dict()["phases_from_graphs"]
    assert replays["B"] >= STEPS // accumulate - 4, replays
