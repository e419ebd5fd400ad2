"""Loops that people write around a compiled model, and that break careless designs: each trains as without it.

The loop calls `model` in one run, and `torch.compile(model, backend="pygraph")` in the other one; it makes its
backwards and updates itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, softplus
from torch.nn.utils import clip_grad_norm_
from torch.utils.checkpoint import checkpoint

from .compare import Run, compare
from .models import DEVICE, batches

LOOPS: list[Any] = []


def loop(
    replays: int = 0, *, differs: str = "", raises: Any = None, notices: str = ""
) -> Callable[[Any], Any]:
    """Add a loop. `differs` says why it does not train the same today; `notices` is a fault (`make planted`)."""

    def add(train: Any) -> Any:
        marks = [] if replays else [pytest.mark.passes_without_graphs("no graph has to run")]
        if notices:
            marks.append(pytest.mark.notices(notices))
        if differs:
            marks.append(pytest.mark.xfail(strict=True, raises=raises, reason=differs))
        LOOPS.append(pytest.param(train, replays, id=train.__name__, marks=marks))
        return train

    return add


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)


class Loop:
    """What a loop gets: `model`, `call` (the model or the compiled one), its `data`, and `note(loss)`."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.model: Any = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 3))
        self.call = run.compile(self.model)
        self.optimizer = sgd(self.model)
        self.data = run.each(batches())

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(self.call(x), y)

    def note(self, *values: Any) -> None:
        self.run.note("values", values)


@loop(12)
def a_stock_loop(it: Loop) -> None:
    for x, y in it.data:
        it.optimizer.zero_grad()
        loss = it.loss(x, y)
        loss.backward()
        it.optimizer.step()
        it.note(loss)


@loop(12)
def gradients_get_other_memory(it: Loop) -> None:
    for x, y in it.data:
        it.optimizer.zero_grad()
        loss = it.loss(x, y)
        loss.backward()
        for p in it.model.parameters():
            p.grad.data = p.grad.data.clamp(-0.01, 0.01)
        it.optimizer.step()
        it.note(loss)


_AOT = "AOTAutograd's backwards cannot be differentiated again"


