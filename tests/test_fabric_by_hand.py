"""`PyGraphFabric.graphed_step(manual_optimization=True)` against the same function in a stock Fabric."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import softplus

pytest.importorskip("lightning.fabric")

from fabric_training import Script, both, fresh, loss_of, setup  # noqa: F401
from lightning.fabric import Fabric
from training import line_of

from pygraph_train import PyGraphFabric


def graphed(script: Script, step: Callable[..., Any], models: list[Any], optimizers: list[Any]) -> Any:
    """The function itself, where nothing is attached."""
    if script.pygraph is None:
        return step
    return script.pygraph.graphed_step(step, model=models, optimizer=optimizers, manual_optimization=True)


def whole(script: Callable[[Script], None], least: int = 30, **options: Any) -> None:
    (step,) = both(script, replays=least, **options).whole_steps.values()
    assert step.plan == "{F B O}" and step.steps_replayed >= least, str(step)


def gan(script: Script) -> None:
    parts = (
        nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 6)),
        nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.1), nn.LeakyReLU(0.2), nn.Linear(8, 1)),
    )
    fabric = script.fabric
    optimizers = [torch.optim.AdamW(part.parameters(), lr=1e-2, fused=True) for part in parts]
    (maker, of_maker), (judge, of_judge) = (
        fabric.setup(part, optimizer) for part, optimizer in zip(parts, optimizers, strict=True)
    )
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizers[0], 0.95)

    def step(real: Tensor) -> Any:
        made = maker(torch.randn(len(real), 4))
        first = softplus(-judge(real)).mean() + softplus(judge(made.detach())).mean()
        of_judge.zero_grad()
        fabric.backward(first)
        norm = fabric.clip_gradients(judge, of_judge, max_norm=0.5, error_if_nonfinite=False)
        of_judge.step()
        second = softplus(-judge(made)).mean()
        of_maker.zero_grad()
        fabric.backward(second)
        fabric.clip_gradients(maker, of_maker, clip_val=0.1)
        of_maker.step()
        return first, second, norm

    step = graphed(script, step, [maker, judge], [of_maker, of_judge])
    draw = torch.Generator().manual_seed(1)
    for _ in range(45):
        script.write("result", step(torch.randn(8, 6, generator=draw)))
        schedule.step()
        script.write_state(maker, of_maker)
        script.write_state(judge, of_judge)


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true", "64-true"])
def test_a_gan_in_each_precision(precision: str) -> None:
    whole(gan, precision=precision)


class Steps:
    """Two updates, and what no graph can hold."""

    def __init__(self, fabric: Fabric, model: Any, optimizer: Any, kind: str) -> None:
        self.fabric, self.model, self.optimizer, self.kind = fabric, model, optimizer, kind
        self.count = 0

    def __call__(self, batch: Any) -> Any:
        for _ in range(2):
            self.optimizer.zero_grad()
            loss = loss_of(self.model, batch)
            self.fabric.backward(loss)
            getattr(self, self.kind)()
            self.optimizer.step()
        return loss

    def plainly(self) -> None:
        pass

    def counted(self) -> None:
        self.count += 1

    def checked(self) -> None:
        self.fabric.clip_gradients(self.model, self.optimizer, max_norm=0.5)

    def read(self) -> None:
        self.model.second.weight.grad.mul_(0.5)


def stepping(kind: str) -> Callable[[Script], None]:
    def script(script: Script) -> None:
        model, optimizer, loader, schedule = setup(script, steps=60)
        steps = Steps(script.fabric, model, optimizer, kind)
        step = graphed(script, steps, [model], [optimizer])
        for batch in loader:
            script.write("loss", step(batch))
            schedule.step()
            script.write("count", steps.count)
            script.write_state(model, optimizer)

    return script


def test_several_updates_of_one_optimizer() -> None:
    whole(stepping("plainly"), 45)


@pytest.mark.parametrize(
    ("kind", "reason", "line"),
    [
        ("counted", "count is written by the step", "self.count += 1"),
        ("checked", "error_if_nonfinite=True", "self.fabric.clip_gradients"),
        ("read", "the step reads", "weight.grad.mul_"),
    ],
)
def test_what_no_graph_can_hold_has_graphs_of_its_phases(kind: str, reason: str, line: str) -> None:
    (step,) = both(stepping(kind), replays=5).whole_steps.values()
    assert step.steps_replayed == 0
    problem = next(f for f in step.fallbacks if reason in f.reason)
    assert problem.where == line_of(Steps, line), str(step)


class Counts:
    """A callback of Fabric."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_after_optimizer_step(self, strategy: Any, optimizer: torch.optim.Optimizer) -> None:
        self.seen.append(float(optimizer.param_groups[0]["params"][0].sum()))


def test_a_callback_after_each_update() -> None:
    seen = []

    def callbacks() -> list[Any]:
        seen.append(Counts())
        return [seen[-1]]

    (step,) = both(stepping("plainly"), replays=20, callbacks=callbacks).whole_steps.values()
    assert "Counts.on_after_optimizer_step runs in Python" in step.fallbacks[0].reason
    plain, found = (counts.seen for counts in seen)
    assert len(plain) == 120 and plain == found


def test_what_manual_optimization_does_not_take() -> None:
    fabric = Fabric(accelerator="cpu", devices=1)
    pygraph = PyGraphFabric(engine="emulated").attach(fabric)
    plain = nn.Linear(2, 1)
    model, optimizer = fabric.setup(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    with pytest.raises(ValueError, match="clips by itself"):
        pygraph.graphed_step(print, model=model, optimizer=optimizer, max_norm=1.0, manual_optimization=True)
    with pytest.raises(TypeError, match="the model of graphed_step is a Linear"):
        pygraph.graphed_step(print, model=[model, plain], optimizer=optimizer, manual_optimization=True)
    pygraph.detach()
