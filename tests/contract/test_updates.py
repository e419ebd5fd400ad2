"""What loops do around the update: accumulation, clipping, schedules, scalers, freezing, averages of weights."""

from __future__ import annotations

import copy
import functools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler

from pygraph_train import GraphedStep

from .compare import ENGINE, Run, compare, same_as_plain
from .models import DEVICE, Net, adamw, batches, cross_entropy, loss_of, sgd

SCHEDULES: dict[str, Any] = {
    "step": lambda optimizer: lr_scheduler.StepLR(optimizer, 5, 0.5),
    "cosine": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 24),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=30),
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 10)),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("optimizer", [adamw, sgd])
@pytest.mark.quick
@same_as_plain(replays=15)
def test_a_schedule_of_the_learning_rate(run: Run, schedule: str, optimizer: Any) -> None:
    """OneCycleLR changes betas or momentum as well."""
    model = Net()
    made = optimizer(model)
    scheduler = SCHEDULES[schedule](made)
    run.watch(scheduler)
    step = run.step(loss_of(model), model=model, optimizer=made)
    for batch in batches():
        step(batch)
        scheduler.step()
        run.note("rate", scheduler.get_last_lr())


@pytest.mark.notices("learning rates are not copied to the device")
@same_as_plain(replays=15)
def test_a_plateau_lowers_the_learning_rate(run: Run) -> None:
    model = Net()
    optimizer = sgd(model, lr=0.5)
    scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, factor=0.3)
    step = run.step(loss_of(model), model=model, optimizer=optimizer)
    for batch in batches():
        scheduler.step(step(batch).item())
        run.note("rate", optimizer.param_groups[0]["lr"])


@pytest.mark.notices("gradients of several backwards are not added up")
@same_as_plain(replays=20, updates=6)
def test_gradients_are_accumulated(run: Run) -> None:
    """The last group is a ragged one, and gradients are read between."""
    model = Net()
    step = run.step(lambda x, y: loss_of(model)((x, y)) / 3, model=model, optimizer=adamw(model))
    for number, batch in enumerate(batches(35)):
        step(*batch) if number % 3 == 2 or number == 34 else step.accumulate(*batch)
        run.note("norm", model.first.weight.grad.norm().item())


@same_as_plain(replays=12, updates=2)
def test_parameters_that_came_between_micro_batches_are_clipped(run: Run) -> None:
    model = Net()
    step = run.step(loss_of(model), model=model, optimizer=sgd(model), max_grad_norm=0.1)
    for number, batch in enumerate(batches(24)):
        if number == 16:
            model.load_state_dict(copy.deepcopy(model.state_dict()), assign=True)
        step(batch) if number % 3 == 2 else step.accumulate(batch)
        run.note("gradients", [p.grad for p in model.parameters()])


@same_as_plain(replays=15)
def test_gradients_are_clipped(run: Run) -> None:
    model = Net()
    step = run.step(loss_of(model), model=model, optimizer=adamw(model), max_grad_norm=0.1)
    for batch in batches():
        step(batch)


@same_as_plain(replays=12, updates=0)
def test_a_scaler_skips_updates_with_overflow(run: Run) -> None:
    model = Net()
    scaler = torch.amp.GradScaler(DEVICE, init_scale=2.0**14, growth_interval=4)

    def step_fn(x: Tensor, y: Tensor, weight: Tensor) -> Tensor:
        return cross_entropy(model(x), y) * weight

    step = run.step(step_fn, model=model, optimizer=sgd(model), scaler=scaler, max_grad_norm=0.5)
    skipped = 0
    for number, batch in enumerate(batches(32)):
        before = model.first.weight.detach().clone()
        step(*batch, torch.tensor(1e37 if number % 8 == 6 else 1.0))
        skipped += torch.equal(before, model.first.weight)
        run.note("scaler", scaler)
    assert skipped == 4


