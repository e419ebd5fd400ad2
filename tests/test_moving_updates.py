"""Gradients that move now and then, in loops that are compared as a whole: the graph of the update stays worth it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

pytest.importorskip("accelerate")

import accelerate_training
import torch
from accelerate_training import fresh  # noqa: F401
from torch import Tensor, nn
from training import Net, batches

from pygraph_train import PyGraphConfig
from pygraph_train.gradients import places as gradient_places
from pygraph_train.graphs.emulated import EmulatedEngine
from pygraph_train.graphs.engine import MemoryUse
from pygraph_train.integrations.loop import Loop
from pygraph_train.selection import comparison, timing
from pygraph_train.selection.arms import NOTHING, OPTIMIZER, Arm
from pygraph_train.selection.controller import Estimate
from pygraph_train.step import whole_loop


@pytest.fixture(autouse=True)
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole training has needed little more than the gradients."""
    monkeypatch.setattr(EmulatedEngine, "memory", lambda self: MemoryUse(1000, 1000, 0, 10**9))
    monkeypatch.setattr(gradient_places, "_FEW_COPIES", 0)


@pytest.fixture(autouse=True)
def looks_all_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """No step of a loop is one that nobody looks at, and graphs of updates are declared to be faster."""
    monkeypatch.setattr(whole_loop, "_LOOK_EVERY", 1)
    monkeypatch.setattr(comparison, "_FARTHEST", 1)
    monkeypatch.setattr(whole_loop, "Estimate", lambda **known: Estimate())
    monkeypatch.setattr(timing, "declared_seconds", lambda arm: 3e-3 - 1e-3 * len(arm.plan.graphs) / 3)


def train(steps: int, moves: Callable[[int], bool]) -> Loop:
    """Train where nothing but the optimizer is taken over, beside plain training.

    Args:
        steps: so many.
        moves: whether gradients lie elsewhere in this step.
    """
    torch.manual_seed(0)
    model, plain = (nn.Linear(6, 3) for _ in range(2))
    plain.load_state_dict(model.state_dict())
    optimizer, other = (torch.optim.AdamW(m.parameters(), lr=1e-2, fused=True) for m in (model, plain))
    loop = Loop(PyGraphConfig(engine="emulated"), torch.device("cpu"))
    usual, kept = [torch.empty_like(p) for p in model.parameters()], list[Tensor]()
    graph = loop.take_optimizer(optimizer)
    assert graph is not None
    for step in range(1, steps + 1):
        x = torch.randn(4, 6)
        for each in (model, plain):
            each(x).square().mean().backward()
        for p, place in zip(model.parameters(), usual, strict=True):
            kept += [p.grad.clone()] if moves(step) else []  # type: ignore[union-attr]
            p.grad = kept[-1] if moves(step) else place.copy_(p.grad)  # type: ignore[arg-type]
        loop.step(graph, optimizer.step)
        other.step()
        optimizer.zero_grad()
        other.zero_grad()
        assert all(map(torch.equal, model.parameters(), plain.parameters())), step
    return loop


def test_steps_whose_gradients_lie_elsewhere_end_no_plan() -> None:
    """There is no room for copies of them, so that these steps have no graph, one in six."""
    loop = train(600, lambda step: step > 40 and step % 6 == 0)
    report = loop.report
    assert report.controllers[-1].was_settled and not report.fallbacks, report
    assert report.controllers[-1].best == Arm(OPTIMIZER) and report.plan == "F B {O}", report
    assert report.optimizer_steps_replayed > 420, report


@pytest.mark.parametrize("last", [60, 100])
def test_a_plan_whose_gradients_move_in_every_step_ends(last: int) -> None:
    """Whether it is compared just then, or was found to be the fastest one."""
    report = train(400, lambda step: step > last).report
    (controller,) = report.controllers
    assert "change again and again" in controller.verdicts[Arm(OPTIMIZER)], controller.verdicts
    assert controller.best.plan == NOTHING and report.running_plan == "F B O", report
    assert 30 < report.optimizer_steps_replayed <= last, report


@pytest.mark.parametrize("every", [1, 6])
def test_beside_regions_it_is_the_same(every: int) -> None:
    """Where gradients move in every step the loop is compared again without the graph of its update."""

    def script(made: accelerate_training.Script) -> None:
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        model, optimizer = made.accelerator.prepare(model, optimizer)
        kept = []
        for step, (x, y) in enumerate(batches(500), 1):
            loss = nn.functional.cross_entropy(model(x), y)
            made.accelerator.backward(loss)
            if step > 120 and step % every == 0:
                for p in model.parameters():
                    kept.append(p.grad.clone())
                    p.grad = kept[-1]
            optimizer.step()
            optimizer.zero_grad()
            made.write("loss", loss)
        made.write_state(model, optimizer)

    plan = "{F} {B} {O}" if every > 1 else "{F} {B} O"
    report = accelerate_training.both(script, replays=500)
    assert report.plan == report.running_plan == plan, report
    assert report.fallbacks or every > 1, report
