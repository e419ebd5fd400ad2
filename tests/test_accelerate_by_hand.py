"""`accelerator.graphed_step` of functions with several backwards or updates, against stock Accelerate."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import softplus
from torch.utils.data import DataLoader
from training import line_of

accelerate_training = pytest.importorskip("accelerate_training", exc_type=ImportError)

from accelerate_training import (  # noqa: E402
    Numbers,
    Script,
    both,
    fresh,  # noqa: F401
    loss_of,
    setup,
)


def gan(script: Script, epochs: int = 1) -> Any:
    """Maker, judge, an optimizer and a schedule for each, and a loader, prepared."""
    maker = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 6))
    judge = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.1), nn.LeakyReLU(0.2), nn.Linear(8, 1))
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2, fused=True) for m in (maker, judge)]
    schedules = [torch.optim.lr_scheduler.CosineAnnealingLR(o, T_max=50) for o in optimizers]
    loader = DataLoader(Numbers(), batch_size=6)
    return script.accelerator.prepare(maker, judge, *optimizers, loader, *schedules)


def trained(
    script: Script, step: Callable[..., Any], loader: Any, *parts: tuple[nn.Module, Any], epochs: int = 1
) -> None:
    step = script.graphed(step)
    for _ in range(epochs):
        for batch in loader:
            script.write("result", step(batch))
            for model, optimizer in parts:
                script.write_state(model, optimizer)


def whole(script: Callable[[Script], None], least: int, **options: Any) -> None:
    """Every step is one graph, and does what it does in stock Accelerate."""
    (step,) = both(script, replays=least, **options).whole_steps.values()
    assert step.plan == "{F B O}" and step.steps_replayed >= least, str(step)


def test_a_backward_that_was_kept_under_another_name_is_told() -> None:
    def script(script: Script) -> None:
        maker, judge, _, of_judge, loader, *_ = gan(script)
        backward = script.accelerator.backward

        def step(batch: dict[str, Tensor]) -> Tensor:
            of_judge.zero_grad()
            loss = (
                softplus(judge(maker(torch.randn(6, 4)).detach())).mean()
                + softplus(-judge(batch["x"])).mean()
            )
            backward(loss)
            of_judge.step()
            return loss

        trained(script, step, loader, (judge, of_judge))

    (step,) = both(script, replays=60).whole_steps.values()
    (fallback,) = step.fallbacks
    assert "(backward = accelerator.backward) are not seen" in fallback.fix


@pytest.mark.parametrize("precision", ["no", "bf16"])
@pytest.mark.parametrize("schedules", [False, True])
def test_a_gan(precision: str, schedules: bool) -> None:
    def script(script: Script) -> None:
        maker, judge, of_maker, of_judge, loader, *stepped = gan(script)
        accelerator = script.accelerator

        def step(batch: Any) -> dict[str, Tensor]:
            real = batch["x"]
            with accelerator.autocast():
                made = maker(torch.randn(len(real), 4))
                first = softplus(-judge(real)).mean() + softplus(judge(made.detach())).mean()
            of_judge.zero_grad()
            accelerator.backward(first)
            norm = accelerator.clip_grad_norm_(judge.parameters(), 0.5)
            of_judge.step()
            with accelerator.autocast():
                second = softplus(-judge(made)).mean()
            of_maker.zero_grad()
            accelerator.backward(second)
            of_maker.step()
            for schedule in stepped if schedules else ():
                schedule.step()
            return {"judge": first, "maker": second, "norm": norm}

        trained(script, step, loader, (maker, of_maker), (judge, of_judge))

    whole(script, 30, mixed_precision=precision)


def test_several_steps_of_one_optimizer_and_an_average() -> None:
    def script(script: Script) -> None:
        model, optimizer, loader, _ = setup(script)
        average = copy.deepcopy(script.accelerator.unwrap_model(model)).requires_grad_(False)

        def step(batch: Any) -> Tensor:
            for _ in range(2):
                optimizer.zero_grad()
                loss = loss_of(model, batch)
                script.accelerator.backward(loss)
                optimizer.step()
            with torch.no_grad():
                for p, q in zip(average.parameters(), model.parameters(), strict=True):
                    p.lerp_(q, 0.1)
            return loss

        trained(script, step, loader, (model, optimizer))
        script.write("average", dict(average.named_parameters()))

    whole(script, 25)


def _twice(accelerator: Any, model: Any, optimizer: Any, batch: Any) -> Any:
    for _ in range(2):
        accelerator.backward(loss_of(model, batch))
    optimizer.step()
    optimizer.zero_grad()


def _late(accelerator: Any, model: Any, optimizer: Any, batch: Any) -> Any:
    optimizer.step()
    optimizer.zero_grad()
    accelerator.backward(loss_of(model, batch))


def _parameters_after_the_update(accelerator: Any, model: Any, optimizer: Any, batch: Any) -> Any:
    optimizer.zero_grad()
    accelerator.backward(loss_of(model, batch))
    optimizer.step()
    return [p.detach().sum() for p in model.parameters()]


def _retained(accelerator: Any, model: Any, optimizer: Any, batch: Any) -> Any:
    optimizer.zero_grad()
    loss = loss_of(model, batch)
    accelerator.backward(loss, retain_graph=True)
    accelerator.backward(2 * loss)
    optimizer.step()
    return loss


@pytest.mark.parametrize("body", [_twice, _late, _parameters_after_the_update, _retained])
def test_calls_in_any_order(body: Callable[..., Any]) -> None:
    def script(script: Script) -> None:
        model, optimizer, loader, _ = setup(script)

        def step(batch: Any) -> Any:
            return body(script.accelerator, model, optimizer, batch)

        trained(script, step, loader, (model, optimizer), epochs=2)

    whole(script, 40)


class Steps:
    """Two backwards, and what no graph can hold."""

    def __init__(self, accelerator: Any, model: Any, optimizer: Any, schedule: Any, kind: str) -> None:
        self.accelerator, self.model, self.optimizer = accelerator, model, optimizer
        self.schedule, self.kind, self.count = schedule, kind, 0

    def __call__(self, batch: Any) -> Any:
        self.optimizer.zero_grad()
        loss = loss_of(self.model, batch)
        self.accelerator.backward(loss, retain_graph=True)
        self.accelerator.backward(loss)
        return getattr(self, self.kind)(loss)

    def counted(self, loss: Tensor) -> Any:
        self.optimizer.step()
        self.count += 1
        return loss

    def scheduled(self, loss: Tensor) -> Any:
        self.schedule.step()
        self.optimizer.step()
        return loss

    def numbered(self, loss: Tensor) -> Any:
        self.optimizer.step()
        self.schedule.step()
        return loss, self.schedule.get_last_lr()[0]

    def read(self, loss: Tensor) -> Any:
        self.optimizer.step()
        return loss.detach(), torch.tensor(loss.item())


@pytest.mark.parametrize(
    ("kind", "reason", "line"),
    [
        ("counted", "count is written by the step", "self.count += 1"),
        ("scheduled", "accelerator.backward 2 times", None),
        ("numbered", "accelerator.backward 2 times", None),
        ("read", "on the host", "torch.tensor(loss.item())"),
    ],
)
def test_what_no_graph_can_hold_has_graphs_of_its_phases(kind: str, reason: str, line: str | None) -> None:
    def script(script: Script) -> None:
        model, optimizer, loader, schedule = setup(script, steps=90)
        steps = Steps(script.accelerator, model, optimizer, schedule, kind)
        trained(script, steps, loader, (model, optimizer), epochs=3)
        script.write("count", steps.count)

    report = both(script, replays=30)
    (step,) = report.whole_steps.values()
    assert step.steps_replayed == 0
    found = next(f for f in step.fallbacks if reason in f.reason)
    assert line is None or found.where == line_of(Steps, line), str(report)


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"gradient_accumulation_steps": 2}, "gradients are accumulated")],
)
def test_accelerators_that_run_such_steps_in_phases(options: dict[str, Any], reason: str) -> None:
    def script(script: Script) -> None:
        model, optimizer, loader, _ = setup(script)

        def step(batch: Any) -> Any:
            return _retained(script.accelerator, model, optimizer, batch)

        trained(script, step, loader, (model, optimizer), epochs=2)

    report = both(script, replays=20, **options)
    (step,) = report.whole_steps.values()
    assert any(reason in f.reason for f in step.fallbacks), str(report)


def test_saved_and_loaded_in_the_middle_of_a_run(tmp_path: Any) -> None:
    def script(script: Script) -> None:
        maker, judge, of_maker, of_judge, loader, *_ = gan(script)
        accelerator = script.accelerator

        def step(batch: Any) -> Any:
            real = batch["x"]
            made = maker(torch.randn(len(real), 4))
            first = softplus(-judge(real)).mean() + softplus(judge(made.detach())).mean()
            of_judge.zero_grad()
            accelerator.backward(first)
            of_judge.step()
            second = softplus(-judge(made)).mean()
            of_maker.zero_grad()
            accelerator.backward(second)
            of_maker.step()
            return first, second

        step = script.graphed(step)
        folder = str(tmp_path / type(accelerator).__module__)
        for epoch in range(3):
            for batch in loader:
                script.write("losses", step(batch))
            script.write_state(maker, of_maker)
            script.write_state(judge, of_judge)
            if epoch == 0:
                accelerator.save_state(folder)
            if epoch == 1:
                accelerator.load_state(folder)

    whole(script, 90)
