"""Steps that differentiate inside: physics, forces, penalties on gradients, adversarial examples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from replays import text_of
from test_changing_shapes import let_inductor_compile
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from training import Diary, both, line_of, sgd

from pygraph_train.regions.inductor import compile_whole
from pygraph_train.tracing.trace import Trace

Step = Callable[[nn.Module, Tensor], Any]


class Smooth(nn.Module):
    """Has second derivatives everywhere, and draws random numbers if it is asked to."""

    def __init__(self, dropout: float = 0.0, *, keeps: bool = True) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(3, 8), nn.Linear(8, 1)
        self.dropout, self.keeps = nn.Dropout(dropout), keeps

    def forward(self, x: Tensor) -> Tensor:
        hidden = self._body(x) if self.keeps else checkpoint(self._body, x, use_reentrant=False)
        return self.second(hidden)

    def _body(self, x: Tensor) -> Tensor:
        return self.dropout(torch.tanh(self.first(x)))


def slope(of: Tensor, by: Tensor, **options: Any) -> Tensor:
    return torch.autograd.grad(of.sum(), by, create_graph=True, **options)[0]


def points(count: int, size: int = 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randn(size, 3, generator=generator) for _ in range(count)]


def run(
    step: Step, *, make: Callable[[], nn.Module] = Smooth, count: int = 12, rows: int = 4, **expected: Any
) -> Any:
    """Train plainly and graphed on so many batches of so many rows, and compare; see `both`."""

    def script(s: Diary) -> None:
        model = make()
        optimizer = sgd(model)
        graphed = s.step(lambda x: step(model, x), model=model, optimizer=optimizer)
        for x in points(count, rows):
            s.write("result", graphed(x))
            s.write("flag", x.requires_grad)
        s.write_state(model, optimizer)

    return both(script, **expected)


def pinn(model: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    u = model(x)
    first = slope(u, x)
    return (slope(first[:, 0], x)[:, 0] - u[:, 0]).square().mean()


def forces(model: nn.Module, x: Tensor) -> dict[str, Tensor]:
    x = x.detach().requires_grad_()
    energy = model(x)
    force = -slope(energy, x)
    return {"loss": energy.square().mean() + force.square().mean(), "force": force.detach()}


def penalty(model: nn.Module, x: Tensor) -> Tensor:
    share = torch.rand(len(x), 1)
    mixed = (share * x + (1 - share) * x.flip(0)).requires_grad_()
    return model(x).mean() + 10 * (slope(model(mixed), mixed).norm(dim=1) - 1).square().mean()


def adversarial(model: nn.Module, x: Tensor) -> Tensor:
    near = x.clone().requires_grad_()
    (found,) = torch.autograd.grad(model(near).square().mean(), near)
    return model((near + 0.1 * found.sign()).detach()).square().mean()


def by_attribute(model: nn.Module, x: Tensor) -> Tensor:
    x = x * 2
    x.requires_grad = True
    return slope(model(x), x).square().mean()


def made_with_the_flag(model: nn.Module, x: Tensor) -> Tensor:
    y = torch.rand(4, 3, requires_grad=True)
    return slope(model(y), y).square().mean() + model(x).square().mean()


def of_weights(model: nn.Module, x: Tensor) -> Tensor:
    loss = model(x).square().mean()
    found = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    return loss + 0.1 * sum(g.square().sum() for g in found)


def retained(model: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    loss = model(x).square().mean()
    (first,) = torch.autograd.grad(loss, x, retain_graph=True)
    (second,) = torch.autograd.grad(loss, model.first.weight, retain_graph=True)
    return loss * (1 + first.norm().detach() + second.norm().detach())


def along_a_direction(model: nn.Module, x: Tensor) -> Tensor:
    found, tangent = torch.func.jvp(model, (x,), (torch.ones_like(x),))
    return found.square().mean() + tangent.square().mean()


def dual_numbers(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        found, tangent = torch.autograd.forward_ad.unpack_dual(model(dual))
        return found.square().mean() + tangent.square().mean()


def nested_modes(model: nn.Module, x: Tensor) -> Tensor:
    with torch.no_grad():
        x = x + 1
        with torch.enable_grad():
            x.requires_grad_()
            found = slope(model(x), x)
    return found.square().mean() + model(x.detach()).square().mean()


def under_autocast(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        x = x.clone().requires_grad_()
        return slope(model(x).float(), x).float().square().mean()


def unused(model: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    other = torch.zeros(2).requires_grad_()
    found, none = torch.autograd.grad(model(x).sum(), [x, other], create_graph=True, allow_unused=True)
    return found.square().mean() + (0 if none is None else none.sum())


def another_name(model: nn.Module, x: Tensor) -> Tensor:
    """Two of Dynamo's variables are one tensor."""
    x = x + 1
    same = x.contiguous()
    same.requires_grad_()
    return slope(model(x), x).square().mean() if x.requires_grad else model(x).mean()