@loop(differs=_AOT if DEVICE == "cpu" else None, raises=RuntimeError)
def a_gradient_penalty_on_inputs(it: Loop) -> None:
    for x, y in it.data:
        x = x.clone().requires_grad_()
        it.optimizer.zero_grad()
        out = it.call(x)
        (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        loss = cross_entropy(out, y) + 5 * (gradient.norm(dim=1) - 1).square().mean()
        loss.backward()
        it.optimizer.step()
        it.note(loss)


@loop(12)
def a_backward_that_keeps_the_graph_for_a_later_one(it: Loop) -> None:
    for x, y in it.data:
        it.optimizer.zero_grad()
        loss = it.loss(x, y)
        loss.backward(retain_graph=True)
        other = it.loss(x * 2, y)
        other.backward()
        loss.backward()
        it.optimizer.step()
        it.note(loss, other)


@loop(12)
def a_second_backward_is_an_error(it: Loop) -> None:
    for x, y in it.data:
        it.optimizer.zero_grad()
        loss = it.loss(x, y)
        loss.backward()
        with it.run.may_raise(RuntimeError):
            loss.backward()
        it.optimizer.step()
        it.note(loss)


@loop(12)
def two_losses_of_one_forward(it: Loop) -> None:
    for x, y in it.data:
        it.optimizer.zero_grad()
        out = it.call(x)
        cross_entropy(out, y).backward(retain_graph=True)
        out.square().mean().backward()
        it.optimizer.step()
        it.note(out)


@loop(12)
def gradients_of_each_loss(it: Loop) -> None:
    """As GradNorm and PCGrad weigh several tasks."""
    for x, y in it.data:
        it.optimizer.zero_grad()
        out, parameters = it.call(x), list(it.model.parameters())
        one = torch.autograd.grad(cross_entropy(out, y), parameters, retain_graph=True)
        other = torch.autograd.grad(out.square().mean(), parameters)
        for p, a, b in zip(parameters, one, other, strict=True):
            p.grad = a + 0.1 * b
        it.optimizer.step()
        it.note(out)


@loop(12)
def accumulation(it: Loop) -> None:
    for number, (x, y) in enumerate(it.data):
        loss = it.loss(x, y) / 4
        loss.backward()
        if number % 4 == 3:
            it.optimizer.step()
            it.optimizer.zero_grad()
        it.note(loss)


@loop(12)
def a_scaler_with_clipping(it: Loop) -> None:
    scaler = torch.amp.GradScaler(DEVICE, init_scale=1024.0, growth_interval=5)
    for x, y in it.data:
        it.optimizer.zero_grad()
        loss = it.loss(x, y)
        scaler.scale(loss).backward()
        scaler.unscale_(it.optimizer)
        clip_grad_norm_(it.model.parameters(), 1.0)
        scaler.step(it.optimizer)
        scaler.update()
        it.note(loss, scaler)


@loop(12)
def sharpness_aware_minimization(it: Loop) -> None:
    for x, y in it.data:
        it.optimizer.zero_grad()
        it.loss(x, y).backward()
        with torch.no_grad():
            moves = [0.05 * p.grad / (p.grad.norm() + 1e-6) for p in it.model.parameters()]
            for p, move in zip(it.model.parameters(), moves, strict=True):
                p.add_(move)
        it.optimizer.zero_grad()
        loss = it.loss(x, y)
        loss.backward()
        with torch.no_grad():
            for p, move in zip(it.model.parameters(), moves, strict=True):
                p.sub_(move)
        it.optimizer.step()
        it.note(loss)


@loop(12)
def lbfgs_calls_a_closure_many_times(it: Loop) -> None:
    optimizer = torch.optim.LBFGS(it.model.parameters(), lr=0.1, max_iter=4)
    it.model[2].p = 0.0
    for x, y in it.data:

        def closure(x: Tensor = x, y: Tensor = y) -> Tensor:
            optimizer.zero_grad()
            loss = it.loss(x, y)
            loss.backward()
            return loss

        it.note(optimizer.step(closure))


@loop(8)
def a_backward_is_left_out(it: Loop) -> None:
    for number, (x, y) in enumerate(it.data):
        it.optimizer.zero_grad()
        loss = it.loss(x, y)
        it.note(loss)
        if number % 3 != 2:
            loss.backward()
            it.optimizer.step()


@loop(12)
def losses_are_kept_with_their_graphs(it: Loop) -> None:
    kept = []
    for x, y in it.data:
        it.optimizer.zero_grad()
        loss = it.loss(x, y)
        kept.append(loss)
        loss.backward()
        it.optimizer.step()
    it.note(kept)


@loop(12)
def truncated_backpropagation_through_time(it: Loop) -> None:
    hidden, total = torch.zeros(8, 3), torch.zeros(())
    for number, (x, y) in enumerate(it.data):
        hidden = it.call(x) + 0.5 * hidden
        total = total + cross_entropy(hidden, y)
        if number % 3 == 2:
            it.optimizer.zero_grad()
            total.backward()
            it.optimizer.step()
            it.note(total)
            hidden, total = hidden.detach(), torch.zeros(())


@loop(12)
def outputs_are_changed_in_place(it: Loop) -> None:
    for x, y in it.data:
        it.optimizer.zero_grad()
        out = it.call(x)
        out[:, 0] = 0.0
        loss = cross_entropy(out, y)
        loss.backward()
        it.optimizer.step()
        it.note(loss)


@loop(12)
def a_gan_that_freezes_its_judge(it: Loop) -> None:
    maker = nn.Linear(4, 6)
    of_maker = sgd(maker)
    it.run.watch(maker, of_maker)
    for x, _ in it.data:
        made = maker(torch.randn(8, 4))
        it.optimizer.zero_grad()
        loss = softplus(it.call(made.detach())).mean() + softplus(-it.call(x)).mean()
        loss.backward()
        it.optimizer.step()
        it.model.requires_grad_(False)
        of_maker.zero_grad()
        other = softplus(-it.call(made)).mean()
        other.backward()
        of_maker.step()
        it.model.requires_grad_(True)
        it.note(loss, other)


@loop(12, notices="`.data = ...` is not noticed")
def parameters_get_other_memory(it: Loop) -> None:
    """As a model that is moved away for an evaluation and back."""
    for number, (x, y) in enumerate(it.data):
        it.optimizer.zero_grad()
        loss = it.loss(x, y)
        loss.backward()
        it.optimizer.step()
        it.note(loss)
        if number == 12:
            it.model.double().float()


@loop(12)
def an_optimizer_for_each_parameter_in_the_backward(it: Loop) -> None:
    for p in it.model.parameters():
        optimizer = torch.optim.SGD([p], 0.05, momentum=0.9)

        def hook(p: Tensor, optimizer: torch.optim.Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        p.register_post_accumulate_grad_hook(hook)
    for x, y in it.data:
        loss = it.loss(x, y)
        loss.backward()
        it.note(loss)


@loop(12)
def averaged_weights_stand_in_for_an_evaluation(it: Loop) -> None:
    averages = [p.detach().clone() for p in it.model.parameters()]
    for number, (x, y) in enumerate(it.data):
        it.optimizer.zero_grad()
        loss = it.loss(x, y)
        loss.backward()
        it.optimizer.step()
        with torch.no_grad():
            for average, p in zip(averages, it.model.parameters(), strict=True):
                average.lerp_(p, 0.1)
            if number % 5 == 4:
                kept = [p.detach().clone() for p in it.model.parameters()]
                torch._foreach_copy_(list(it.model.parameters()), averages)
                it.note(it.loss(x, y))
                torch._foreach_copy_(list(it.model.parameters()), kept)
        it.note(loss, averages)


@loop(12)
def gradients_are_kept(it: Loop) -> None:
    kept = []
    for x, y in it.data:
        it.optimizer.zero_grad()
        it.loss(x, y).backward()
        it.optimizer.step()
        kept.append(it.model[0].weight.grad)
    it.note(kept)


@loop(12)
def gradients_are_set_to_zero(it: Loop) -> None:
    for x, y in it.data:
        it.optimizer.zero_grad(set_to_none=False)
        loss = it.loss(x, y)
        loss.backward()
        it.optimizer.step()
        it.note(loss)


@loop()
def a_checkpoint_inside_of_the_compiled_model(it: Loop) -> None:
    class Checkpointed(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.inner, x, use_reentrant=False)

    call = it.run.compile(Checkpointed(it.model))
    for x, y in it.data:
        it.optimizer.zero_grad()
        loss = cross_entropy(call(x), y)
        loss.backward()
        it.optimizer.step()
        it.note(loss)


@loop(differs="torch.compile does not look for hooks that are added later", raises=AssertionError)
def a_hook_is_added_in_mid_run(it: Loop) -> None:
    for number, (x, y) in enumerate(it.data):
        if number == 12:
            it.model[0].register_forward_hook(lambda module, args, out: out * 1.1)
        it.optimizer.zero_grad()
        loss = it.loss(x, y)
        loss.backward()
        it.optimizer.step()
        it.note(loss)


@loop(differs="torch.compile does not look for hooks that are added later", raises=AssertionError)
def a_hook_is_added_and_removed(it: Loop) -> None:
    for number, (x, y) in enumerate(it.data):
        if number == 10:
            handle = it.model[3].register_forward_hook(lambda module, args, out: out * 1.1)
        if number == 18:
            handle.remove()
        it.optimizer.zero_grad()
        loss = it.loss(x, y)
        loss.backward()
        it.optimizer.step()
        it.note(loss)


@pytest.mark.parametrize(("train", "replays"), LOOPS)
@pytest.mark.quick
def test_an_everyday_loop(train: Callable[[Loop], None], replays: int) -> None:
    compare(lambda run: train(Loop(run)), replays=replays, updates=0)