@same_as_plain(replays=12, updates=0)
def test_a_scaler_of_a_step_by_hand(run: Run) -> None:
    """Kernels of the optimizer skip an update with an overflow, and a scheduler is no warning's cause."""
    model = Net()
    optimizer, scaler = adamw(model), torch.amp.GradScaler(DEVICE, init_scale=1024.0, growth_interval=4)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 5)

    def step_fn(x: Tensor, y: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    step = run.step(step_fn, model=model, optimizer=optimizer, manual_optimization=True)
    for number, (x, y) in enumerate(batches(32)):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            step(x * (1e39 if number == 17 else 1), y)
            scheduler.step()
        run.note("scaler", scaler)


@same_as_plain(replays=12)
def test_layers_are_frozen_and_thawed(run: Run) -> None:
    """Frozen parameters keep no gradients, and their optimizer state stays."""
    model = Net()
    step = run.step(loss_of(model), model=model, optimizer=adamw(model))
    for number, batch in enumerate(batches(40)):
        if number in (12, 26):
            model.first.requires_grad_(number == 26)
        step(batch)


@same_as_plain(replays=15)
def test_an_average_of_the_weights_follows_every_update(run: Run) -> None:
    model = Net()
    average = copy.deepcopy(model).requires_grad_(False)
    run.watch(average)
    step = run.step(loss_of(model), model=model, optimizer=adamw(model))
    for number, batch in enumerate(batches()):
        step(batch)
        with torch.no_grad():
            for mean, p in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(p, 0.1)
        if number % 6 == 5:
            run.note("evaluation of the average", average.eval()(batch[0]))


@same_as_plain(replays=15)
def test_averaged_weights_stand_in_for_an_evaluation(run: Run) -> None:
    """Weights are swapped in place and back."""
    model = Net()
    averaged = torch.optim.swa_utils.AveragedModel(model)
    step = run.step(loss_of(model), model=model, optimizer=sgd(model))
    for number, batch in enumerate(batches()):
        step(batch)
        averaged.update_parameters(model)
        if number % 6 == 5:
            kept = copy.deepcopy(model.state_dict())
            model.load_state_dict(averaged.module.state_dict())
            run.note("evaluation", model.eval()(batch[0]))
            model.train().load_state_dict(kept)


@same_as_plain(replays=12, updates=8)
def test_a_parameter_is_swapped_for_another_one(run: Run) -> None:
    """torch refuses that for a tensor which somebody has a weak reference to."""
    model = Net()
    step = run.step(loss_of(model), model=model, optimizer=sgd(model))
    for number, batch in enumerate(batches(32)):
        if number == 14:
            torch.utils.swap_tensors(model.second.weight, nn.Parameter(torch.full((3, 8), 0.1)))
        step(batch)


@same_as_plain(refused="the step gives a tensor other memory")
def test_a_parameter_is_swapped_where_the_step_moves_a_tensor(run: Run) -> None:
    model, mean = Net(), torch.zeros(3, device=DEVICE)

    def step_fn(batch: Any) -> Tensor:
        with torch.no_grad():
            mean.data = mean.data * 0.9 + model.second.bias.data * 0.1
        return cross_entropy(model(batch[0]) - mean, batch[1])

    step = run.step(step_fn, model=model, optimizer=sgd(model))
    for number, batch in enumerate(batches(32)):
        if number == 14:
            torch.utils.swap_tensors(model.second.weight, nn.Parameter(torch.full((3, 8), 0.1)))
        step(batch)


@same_as_plain(replays=12, updates=8)
def test_weights_are_tied_in_mid_run(run: Run) -> None:
    """One parameter is then used in two places, and its gradient is the sum of both."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
    step = run.step(loss_of(model), model=model, optimizer=sgd(model))
    for number, batch in enumerate(batches(32)):
        if number == 14:
            model[2].weight = model[0].weight
        step(batch)


@same_as_plain(replays=8, updates=6)
def test_a_weight_is_transposed_in_place(run: Run) -> None:
    """Its memory stays, and an update goes through it in another order. Fused kernels of CUDA refuse that."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))
    step = run.step(loss_of(model), model=model, optimizer=sgd(model, fused=DEVICE == "cpu"))
    for number, batch in enumerate(batches(32)):
        if number == 14:
            model[0].weight.data = model[0].weight.data.t()
        step(batch)


@same_as_plain(replays=8, updates=6)
def test_rows_of_a_table_behind_a_graph_break_are_cut_off(run: Run) -> None:
    """Nothing of ours may keep what autograd knows of the parameter: it had another shape."""
    first, words = nn.Linear(6, 8), nn.Embedding(20, 3)
    model = nn.ModuleList([first, words, nn.Linear(8, 3)])

    def step_fn(x: Tensor, y: Tensor) -> Tensor:
        h = torch.tanh(first(x))
        if h.abs().max().item() > 100:
            h = h / 10
        return cross_entropy(model[2](h) + words(y) * words.weight.mean(), y)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    step = run.step(step_fn, model=model, optimizer=optimizer)
    for number, batch in enumerate(batches(32)):
        if number == 14:
            words.weight.data = words.weight.data[:10]
            words.weight.grad = None
        step(*batch)


@same_as_plain(replays=15)
def test_two_optimizers_for_two_parts(run: Run) -> None:
    model = Net()
    optimizers = [adamw(nn.ModuleList([model.first, model.norm])), sgd(model.second)]
    step = run.step(loss_of(model), model=model, optimizer=optimizers)
    schedule = lr_scheduler.ExponentialLR(optimizers[1], 0.9)
    for batch in batches():
        step(batch)
        schedule.step()


@pytest.mark.notices("replays keep the hyperparameters of their capture")
@same_as_plain(replays=12)
def test_parameter_groups_change_in_mid_run(run: Run) -> None:
    """Weight decay and learning rate are written by hand, and a group of new parameters is added."""
    model = Net()
    model.late = nn.Linear(3, 3)
    groups = [
        {"params": model.first.parameters()},
        {"params": model.second.parameters(), "weight_decay": 0.1},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, fused=True)
    step = run.step(lambda x, y: cross_entropy(model.late(model(x)), y), model=model, optimizer=optimizer)
    for number, batch in enumerate(batches(40)):
        if number == 12:
            optimizer.param_groups[0]["weight_decay"] = 0.5
            optimizer.param_groups[1]["lr"] = 3e-2
        if number == 22:
            optimizer.add_param_group({"params": model.late.parameters(), "lr": 1e-3})
        step(*batch)


@pytest.mark.quick
def test_an_optimizer_that_gets_parameters_again_and_again_is_told_so() -> None:
    """As layers thaw one by one. None of them has moved."""
    model = nn.Sequential(*[nn.Linear(6, 6) for _ in range(6)])
    model[:5].requires_grad_(False)
    optimizer = adamw(model[5])
    options: dict[str, Any] = {"engine": ENGINE, "warmup_steps": 2, "forward": "on"}
    with GraphedStep(loss_of(model), model=model, optimizer=optimizer, **options) as step:
        for number, batch in enumerate(batches(48)):
            if number and number % 8 == 0:
                model[5 - number // 8].requires_grad_(True)
                optimizer.add_param_group({"params": model[5 - number // 8].parameters()})
            step(batch)
        (told,) = step.report().to_dict()["fallbacks"]
    assert "set of parameters" in told["reason"] and "addresses" not in told["reason"]


@pytest.mark.parametrize(
    "name", ["Adam", "AdamW", "NAdam", "RAdam", "Adagrad", "RMSprop", "Adadelta", "Adamax"]
)
@pytest.mark.slow_after(3)
@same_as_plain(replays=12, updates=0, last_bits=DEVICE == "cuda")
def test_optimizers_with_their_default_kernels(run: Run, name: str) -> None:
    # in front of a norm the gradient of a bias is nothing but rounding
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=1e-2)
    step = run.step(loss_of(model), model=model, optimizer=optimizer)
    for batch in batches():
        step(batch)


@same_as_plain(replays=12, updates=0)
def test_an_optimizer_of_the_users_own(run: Run) -> None:
    class Lion(torch.optim.Optimizer):
        def __init__(self, parameters: Any, lr: float) -> None:
            super().__init__(parameters, {"lr": lr, "calls": 0})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                group["calls"] += 1
                for p in group["params"]:
                    if p.grad is not None:
                        mean = self.state[p].setdefault("mean", torch.zeros_like(p))
                        p.add_(torch.sign(mean * 0.9 + p.grad * 0.1), alpha=-group["lr"])
                        mean.mul_(0.99).add_(p.grad, alpha=0.01)

    model = Net()
    step = run.step(loss_of(model), model=model, optimizer=Lion(model.parameters(), 1e-2))
    for batch in batches():
        step(batch)


@same_as_plain(replays=18, updates=0)
def test_an_optimizer_whose_step_nobody_calls(run: Run) -> None:
    """It wraps the one that steps, as that of sharpness-aware minimization (SAM) does."""

    class Sharpness(torch.optim.Optimizer):
        def __init__(self, inner: torch.optim.Optimizer) -> None:
            super().__init__(inner.param_groups, {})
            self.inner = inner

        @torch.no_grad()
        def ascend(self, by: float) -> None:
            for p in self.param_groups[0]["params"]:
                self.state[p]["moved"] = moved = by * p.grad
                p += moved

        @torch.no_grad()
        def descend(self) -> None:
            for p, state in self.state.items():
                p -= state["moved"]
            self.inner.step()

    model = Net()
    optimizer = Sharpness(sgd(model))

    def step_fn(batch: Any) -> Tensor:
        loss = loss_of(model)(batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.ascend(0.05)
        optimizer.zero_grad()
        loss_of(model)(batch).backward()
        optimizer.descend()
        return loss

    step = run.step(step_fn, model=model, optimizer=optimizer, manual_optimization=True)
    for batch in batches():
        step(batch)
    if run.ours:
        headline = step.report().headline()
        assert "called step() of no optimizer" in headline and "pass the inner one" in headline


@same_as_plain(replays=12, updates=0)
def test_hooks_of_the_optimizer_are_called_for_every_update(run: Run) -> None:
    model, called = Net(), []
    optimizer = adamw(model)
    optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: called.append("before"))
    optimizer.register_step_post_hook(lambda optimizer, args, kwargs: called.append("after"))
    step = run.step(loss_of(model), model=model, optimizer=optimizer)
    for batch in batches():
        step(batch)
        run.note("called", called)


@same_as_plain(replays=12)
def test_weights_are_clipped_after_every_update(run: Run) -> None:
    model = Net()
    step = run.step(loss_of(model), model=model, optimizer=adamw(model))
    for batch in batches():
        step(batch)
        with torch.no_grad():
            for p in model.parameters():
                p.clamp_(-0.3, 0.3)


@same_as_plain(replays=12)
def test_gradients_belong_to_the_loop_between_steps(run: Run) -> None:
    """They are read, changed and set to None."""
    model = Net()
    step = run.step(loss_of(model), model=model, optimizer=adamw(model))
    for number, batch in enumerate(batches(32)):
        step(batch)
        run.note("norms", [p.grad.norm().item() for p in model.parameters()])
        if number % 8 == 6:
            model.zero_grad(set_to_none=True)
        if number % 8 == 7:
            model.first.weight.grad.zero_()


@pytest.mark.notices("other hyperparameters are baked in")
@same_as_plain(replays=12)
def test_what_the_optimizer_does_changes_in_mid_run(run: Run) -> None:
    """No number that its kernel reads: another kernel."""
    model = Net()
    optimizer = sgd(model)
    step = run.step(loss_of(model), model=model, optimizer=optimizer)
    for number, batch in enumerate(batches(36)):
        optimizer.param_groups[0]["nesterov"] = number >= 12
        optimizer.param_groups[0]["maximize"] = 20 <= number < 24
        step(batch)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.quick
def test_a_step_that_sets_its_own_learning_rate(fused: bool, tmp_path: Path) -> None:
    training, last_bits = functools.partial(own_learning_rate, fused=fused), DEVICE == "cuda" and not fused
    refused = "Dynamo guards the numbers that the step writes"
    compare(training, refused=refused, last_bits=last_bits, folder=tmp_path)


def own_learning_rate(run: Run, fused: bool) -> None:
    model, calls = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)), [0]
    optimizer = adamw(model, fused=fused)

    def step_fn(x: Tensor, y: Tensor) -> Tensor:
        calls[0] += 1
        for group in optimizer.param_groups:
            group["lr"] = 1e-2 * min(1.0, calls[0] / 20)
        return cross_entropy(model(x), y)

    step = run.step(step_fn, model=model, optimizer=optimizer)
    for batch in batches():
        step(*batch)
        run.note("groups", [{**group, "params": None} for group in optimizer.param_groups])
