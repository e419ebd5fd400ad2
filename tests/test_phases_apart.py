"""Steps whose forward, backward and update are replayed one by one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from training import Net, batches, differs, frozen, loss_of

from pygraph_train import GraphedStep, PyGraphConfig

pytestmark = pytest.mark.quick

STEPS = 24


Make = Callable[[nn.Module], Callable[..., Any]]


def trained(
    make: Make, model_of: Callable[[], nn.Module], ours: bool, **options: Any
) -> tuple[list[Any], Any]:
    torch.compiler.reset()
    torch.manual_seed(0)
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2, fused=True)
    step_fn, seen, report = make(model), [], None
    config = PyGraphConfig(engine="emulated", warmup_steps=2, **options)
    step = GraphedStep(step_fn, model=model, optimizer=optimizer, config=config) if ours else None
    for batch in batches(STEPS):
        if step is not None:
            loss = step(batch)
        else:
            optimizer.zero_grad()
            loss = step_fn(batch)
            loss.backward()
            optimizer.step()
        gradients = [p.grad for p in model.parameters()]
        seen.append(frozen([loss.detach(), dict(model.state_dict()), gradients, optimizer.state_dict()]))
    seen.append(torch.get_rng_state())
    if step is not None:
        report = step.report().to_dict()
        step.close()
    return seen, report


def same(make: Make, replays: int, model_of: Callable[[], nn.Module] = Net, **options: Any) -> dict[str, Any]:
    plain, _ = trained(make, model_of, False)
    ours, report = trained(make, model_of, True, **options)
    difference = differs(plain, ours)
    assert difference is None, f"{difference}\n{report}"
    assert report["phases_from_graphs"]["F"] >= replays, report
    assert report["phases_from_graphs"]["B"] >= replays, report
    return dict(report)


def test_all_phases_are_replayed() -> None:
    report = same(loss_of, 21)
    assert report["running_plan"] == "{F} {B} {O}"
    assert report["phases_from_graphs"]["O"] >= 15


def test_dropout_and_running_statistics() -> None:
    same(
        loss_of,
        21,
        lambda: nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 3)),
    )


def test_a_number_that_the_step_counts() -> None:
    def make(model: nn.Module) -> Callable[..., Tensor]:
        count = {"n": 0, "share": 0.0}

        def step(batch: Any) -> Tensor:
            x, y = batch
            count["n"] += 1
            count["share"] += 0.01
            out = model(x)
            loss: Tensor = cross_entropy(out, y) + count["share"] * out.square().mean() / count["n"]
            return loss

        return step

    same(make, 19)


def test_two_forwards_with_a_graph_break_between() -> None:
    def make(model: nn.Module) -> Callable[..., Tensor]:
        def part(x: Tensor, y: Tensor) -> Tensor:
            torch._dynamo.graph_break()  # type: ignore[attr-defined]
            loss: Tensor = cross_entropy(model(x), y)
            return loss

        return lambda batch: part(*batch) + part(batch[0].flip(0), batch[1].flip(0))

    same(make, 12)


def test_every_hook_is_called_as_often() -> None:
    calls: list[int] = []

    def make(model: nn.Module) -> Callable[..., Tensor]:
        number, parameter = len(calls), next(model.parameters())
        calls.append(0)

        def hook(gradient: Tensor) -> Tensor:
            calls[number] += 1
            return gradient * 0.5

        parameter.register_hook(hook)
        return loss_of(model)

    same(make, 21)
    assert calls == [STEPS, STEPS]


def test_a_parameter_that_gets_other_memory() -> None:
    def make(model: nn.Module) -> Callable[..., Tensor]:
        loss, count = loss_of(model), [0]

        def step(batch: Any) -> Tensor:
            count[0] += 1
            if count[0] == 12:
                torch._dynamo.graph_break()  # type: ignore[attr-defined]
                for p in model.parameters():
                    p.data = p.data.clone()
            return loss(batch)

        return step

    same(make, 12)


@pytest.mark.passes_without_graphs("a backward that is differentiated itself has none")
def test_a_backward_of_a_backward_runs_as_it_is() -> None:
    def make(model: nn.Module) -> Callable[..., Tensor]:
        def step(batch: Any) -> Tensor:
            x, y = batch
            x = x.detach().requires_grad_()
            loss = cross_entropy(model(x), y)
            (slope,) = torch.autograd.grad(loss, x, create_graph=True)
            return loss + slope.square().sum()

        return step

    same(make, 0)


@pytest.mark.parametrize("verify", ["off", "first", "always"])
def test_comparisons_leave_nothing_behind(verify: str) -> None:
    same(loss_of, 21, verify=verify)


def test_a_graph_that_computes_something_else_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    from pygraph_train.core.recording import RecordedRegion

    right = RecordedRegion.replay_backward

    def wrong(self: Any, *given: Any) -> Any:
        found = right(self, *given)
        for gradient in found:
            gradient.mul_(2)
        return found

    monkeypatch.setattr(RecordedRegion, "replay_backward", wrong)
    report = same(loss_of, 0)
    assert report["phases_from_graphs"]["B"] == 0
    assert any("computes something else" in row["reason"] for row in report["fallbacks"])
