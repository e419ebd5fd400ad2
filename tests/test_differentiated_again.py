"""Stock loops that differentiate a backward: in a forward, in a hook, in some steps only, or between two steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate_training import Script, both, run
from accelerate_training import fresh as fresh
from torch import Tensor, nn
from torch.autograd import grad
from training import adamw

from pygraph_train import PyGraph, PyGraphError

AGAIN = "its backward is differentiated itself (create_graph=True)"


class Potential(nn.Module):
    """Energies, and forces from step `since` on."""

    def __init__(self, since: int = 0) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(3, 16), nn.SiLU(), nn.Linear(16, 1))
        self.since, self.calls = since, 0

    def forward(self, positions: Tensor) -> Tensor:
        positions = positions.detach().requires_grad_()
        energy = self.net(positions).sum((1, 2))
        self.calls += 1
        if self.calls <= self.since:
            return energy.square().mean()
        (forces,) = grad(energy.sum(), positions, create_graph=True)
        return energy.square().mean() + (forces - 1).square().mean()


class Implicit(nn.Module):
    """A deep equilibrium layer: its gradient is a fixed point, too, which a hook of the forward solves for."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            z = torch.zeros_like(x)
            for _ in range(8):
                z = torch.tanh(0.3 * self.inner(z) + x)
        z = torch.tanh(0.3 * self.inner(z) + x)
        start = z.detach().clone().requires_grad_()
        again = torch.tanh(0.3 * self.inner(start) + x)

        def solve(gradient: Tensor) -> Tensor:
            found = gradient
            for _ in range(4):
                found = grad(again, start, found, retain_graph=True)[0] + gradient
            return found

        if z.requires_grad:
            z.register_hook(solve)
        return self.last(z).square().mean()  # type: ignore[no-any-return]


def train(
    model: nn.Module, loss_of: Callable[[Any, Tensor, int], Tensor], shape: tuple[int, ...] = (4, 8)
) -> Any:
    state = {name: value.clone() for name, value in model.state_dict().items()}

    def script(script: Script) -> None:
        model.load_state_dict(state)
        if isinstance(model, Potential):
            model.calls = 0
        prepared, optimizer = script.accelerator.prepare(model, adamw(model))
        for index in range(30):
            loss = loss_of(prepared, torch.randn(shape), index)
            script.accelerator.backward(loss)
            script.write("loss", loss)
            optimizer.step()
            optimizer.zero_grad()
        script.write("parameters", dict(model.named_parameters()))

    return script


def alike(script: Callable[[Script], None]) -> Any:
    """Run it plain and with graphs; where eager kernels make a part of a backward again, sums have other last bits."""
    plugin = PyGraph(engine="emulated", warmup_steps=2)
    for (name, expected), (_, found) in zip(
        run(script, None).entries, run(script, plugin).entries, strict=True
    ):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6, msg=f"{name}\n{plugin.report()}")
    return plugin.report()


def mlp(*layers: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), *layers, nn.Linear(16, 1))


def replays_of_regions(report: Any) -> int:
    return sum(region.replays for region in report.regions())


def test_forces_in_each_forward() -> None:
    report = both(train(Potential(), lambda m, x, _: m(x), (4, 5, 3)), replays=4)  # of the update
    assert not report.regions() and [AGAIN in f.reason for f in report.fallbacks] == [True], str(report)
    assert "test_differentiated_again.py" in str(report.fallbacks[0].where)


def test_forces_from_a_late_step_on() -> None:
    report = alike(train(Potential(since=15), lambda m, x, _: m(x), (4, 5, 3)))
    assert any(AGAIN in f.reason for f in report.fallbacks), str(report)
    assert report.steps == 30


def test_a_hook_that_a_forward_registers() -> None:
    report = both(train(Implicit(), lambda m, x, _: m(x)), replays=4)  # of the update
    told = "a hook that its forward registers calls a backward"
    assert not report.regions() and [told in f.reason for f in report.fallbacks] == [True], str(report)


def curvature(model: Any, x: Tensor, index: int) -> Tensor:
    """A Hessian-vector product after every tenth step."""
    loss: Tensor = model(x).square().mean()
    if index % 10 == 9:
        parameters = list(model.parameters())
        slopes = grad(model(x).square().mean(), parameters, create_graph=True)
        product = grad(sum(slope.sum() for slope in slopes), parameters)
        assert all(p.isfinite().all() for p in product)
        loss = loss + 1e-3 * sum(p.square().sum() for p in product)
    return loss


def penalty(model: Any, x: Tensor, index: int) -> Tensor:
    """Lazy regularization in every fourth step."""
    loss: Tensor = model(x).square().mean()
    if index % 4 == 3:
        slopes = grad(loss, list(model.parameters()), create_graph=True)
        loss = loss + sum(slope.square().sum() for slope in slopes)
    return loss


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("loss_of", [curvature, penalty])
def test_gradients_of_gradients_in_some_steps(loss_of: Any) -> None:
    report = alike(train(mlp(), loss_of))
    assert replays_of_regions(report) >= (8 if loss_of is curvature else 2), str(report)
    assert any(AGAIN in f.reason for f in report.fallbacks), str(report)


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("layer", [nn.Dropout(0.3), nn.BatchNorm1d(16)])
def test_what_cannot_be_made_once_more_says_so(layer: nn.Module) -> None:
    with pytest.raises((PyGraphError, RuntimeError), match="the backward of Sequential is differentiated"):
        alike(train(mlp(layer), penalty))


def test_a_model_that_is_never_differentiated_again_keeps_its_graphs() -> None:
    report = both(train(mlp(), lambda m, x, _: m(x).square().mean()), replays=70)
    assert replays_of_regions(report) >= 50 and not report.fallbacks, str(report)