def with_weights_of_outputs(model: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    u = model(x)
    (found,) = torch.autograd.grad(u, x, torch.full_like(u, 0.5), create_graph=True)
    return found.square().mean()


def batched(model: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    u = model(x)
    found = torch.autograd.grad(u, x, torch.eye(4)[..., None], is_grads_batched=True, create_graph=True)
    return found[0].square().mean()


def functional(model: nn.Module, x: Tensor) -> Tensor:
    def value(point: Tensor) -> Tensor:
        return model(point[None]).squeeze()

    return torch.func.vmap(torch.func.grad(value))(x).square().mean()


WHOLE: list[Step] = [
    pinn,
    forces,
    penalty,
    adversarial,
    by_attribute,
    made_with_the_flag,
    of_weights,
    retained,
    nested_modes,
    under_autocast,
    unused,
    another_name,
    with_weights_of_outputs,
    batched,
    functional,
]


@pytest.mark.parametrize("step", WHOLE, ids=lambda step: step.__name__)
def test_a_step_that_differentiates_is_replayed(step: Step) -> None:
    run(step, replays=4, plan="{F B O}")


def test_a_step_that_differentiates_draws_the_same_random_numbers() -> None:
    run(pinn, make=lambda: Smooth(0.3), replays=4, plan="{F B O}")


def test_a_checkpoint_is_differentiated_inside() -> None:
    run(pinn, make=lambda: Smooth(keeps=False), replays=4, plan="{F B O}")


def test_a_checkpoint_that_draws_is_differentiated_without_a_graph() -> None:
    make = lambda: Smooth(0.3, keeps=False)  # noqa: E731
    run(pinn, make=make, refused="the random state was set or used", optimizer="off")


def given(model: nn.Module, x: Tensor) -> Tensor:
    return slope(model(x.requires_grad_()), x).square().mean()  # marked


def moved_to_where_it_is(model: nn.Module, x: Tensor) -> Tensor:
    x = x.to("cpu").requires_grad_()  # marked
    return slope(model(x), x).square().mean()


def through_what_returns_it(model: nn.Module, x: Tensor) -> Tensor:
    x = nn.functional.dropout(x, 0.5, training=False)
    x.requires_grad_()  # marked
    return slope(model(x), x).square().mean()


@pytest.mark.parametrize("step", [given, moved_to_where_it_is, through_what_returns_it])
def test_a_tensor_of_the_callers_that_comes_to_require_a_gradient_does_so(step: Step) -> None:
    report = run(step, refused="that the step was given", optimizer="off")
    assert line_of(step, "# marked").rpartition("/")[2] in text_of(report)


def backward_inside(model: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    model(x).sum().backward()
    return model(x.detach() + x.grad).square().mean()


def jacobian(model: nn.Module, x: Tensor) -> Tensor:
    return torch.autograd.functional.jacobian(model, x, create_graph=True).square().mean()


def taken_back(model: nn.Module, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    found = slope(model(x), x)
    return found.square().mean() + model(x.requires_grad_(False)).mean()


def test_a_tensor_that_requires_no_gradient_any_more_stays_in_python() -> None:
    run(taken_back, refused="to require no gradient any more", optimizer="off")


@pytest.mark.quick
@pytest.mark.parametrize("step", [along_a_direction, dual_numbers])
def test_forward_differentiation_has_zeros_without_memory(step: Step) -> None:
    """Tangents of parameters are zeros that no storage is behind."""
    run(step, replays=4, plan="{F B O}")


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3))


def test_regions_of_forward_differentiation_hand_out_no_zeros_without_memory() -> None:
    """Where a batch has many rows, the zeros of a layer are saved for the backward."""
    expected = {"refused": "is zeros without memory", "fuse": "off", "optimizer": "off"}
    run(along_a_direction, make=two_layers, rows=8, **expected)


def test_inductor_gets_no_forward_differentiation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernels of CUDA would ask zeros for their memory. The graphs hold eager kernels."""
    let_inductor_compile(monkeypatch, asks=False)
    expected = {"replays": 8, "plan": "{F B O}", "compile": True}
    report = run(along_a_direction, make=two_layers, count=16, rows=8, **expected)
    (told,) = report.fallbacks
    assert "Inductor could not compile the step: it differentiates forward" in told.reason


def test_a_jacobian_of_autograd_stays_in_python() -> None:
    run(jacobian, refused="the step is not one graph", optimizer="off")


def test_a_backward_inside_of_the_step_stays_in_python() -> None:
    report = run(backward_inside, replays=4, optimizer="off")
    assert "it calls backward()" in text_of(report) and not report.steps_replayed


@pytest.mark.parametrize("scaled", [False, True])
def test_gradients_of_steps_that_differentiate_add_up(scaled: bool) -> None:
    def script(s: Diary) -> None:
        model = Smooth()
        optimizer = sgd(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0) if scaled else None
        step = s.step(lambda x: pinn(model, x), model=model, optimizer=optimizer, scaler=scaler)
        for index, x in enumerate(points(24)):
            s.write("loss", step(x) if index % 2 else step.accumulate(x))
        s.write_state(model, optimizer)

    both(script, replays=6, plan="{F B O}" if not scaled else None)


def test_a_function_that_makes_its_backwards_differentiates_inside() -> None:
    def script(s: Diary) -> None:
        model = Smooth()
        optimizer = sgd(model)

        def step_fn(x: Tensor) -> Tensor:
            optimizer.zero_grad()
            loss = penalty(model, x)
            loss.backward()
            optimizer.step()
            return loss.detach()

        step = s.step(step_fn, model=model, optimizer=optimizer, manual_optimization=True)
        for x in points(12):
            s.write("loss", step(x))
        s.write_state(model, optimizer)

    both(script, replays=4)


@pytest.mark.slow
@pytest.mark.parametrize("step", [pinn, adversarial, of_weights, by_attribute])
def test_inductor_compiles_a_step_that_differentiates(step: Step) -> None:
    torch.manual_seed(0)
    model, (x,) = Smooth(), points(1)
    trace = Trace(torch.device("cpu"), compiler=compile_whole)

    def gradients(loss: Tensor) -> list[Tensor]:
        model.zero_grad()
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]

    expected = gradients(step(model, x))
    found = gradients(trace(lambda x: step(model, x), (x,), {}))
    assert trace.problem is None and not trace.left
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
