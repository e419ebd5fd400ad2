"""What compiled code of an Accelerate loop cannot give is asked for: in the first step, or later."""

from __future__ import annotations

import gc
import linecache
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

pytest.importorskip("accelerate")

from accelerate_training import Script, both, fresh, run  # noqa: F401
from training import Net

from pygraph_train import PyGraph


class Features(nn.Module):
    """Returns the activation that its result is computed from."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.last = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.tanh(self.first(x))
        return self.last(h), h


def penalty(s: Script, model: Any, loss: Tensor, h: Tensor) -> Tensor:
    found = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)  # asked
    return loss + sum(g.square().sum() for g in found)


def graph_of_no_use(s: Script, model: Any, loss: Tensor, h: Tensor) -> Tensor:
    found = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    s.write("gradients", found)
    return loss


def gradient(s: Script, model: Any, loss: Tensor, h: Tensor) -> Tensor:
    s.write("gradient", torch.autograd.grad(loss, h, retain_graph=True)[0])  # asked
    return loss


def retained(s: Script, model: Any, loss: Tensor, h: Tensor) -> Tensor:
    h.retain_grad()
    return loss


def hooked(s: Script, model: Any, loss: Tensor, h: Tensor) -> Tensor:
    h.register_hook(lambda g: s.write("hook", g))
    return loss


Ask = Callable[[Script, Any, Tensor, Tensor], Tensor]


def script(s: Script, ask: Ask, begins: int, kept: list[Any]) -> None:
    """Steps that ask for it from one on."""
    model: Any = Features()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    model, optimizer = s.accelerator.prepare(model, optimizer)
    for i in range(30):
        out, h = model(torch.randn(5, 6))
        loss = out.square().mean()
        if i >= begins:
            loss = ask(s, model, loss, h)
        s.accelerator.backward(loss)  # asked
        s.write("gradient", h.grad if h.retains_grad else None)
        optimizer.step()
        optimizer.zero_grad()
        s.write("loss", loss)
        kept.append(weakref.ref(h))
    s.write_state(model, optimizer)


def line_of(where: str) -> str:
    file, _, line = where.rpartition(":")
    assert file == __file__, where
    return linecache.getline(file, int(line))


def test_whoever_looks_for_it_does_not_hold_the_memory_of_steps() -> None:
    plugin, kept = PyGraph(engine="emulated", warmup_steps=2), []
    gc.collect()
    gc.disable()
    try:
        run(lambda s: script(s, graph_of_no_use, 99, kept), plugin)
    finally:
        gc.enable()
    assert plugin.report().steps_replayed >= 20
    assert sum(ref() is not None for ref in kept[:-1]) == 0


@pytest.mark.parametrize("model", [Net, lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))])
@pytest.mark.parametrize("begins", [0, 20])
def test_a_weight_that_balances_two_losses_is_asked_for_late(begins: int, model: Any) -> None:
    """As the training of a VQGAN does once its discriminator begins: of one forward there are three backwards."""

    def balanced(s: Script) -> None:
        made: Any = model()
        optimizer: Any = torch.optim.AdamW(made.parameters(), lr=1e-2, fused=True)
        made, optimizer = s.accelerator.prepare(made, optimizer)
        *_, last, _ = made.parameters()
        for i in range(40):
            out = made(torch.randn(5, 6))
            loss, other = out.square().mean(), out.logsumexp(1).mean()
            if i >= begins:
                ours, theirs = (torch.autograd.grad(x, last, retain_graph=True)[0] for x in (loss, other))
                loss = loss + ours.norm() / (theirs.norm() + 1e-4) * other
            s.accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            s.write("loss", loss)
        s.write_state(made, optimizer)

    report = both(balanced, replays=71, plan="{F} {B} {O}")
    assert not report.fallbacks, str(report)


@pytest.mark.parametrize("autocast", [False, True])
def test_the_curvature_is_looked_at_late(autocast: bool) -> None:
    """A Hessian-vector product now and then, for the first time once graphs are replayed."""

    def measured(s: Script) -> None:
        model: Any = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        model, optimizer = s.accelerator.prepare(model, optimizer)
        parameters = list(model.parameters())
        for i in range(30):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = model(torch.randn(5, 6)).float().square().mean()
            s.accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            if i % 10 == 9:
                with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                    loss = model(torch.randn(5, 6)).float().square().mean()
                slopes = torch.autograd.grad(loss, parameters, create_graph=True)
                model(torch.randn(5, 6)).sum().backward()  # another forward in between
                optimizer.zero_grad()
                found = torch.autograd.grad(sum(g.sum() for g in slopes), parameters)
                # sums of gradients in another order, which is much in bfloat16
                s.write("curvature", [g.round(decimals=4) for g in found if not autocast])
            s.write("loss", loss)
        s.write_state(model, optimizer)

    report = both(measured, replays=15)
    assert any("is differentiated itself (create_graph=True)" in f.reason for f in report.fallbacks)


def in_forward_mode(model: Any, x: Tensor) -> Tensor:
    with forward_ad.dual_level():
        out, _ = model(forward_ad.make_dual(x, torch.ones_like(x)))
        return forward_ad.unpack_dual(out).tangent


def pushed_forward(model: Any, x: Tensor) -> Tensor:
    return torch.func.jvp(lambda x: model(x)[0], (x,), (torch.ones_like(x),))[1]


def of_each_sample(model: Any, x: Tensor) -> Tensor:
    def loss(parameters: Any, x: Tensor) -> Tensor:
        return torch.func.functional_call(model, parameters, (x[None],))[0].square().mean()

    parameters = {name: p.detach() for name, p in model.named_parameters()}
    found = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x)
    return torch.cat([g.flatten() for g in found.values()])


def mapped(model: Any, x: Tensor) -> Tensor:
    return torch.func.vmap(lambda x: model(x)[0])(x)


def traced(model: Any, x: Tensor) -> Tensor:
    return torch.jit.trace(model, x)(x)[0]


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:.*jit.*:UserWarning")
@pytest.mark.parametrize("begins", [0, 20])
@pytest.mark.parametrize("look", [in_forward_mode, pushed_forward, of_each_sample, mapped, traced])
def test_transforms_of_a_model_are_those_of_eager_kernels(look: Any, begins: int) -> None:
    """They are asked for beside the training, which goes on from graphs."""

    def looked(s: Script) -> None:
        model: Any = Features()
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        model, optimizer = s.accelerator.prepare(model, optimizer)
        for i in range(30):
            x = torch.randn(5, 6)
            if i >= begins and i % 3 == 0:
                s.write("seen", look(model, x))
            loss = model(x)[0].square().mean()
            s.accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            s.write("loss", loss)
        s.write_state(model, optimizer)

    report = both(looked, replays=42, plan="{F} {B} {O}")
    assert not report.fallbacks, str(report)


def test_a_forward_may_come_before_the_update_and_its_backward_after_it() -> None:
    """Fused kernels do not count as changes of the parameters, and neither may what verifies their graph."""

    def script(s: Script) -> None:
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        model, optimizer = s.accelerator.prepare(model, optimizer)
        loss = model(torch.randn(8, 6)).square().mean()
        for _ in range(60):
            following = model(torch.randn(8, 6)).square().mean()
            s.accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            s.write("loss", loss)
            loss = following
        s.write_state(model, optimizer)

    report = both(script, replays=60)
    assert report.optimizer_steps_replayed > 20, str(report)
