"""Steps that differentiate inside, on CUDA: whole graphs with eager kernels, and with Inductor's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pygraph_train import GraphedStep

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

Step = Callable[[nn.Module, Tensor], Tensor]


def model_of() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1)).cuda()


def slope(of: Tensor, by: Tensor) -> Tensor:
    return torch.autograd.grad(of.sum(), by, create_graph=True)[0]


def pinn(model: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    u = model(x)
    return (slope(slope(u, x)[:, 0], x)[:, 0] - u[:, 0]).square().mean()


def forces(model: nn.Module, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_()
    energy = model(x)
    return energy.square().mean() + slope(energy, x).square().mean()


def adversarial(model: nn.Module, x: Tensor) -> Tensor:
    near = x.clone().requires_grad_()
    (found,) = torch.autograd.grad(model(near).square().mean(), near)
    return model((near + 0.1 * found.sign()).detach()).square().mean()


def of_weights(model: nn.Module, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    found = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    return loss + 0.1 * torch.stack([g.square().sum() for g in found]).sum()


def batches(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(64, 3, generator=generator).cuda() for _ in range(count)]


def trained(step: Step, steps: int, **options: Any) -> tuple[list[Tensor], list[Tensor], Any]:
    """Losses, parameters and the report of a training; a plain one without options."""
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=2**-6, fused=True)
    graphed = None
    if options:
        graphed = GraphedStep(lambda x: step(model, x), model=model, optimizer=optimizer, **options)
    losses = []
    for x in batches(steps):
        if graphed is not None:
            losses.append(graphed(x).clone())
            continue
        optimizer.zero_grad()
        loss = step(model, x)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach().clone())
    parameters = [p.detach().clone() for p in model.parameters()]
    if graphed is None:
        return losses, parameters, None
    report = graphed.report()
    graphed.close()
    return losses, parameters, report


@pytest.mark.parametrize("step", [pinn, forces, adversarial, of_weights])
def test_a_step_that_differentiates_is_replayed_bit_for_bit(step: Step) -> None:
    trained(step, 20)  # the first plain training of a process may differ from all later ones by one rounding
    losses, parameters, _ = trained(step, 20)
    found_losses, found, report = trained(step, 20, compile=False, warmup_steps=2)
    assert report.steps_replayed >= 10, str(report)
    for expected, value in zip(losses + parameters, found_losses + found, strict=True):
        assert torch.equal(expected, value), str(report)


@pytest.mark.slow
@pytest.mark.parametrize("step", [pinn, forces, adversarial])
def test_inductor_compiles_a_step_that_differentiates(step: Step) -> None:
    losses, parameters, _ = trained(step, 20)
    found_losses, found, report = trained(step, 20, compile=True, warmup_steps=2)
    assert report.steps_replayed >= 5, str(report)
    torch.testing.assert_close(found_losses, losses, rtol=1e-3, atol=1e-5)
    torch.testing.assert_close(found, parameters, rtol=1e-3, atol=1e-5)
