"""`GraphedStep` computes what a plain PyTorch loop computes, bit for bit, while it replays."""

from __future__ import annotations

import copy
import gc
import warnings
from collections import UserDict, namedtuple
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from training import CONFIG, Diary, Net, adam, adamw, batches, both, loss_of, replayed, sgd

from pygraph_train import GraphedStep, PyGraphConfig
from pygraph_train.verification import Fingerprint

OPTIMIZERS = pytest.mark.parametrize(
    ("make_optimizer", "plan"),
    [(adamw, "{F} {B} {O}"), (sgd, "{F} {B} {O}"), (adam, "{F} {B} O")],
    ids=["adamw", "sgd", "adam"],
)


# -- learning rates and optimizer state --------------------------------------------------------------


@pytest.mark.notices("learning rates are not copied to the device")
@OPTIMIZERS
@pytest.mark.parametrize("schedule", ["step", "cosine"])
def test_schedulers_change_the_learning_rate_of_replays(make_optimizer, plan, schedule):
    def script(diary: Diary) -> None:
        model = Net()
        optimizer = make_optimizer(model)
        if schedule == "step":
            scheduler: Any = torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.5)
        else:
            scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
        step = diary.step(loss_of(model), model=model, optimizer=optimizer)
        for batch in batches(40):
            diary.write("loss", step(batch))
            scheduler.step()
            diary.write_state(model, optimizer)
            assert type(optimizer.state_dict()["param_groups"][0]["lr"]) is float
            assert type(optimizer.param_groups[0]["lr"]) is float

    both(script, replays=30, plan=plan)


@pytest.mark.parametrize("first", ["step", "scheduler"])
def test_a_scheduler_made_in_mid_run_warns_as_in_plain_training(first):
    def script(diary: Diary) -> None:
        model = Net()
        optimizer = adamw(model)
        step = diary.step(loss_of(model), model=model, optimizer=optimizer)
        scheduler = None
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for index, batch in enumerate(batches(40)):
                if index == 30:
                    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
                    if first == "scheduler":
                        scheduler.step()
                diary.write("loss", step(batch))
                if scheduler is not None:
                    scheduler.step()
        told = [str(w.message) for w in caught if "`lr_scheduler.step()`" in str(w.message)]
        assert len(told) == (first == "scheduler")
        diary.write("warnings", told)
        diary.write("called", vars(optimizer).get("_opt_called"))

    report = both(script, replays=28)
    assert report.steps_replayed + report.optimizer_steps_replayed >= 20, str(report)


def test_a_learning_rate_tensor_that_is_replaced_again_and_again_gets_no_graph():
    def script(diary: Diary) -> None:
        model = Net()
        optimizer = adamw(model)
        group = optimizer.param_groups[0]
        group["lr"] = torch.tensor(1e-2)
        step = diary.step(loss_of(model), model=model, optimizer=optimizer)
        for index, batch in enumerate(batches(60)):
            kept = group["lr"]
            if index % 3 == 0:
                group["lr"] = torch.tensor(1e-2 / (index + 1))
            elif index % 3 == 1:
                group["lr"].data.mul_(0.9)  # no version tells
            diary.write("loss", step(batch))
            diary.write("rates", [kept, group["lr"]])
            diary.write_state(model, optimizer)

    report = both(script, replays=44)
    assert any("the memory of a learning rate" in f.reason for f in report.fallbacks), str(report)


def test_a_learning_rate_may_become_a_tensor_and_a_number_again():
    def script(diary: Diary) -> None:
        model = Net()
        optimizer = adamw(model)
        group = optimizer.param_groups[0]
        step = diary.step(loss_of(model), model=model, optimizer=optimizer)
        for index, batch in enumerate(batches(120)):
            if index % 30 == 0:
                group["lr"] = 1e-2 / (index + 1) if index % 60 == 0 else torch.tensor(1e-2 / (index + 1))
            diary.write("loss", step(batch))
            diary.write_state(model, optimizer)

    both(script, replays=90, plan="{F} {B} {O}")


def test_a_scheduler_fills_a_learning_rate_tensor_that_was_replaced():
    def script(diary: Diary) -> None:
        model = Net()
        optimizer = sgd(model)
        group = optimizer.param_groups[0]
        group["lr"] = torch.tensor(1e-2)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.95)
        step = diary.step(loss_of(model), model=model, optimizer=optimizer)
        for index, batch in enumerate(batches(60)):
            if index in (20, 40):
                group["lr"] = torch.tensor(2e-2)
            diary.write("loss", step(batch))
            scheduler.step()
            diary.write_state(model, optimizer)

    both(script, replays=50, plan="{F} {B} {O}")


NUMPY = {
    "adamw": lambda p: torch.optim.AdamW(
        p,
        lr=np.float64(0.01),
        weight_decay=np.float32(0.1),
        betas=(np.float64(0.9), np.float64(0.99)),
        fused=True,
    ),
    "adam": lambda p: torch.optim.Adam(p, lr=np.float32(0.01), eps=np.float32(1e-6), fused=True),
    "sgd": lambda p: torch.optim.SGD(
        p, lr=np.float64(0.01), momentum=np.float32(0.9), weight_decay=np.float64(0.1), fused=True
    ),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=np.float32(0.01), lr_decay=np.float64(0.1), fused=True),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=np.float64(0.01), alpha=np.float32(0.9)),
}


@pytest.mark.slow_after(3)
@pytest.mark.parametrize("name", NUMPY)
@pytest.mark.parametrize("limit", [None, np.float64(0.1), np.float32(0.1)], ids=lambda v: type(v).__name__)
def test_hyperparameters_of_numpy_stay_what_they_are(name, limit):
    def script(diary: Diary) -> None:
        model = Net()
        optimizer = NUMPY[name](model.parameters())
        step = diary.step(loss_of(model), model=model, optimizer=optimizer, max_grad_norm=limit)
        for index, batch in enumerate(batches(40)):
            diary.write("loss", step(batch))
            diary.write_state(model, optimizer)
            for groups in (optimizer.param_groups, optimizer.state_dict()["param_groups"]):
                diary.write("types", [(k, str(type(v))) for group in groups for k, v in group.items()])
            if index == 20:
                optimizer.param_groups[0]["lr"] = np.float32(0.003)
            elif index == 30:
                optimizer.load_state_dict(optimizer.state_dict())

    report = both(script, replays=25)
    assert report.steps_replayed >= 25, str(report)
    assert (report.running_plan == "{F} {B} {O}") == (name not in ("rmsprop", "lion")), str(report)


@pytest.mark.notices("learning rates are not copied to the device")
def test_replay_reads_new_learning_rate():
    model = nn.Linear(4, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, fused=True)
    step = GraphedStep(lambda x: model(x).sum(), model=model, optimizer=optimizer, config=CONFIG)
    x = torch.ones(1, 4)
    for _ in range(20):
        step(x)
    for lr in (0.0, 0.25, 1.0):
        count, before = step.report().steps_replayed, model.weight.detach().clone()
        optimizer.param_groups[0]["lr"] = lr
        step(x)
        assert step.report().steps_replayed == count + 1
        assert torch.equal(model.weight, before - lr)


@OPTIMIZERS
def test_scheduler_per_epoch_with_a_smaller_last_batch(make_optimizer, plan):
    def script(diary: Diary) -> None:
        model = Net()
        optimizer = make_optimizer(model)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)
        step = diary.step(loss_of(model), model=model, optimizer=optimizer)
        for _ in range(12):
            for batch in [*batches(5), batches(1, size=3)[0]]:
                diary.write("loss", step(batch))
            scheduler.step()
            diary.write_state(model, optimizer)

    both(script, replays=50, plan=plan)


@OPTIMIZERS
def test_loading_checkpoints_in_mid_run(make_optimizer, plan):
    def script(diary: Diary) -> None:
        model = Net()
        optimizer = make_optimizer(model)
        step = diary.step(loss_of(model), model=model, optimizer=optimizer)
        saved: dict[str, Any] = {}
        for index, batch in enumerate(batches(40)):
            diary.write("loss", step(batch))
            if index == 12:
                saved = copy.deepcopy({"model": model.state_dict(), "optimizer": optimizer.state_dict()})
                diary.write("checkpoint", saved)
            if index == 20:
                model.load_state_dict(saved["model"])
                optimizer.load_state_dict(saved["optimizer"])
            diary.write_state(model, optimizer)

    both(script, replays=25, plan=plan)


def test_other_hyperparameters_changed_in_mid_run():
    def script(diary: Diary) -> None:
        model = Net()
        optimizer = adamw(model, weight_decay=0.0)
        step = diary.step(loss_of(model), model=model, optimizer=optimizer)
        for index, batch in enumerate(batches(40)):
            if index == 20:
                optimizer.param_groups[0]["weight_decay"] = 0.5
            diary.write("loss", step(batch))
            diary.write_state(model, optimizer)

    both(script, replays=25, plan="{F} {B} {O}")


def test_parameter_group_added_in_mid_run():
    def script(diary: Diary) -> None:
        model = Net()
        optimizer = torch.optim.AdamW(model.second.parameters(), lr=1e-2, fused=True)
        for p in [*model.first.parameters(), *model.norm.parameters()]:
            p.requires_grad_(False)
        step = diary.step(loss_of(model), model=model, optimizer=optimizer)
        for index, batch in enumerate(batches(50)):
            if index == 20:
                for p in model.first.parameters():
                    p.requires_grad_(True)
                optimizer.add_param_group({"params": list(model.first.parameters()), "lr": 1e-3})
            diary.write("loss", step(batch))
            diary.write_state(model, optimizer)

    both(script, replays=25, plan="{F} {B} {O}")


@pytest.mark.parametrize("change", ["joins", "leaves"])
@pytest.mark.parametrize("fused", [True, False], ids=["{F} {B} {O}", "{F} {B} O"])
def test_parameters_that_join_or_leave_the_optimizer_in_mid_run(change, fused):
    """Gradients of others add up from step to step; those of the optimizer's parameters are emptied."""

    def script(diary: Diary) -> None:
        model = Net()
        late = list(model.first.parameters())
        held = late if change == "leaves" else []
        optimizer = torch.optim.AdamW([*held, *model.second.parameters()], lr=1e-2, fused=fused)
        step = diary.step(loss_of(model), model=model, optimizer=optimizer)
        for index, batch in enumerate(batches(40)):
            if index == 20 and change == "joins":
                optimizer.add_param_group({"params": late, "lr": 1e-3})
            elif index == 20:
                group = optimizer.param_groups[0]
                group["params"] = [p for p in group["params"] if not any(p is other for other in late)]
            diary.write("loss", step(batch))
            diary.write_state(model)

    both(script, replays=20, plan="{F} {B} {O}" if fused else "{F} {B} O")


# -- gradients -----------------------------------------------------------------------------------------


@pytest.mark.notices(
    "the last tensor of a batch is not copied", "gradients of several backwards are not added up"
)
@OPTIMIZERS
@pytest.mark.parametrize("clip", [None, 0.05])
def test_gradient_accumulation_with_a_ragged_group(make_optimizer, plan, clip):
    def script(diary: Diary) -> None:
        model = Net()
        optimizer = make_optimizer(model)
        step = diary.step(loss_of(model), model=model, optimizer=optimizer, max_grad_norm=clip)
        for _ in range(6):
            data = batches(14)  # three groups of four, one of two
            for index, batch in enumerate(data):
                last = index % 4 == 3 or index == len(data) - 1
                diary.write("loss", (step if last else step.accumulate)(batch))
                diary.write_state(model, optimizer)

    both(script, replays=60, plan=plan)


def test_clipping_sums_up_the_norm_in_the_order_of_the_model():
    def script(diary: Diary) -> None:
        model = Net()
        decayed = [p for p in model.parameters() if p.ndim > 1]
        others = [p for p in model.parameters() if p.ndim == 1]
        groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=0.03, fused=True)
        step = diary.step(loss_of(model), model=model, optimizer=optimizer, max_grad_norm=0.1)
        for batch in batches(60):
            diary.write("loss", step(batch))
            diary.write_state(model, optimizer)

    replayed(both(script, replays=50), least=50)


@pytest.mark.parametrize("emptied", ["before each step", "never"])
@pytest.mark.parametrize("held", ["from the start", "later"])
def test_gradients_that_the_optimizer_does_not_hold_are_clipped_as_well(emptied, held):
    def script(diary: Diary) -> None:
        model = Net()
        model.first.requires_grad_(held == "from the start")
        optimizer = torch.optim.AdamW(
            [*model.norm.parameters(), *model.second.parameters()], 0.03, fused=True
        )
        step = diary.step(loss_of(model), model=model, optimizer=optimizer, max_grad_norm=0.1)
        for index, batch in enumerate(batches(40)):
            if index == 20:
                model.first.requires_grad_()
            if emptied == "before each step":
                model.first.zero_grad()
            diary.write("loss", step(batch))
            diary.write_state(model, optimizer)

    report = both(script, replays=20)
    assert report.optimizer_steps_replayed <= 20, str(report)
    assert any("does not hold" in f.reason for f in report.fallbacks), str(report)
    assert report.steps_replayed >= 20, str(report)


def test_accumulation_with_micro_batches_that_are_not_replayed():
    def script(diary: Diary) -> None:
        model = Net()
        optimizer = adamw(model)
        step = diary.step(loss_of(model), model=model, optimizer=optimizer)
        for group in range(20):
            for index, batch in enumerate(batches(4)):
                if index == group % 4:
                    batch = batches(1, size=2 + group)[0]  # a shape that never comes back
                diary.write("loss", (step if index == 3 else step.accumulate)(batch))
                diary.write_state(model, optimizer)

    both(script, replays=30, plan="{F} {B} {O}")


def test_gradients_emptied_or_changed_in_the_middle_of_an_accumulation():
    def script(diary: Diary) -> None:
        model = Net()
        optimizer = adamw(model)
        step = diary.step(loss_of(model), model=model, optimizer=optimizer)
        for group in range(24):
            for index, batch in enumerate(batches(3)):
                diary.write("loss", (step if index == 2 else step.accumulate)(batch))
                diary.write_state(model, optimizer)
                if group == 15 and index == 0:
                    optimizer.zero_grad()
                if group == 16 and index == 1:
                    optimizer.zero_grad(set_to_none=False)
                if group == 17 and index == 0:
                    model.first.weight.grad = None
                if group == 18 and index == 1:
                    model.first.weight.grad = model.first.weight.grad * 2
                if group == 19 and index == 1:
                    model.second.weight.grad.mul_(3)

    both(script, replays=40, plan="{F} {B} {O}")


def test_zero_grad_by_the_user_and_gradients_read_after_the_step():
    def script(diary: Diary) -> None:
        model = Net()
        optimizer = adamw(model)
        step = diary.step(loss_of(model), model=model, optimizer=optimizer, max_grad_norm=0.1)
        for index, batch in enumerate(batches(36)):
            diary.write("loss", step(batch))
            diary.write("norm", [p.grad.norm() for p in model.parameters()])
            optimizer.zero_grad(set_to_none=index % 2 == 0)
            diary.write_state(model, optimizer)

    both(script, replays=30, plan="{F} {B} {O}")


@pytest.mark.parametrize("emptied", ["never", "always", "at times"])
def test_parameters_outside_of_the_optimizer_keep_accumulating(emptied):
    def script(diary: Diary) -> None:
        model = Net()
        optimizer = torch.optim.AdamW(model.second.parameters(), lr=1e-2, fused=True)
        step = diary.step(loss_of(model), model=model, optimizer=optimizer)
        for index, batch in enumerate(batches(40)):
            if emptied == "always" or (emptied == "at times" and index % 11 == 10):
                model.zero_grad()
            diary.write("loss", step(batch))
            diary.write_state(model, optimizer)

    both(script, replays=25, plan="{F} {B} {O}")


@pytest.mark.parametrize("set_to_none", [True, False])
def test_without_an_optimizer_the_caller_steps(set_to_none):
    def script(diary: Diary) -> None:
        model = Net()
        optimizer = adam(model)
        step = diary.step(loss_of(model), model=model)
        for batch in batches(50):
            optimizer.zero_grad(set_to_none=set_to_none)
            diary.write("loss", step(batch))
            optimizer.step()
            diary.write_state(model, optimizer)

    report = both(script, replays=20)
    assert report.steps_replayed >= 20, str(report)


@OPTIMIZERS
def test_freezing_and_unfreezing_layers(make_optimizer, plan):
    def script(diary: Diary) -> None:
        model = Net()
        optimizer = make_optimizer(model)
        step = diary.step(loss_of(model), model=model, optimizer=optimizer)
        for index, batch in enumerate(batches(60)):
            if index in (15, 35):
                model.first.requires_grad_(index == 35)
            diary.write("loss", step(batch))
            diary.write_state(model, optimizer)

    both(script, replays=35, plan=plan)


def test_layers_frozen_from_the_start_and_unfrozen_later():
    def script(diary: Diary) -> None:
        model = Net()
        optimizer = adamw(model)
        model.first.requires_grad_(False)
        step = diary.step(loss_of(model), model=model, optimizer=optimizer)
        for index, batch in enumerate(batches(50)):
            if index == 20:
                model.first.requires_grad_(True)
            diary.write("loss", step(batch))
            diary.write_state(model, optimizer)

    both(script, replays=25, plan="{F} {B} {O}")


# -- addresses -------------------------------------------------------------------------------------------


class Scaled(Net):
    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.ones(3)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.scale


def _new_data(model: Scaled, optimizer: Any) -> None:
    model.second.weight.data = model.second.weight.data.clone()


def _new_attribute(model: Scaled, optimizer: Any) -> None:
    model.scale = torch.full((3,), 0.5)


def _new_parameter_outside(model: Scaled, optimizer: Any) -> None:
    model.second.weight = nn.Parameter(model.second.weight.detach() * 2)


def _new_parameter_on_the_same_memory(model: Scaled, optimizer: Any) -> None:
    model.second.weight = nn.Parameter(model.second.weight.data)


def _new_module_in_optimizer(model: Scaled, optimizer: Any) -> None:
    for p in model.second.parameters():
        optimizer.state.pop(p)
    model.second = nn.Linear(8, 3)
    optimizer.param_groups[0]["params"][:] = list(model.parameters())


def _assigned_state_dict(model: Scaled, optimizer: Any) -> None:
    model.load_state_dict({k: v.clone() for k, v in model.state_dict().items()}, assign=True)


def _new_buffer(model: Scaled, optimizer: Any) -> None:
    model.norm.running_mean = torch.ones(8)


def _tied(model: Scaled, optimizer: Any) -> None:
    model.second.bias = nn.Parameter(torch.zeros(3))


ELSEWHERE = pytest.mark.notices("parameters and buffers are never looked for elsewhere")


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(_new_data, marks=ELSEWHERE),
        pytest.param(_new_attribute, marks=ELSEWHERE),
        pytest.param(_new_parameter_outside, marks=ELSEWHERE),
        pytest.param(_new_parameter_on_the_same_memory, marks=ELSEWHERE),
        _new_module_in_optimizer,  # which the optimizer's new state tells, too
        pytest.param(_assigned_state_dict, marks=ELSEWHERE),
        pytest.param(_new_buffer, marks=ELSEWHERE),
        pytest.param(_tied, marks=ELSEWHERE),
    ],
)
def test_tensors_replaced_in_mid_run(change):
    def script(diary: Diary) -> None:
        model = Scaled()
        optimizer = adamw(model)
        step = diary.step(loss_of(model), model=model, optimizer=optimizer)
        for index, batch in enumerate(batches(50)):
            if index == 20:
                change(model, optimizer)
            diary.write("loss", step(batch))
            diary.write_state(model, optimizer)

    # the optimizer keeps the old parameters, which have no gradients: there is nothing to update
    both(script, replays=30, plan="{F} {B} O" if change is _assigned_state_dict else "{F} {B} {O}")


class Square(Net):
    """A parameter that can be transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.square = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.square(super().forward(x))


@pytest.mark.parametrize("accumulate", [1, 2, 3])
@pytest.mark.parametrize("every", [20, 13])
def test_gradients_have_the_strides_of_a_transposed_parameter(accumulate, every):
    def script(diary: Diary) -> None:
        model = Square()
        optimizer = sgd(model, momentum=0, fused=True)  # its kernel takes strides for the same
        step = diary.step(loss_of(model), model=model)
        for index, batch in enumerate(batches(80)):
            if index % every == every - 1:
                model.square.weight.data = model.square.weight.data.t()
            if index % accumulate == 0:
                optimizer.zero_grad()
            diary.write("loss", step(batch))
            diary.write("strides", [p.grad.stride() for p in model.parameters() if p.grad is not None])
            if index % accumulate == accumulate - 1:
                optimizer.step()
            diary.write_state(model, optimizer)

    report = both(script, replays=25)
    assert report.steps_replayed >= 25, str(report)


def test_a_tensor_attribute_replaced_on_every_step():
    def script(diary: Diary) -> None:
        model = Scaled()
        optimizer = adamw(model)
        step = diary.step(loss_of(model), model=model, optimizer=optimizer)
        keep = []
        for index, batch in enumerate(batches(40)):
            model.scale = torch.full((3,), float(index))
            keep.append(model.scale)
            diary.write("loss", step(batch))
        diary.write_state(model, optimizer)

    report = both(script, replays=25, plan="{F} {B} {O}")
    assert len(report.captures) <= 3
    assert not report.fallbacks, str(report)


def test_tied_weights():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(20, 8)
            self.head = nn.Linear(8, 20, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids: Tensor) -> Tensor:
            return self.head(self.embed(ids))

    def script(diary: Diary) -> None:
        model = Tied()
        optimizer = adamw(model)
        data = [torch.randint(0, 20, (4, 5)) for _ in range(40)]

        def step_fn(ids: Tensor) -> Tensor:
            return nn.functional.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())

        step = diary.step(step_fn, model=model, optimizer=optimizer)
        for ids in data:
            diary.write("loss", step(ids))
            diary.write_state(model, optimizer)

    both(script, replays=30, plan="{F} {B} {O}")


def test_embedding_that_renormalises_its_weight_in_forward():
    def script(diary: Diary) -> None:
        model = nn.Sequential(nn.Embedding(12, 4, max_norm=0.7), nn.Linear(4, 1))
        optimizer = adamw(model)
        data = [torch.randint(0, 12, (6,)) for _ in range(40)]
        step = diary.step(lambda ids: model(ids).square().mean(), model=model, optimizer=optimizer)
        for ids in data:
            diary.write("loss", step(ids))
            diary.write_state(model, optimizer)

    both(script, replays=30, plan="{F} {B} {O}")


# -- around the step ---------------------------------------------------------------------------------------


def test_validation_and_ema_between_steps():
    def script(diary: Diary) -> None:
        model = Net()
        optimizer = adamw(model)
        average = copy.deepcopy(model)
        step = diary.step(loss_of(model), model=model, optimizer=optimizer)
        data = batches(40)
        for index, batch in enumerate(data):
            diary.write("loss", step(batch))
            with torch.no_grad():
                for slow, fast in zip(average.parameters(), model.parameters(), strict=True):
                    slow.lerp_(fast, 0.1)
            if index % 5 == 4:
                model.eval()
                with torch.no_grad():
                    diary.write(
                        "validation", [loss_of(m)(batch) for m in (model, average) for batch in data[:3]]
                    )
                model.train()
            diary.write_state(model, optimizer)
            diary.write_state(average)

    both(script, replays=30, plan="{F} {B} {O}")


def test_training_in_eval_mode_for_a_while():
    def script(diary: Diary) -> None:
        model = Net()
        optimizer = adamw(model)
        step = diary.step(loss_of(model), model=model, optimizer=optimizer)
        for index, batch in enumerate(batches(60)):
            model.train(not 20 <= index < 35)
            diary.write("loss", step(batch))
            diary.write_state(model, optimizer)

    both(script, replays=35, plan="{F} {B} {O}")


def test_model_used_and_differentiated_between_steps():
    def script(diary: Diary) -> None:
        model = Net()
        optimizer = adamw(model)
        step = diary.step(loss_of(model), model=model, optimizer=optimizer)
        for batch in batches(36):
            diary.write("loss", step(batch))
            penalty = model(batch[0]).square().mean()
            diary.write("penalty", torch.autograd.grad(penalty, list(model.parameters())))
            penalty = model(batch[0]).abs().mean()
            penalty.backward()  # adds to p.grad, which the next step empties
            diary.write_state(model, optimizer)

    both(script, replays=30, plan="{F} {B} {O}")


def test_two_steps_over_one_model():
    """As a GAN is trained: two optimizers, and one model's loss passes through the other."""

    def script(diary: Diary) -> None:
        generator, critic = nn.Linear(4, 6), Net(6, 1)
        model = nn.ModuleList([generator, critic])
        first = torch.optim.AdamW(generator.parameters(), lr=1e-2, fused=True)
        second = torch.optim.AdamW(critic.parameters(), lr=1e-2, fused=True)
        fool = diary.step(lambda z: -critic(generator(z)).mean(), model=model, optimizer=first)
        judge = diary.step(
            lambda z, x: critic(generator(z).detach()).mean() - critic(x).mean(),
            model=model,
            optimizer=second,
        )
        noise = [torch.randn(8, 4) for _ in range(40)]
        for index, (x, _) in enumerate(batches(40)):
            diary.write("critic", judge(noise[index], x))
            diary.write_state(model, first, second)
            if index % 2:
                diary.write("generator", fool(noise[index]))
                diary.write_state(model, first, second)
        if diary.graphed:
            assert fool.report().steps_replayed >= 10, str(fool.report())

    both(script, replays=30, plan="{F} {B} {O}")


def test_two_steps_where_one_model_is_outside():
    def script(diary: Diary) -> None:
        generator, critic = nn.Linear(4, 6), Net(6, 1)
        optimizer = torch.optim.AdamW(generator.parameters(), lr=1e-2, fused=True)
        step = diary.step(lambda z: -critic(generator(z)).mean(), model=generator, optimizer=optimizer)
        for index in range(40):
            if index % 10 == 9:
                critic.zero_grad()
            diary.write("generator", step(torch.randn(8, 4)))
            diary.write_state(generator, optimizer)
            diary.write_state(critic)

    both(script, replays=20, plan="{F} {B} {O}")


# -- numeric formats ---------------------------------------------------------------------------------------


def test_a_head_whose_gradient_comes_from_the_micro_batch_before():
    """The graph of the last micro-batch updates the heads that had gradients when it was captured."""

    def script(diary: Diary) -> None:
        heads = nn.ModuleList([nn.Linear(6, 3), nn.Linear(6, 3)])
        optimizer = adamw(heads)

        def step_fn(batch: Any, other: bool) -> Tensor:
            weight = heads[1].weight if other else heads[1].weight.detach()
            loss = nn.functional.cross_entropy(heads[0](batch[0]), batch[1])
            return loss + nn.functional.linear(batch[0], weight).mean()

        step = diary.step(step_fn, model=heads, optimizer=optimizer)
        for index, batch in enumerate(batches(120)):
            first = index % 2 == 0
            diary.write("loss", (step.accumulate if first else step)(batch, first and index > 60))
            diary.write_state(heads, optimizer)

    both(script, replays=40)


def test_gradients_of_a_model_that_the_step_only_reads():
    """The critic of a GAN steps often, and the generator, which it reads detached, now and then."""

    def script(diary: Diary) -> None:
        generator, critic = nn.Linear(6, 6), Net(dropout=0.0)
        theirs, mine = adamw(generator), adamw(critic)

        def judge(batch: Any) -> Tensor:
            return critic(generator(batch[0]).detach()).mean() - critic(batch[0]).mean()

        def make(batch: Any) -> Tensor:
            return -critic(generator(batch[0])).mean()

        criticise = diary.step(judge, model=critic, optimizer=mine)
        generate = diary.step(make, model=nn.ModuleList([generator, critic]), optimizer=theirs)
        for index, batch in enumerate(batches(80)):
            diary.write("loss", criticise(batch))
            if index % 5 == 4:
                diary.write("loss", generate(batch))
            diary.write("gradients", [p.grad for p in [*generator.parameters(), *critic.parameters()]])
        diary.write_state(critic, mine)
        diary.write_state(generator, theirs)
        if diary.graphed:
            assert criticise.report().steps_replayed >= 60, str(criticise.report())

    both(script, replays=60)


@pytest.mark.parametrize("clip", [None, 0.1])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_grad_scaler_skips_steps_with_overflow(dtype, clip):
    def script(diary: Diary) -> None:
        model = Net(dropout=0.0)
        optimizer = adamw(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=6)

        def step_fn(batch: Any, factor: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=dtype):
                return nn.functional.cross_entropy(model(batch[0]), batch[1]) * factor

        step = diary.step(step_fn, model=model, optimizer=optimizer, scaler=scaler, max_grad_norm=clip)
        for index, batch in enumerate(batches(40)):
            factor = torch.tensor(float("inf") if index in (3, 22, 30) else 1.0)
            diary.write("loss", step(batch, factor))
            diary.write("scale", scaler.get_scale())
            diary.write("scaler", scaler.state_dict())
            diary.write_state(model, optimizer)

    both(script, replays=30, plan="{F} {B} {O}")


def test_a_scaler_that_is_switched_off():
    def script(diary: Diary) -> None:
        model = Net()
        optimizer = adamw(model)
        scaler = torch.amp.GradScaler("cpu", enabled=False)
        step = diary.step(loss_of(model), model=model, optimizer=optimizer, scaler=scaler, max_grad_norm=0.1)
        for batch in batches(40):
            diary.write("loss", step(batch))
            diary.write_state(model, optimizer)
            diary.write("scaler", scaler.state_dict())

    replayed(both(script, replays=20), least=30)


def test_scaler_with_an_optimizer_that_reads_overflow_on_the_host():
    def script(diary: Diary) -> None:
        model = Net(dropout=0.0)
        optimizer = adam(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=6)
        step = diary.step(
            lambda batch, factor: loss_of(model)(batch) * factor,
            model=model,
            optimizer=optimizer,
            scaler=scaler,
            max_grad_norm=0.1,
        )
        for index, batch in enumerate(batches(40)):
            factor = torch.tensor(float("inf") if index in (3, 22) else 1.0)
            diary.write("loss", step(batch, factor))
            diary.write("scaler", scaler.state_dict())
            diary.write_state(model, optimizer)

    both(script, replays=30, plan="{F} {B} O")


def test_autocast_around_the_step():
    def script(diary: Diary) -> None:
        model = Net()
        optimizer = adamw(model)
        step = diary.step(loss_of(model), model=model, optimizer=optimizer)
        for index, batch in enumerate(batches(50)):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=index < 25):
                diary.write("loss", step(batch))
            diary.write_state(model, optimizer)

    both(script, replays=35, plan="{F} {B} {O}")


# -- batches -------------------------------------------------------------------------------------------------

Pair = namedtuple("Pair", "x y")


@dataclass
class Item:
    x: Tensor
    y: Tensor
    name: str = ""


@dataclass(frozen=True)
class Frozen:
    x: Tensor
    y: Tensor


class Encoding(UserDict):
    """As transformers' BatchEncoding."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self.data[name]
        except KeyError:
            raise AttributeError(name) from None


@pytest.mark.notices("the last tensor of a batch is not copied")
@pytest.mark.parametrize(
    ("pack", "x", "y"),
    [
        (lambda x, y, i: [x, y], lambda b: b[0], lambda b: b[1]),
        (lambda x, y, i: {"x": x, "y": y, "none": None, "name": f"n{i}"}, lambda b: b["x"], lambda b: b["y"]),
        (lambda x, y, i: Pair(x, y), lambda b: b.x, lambda b: b.y),
        (lambda x, y, i: Item(x, y, f"name {i}"), lambda b: b.x, lambda b: b.y),
        (lambda x, y, i: Frozen(x, y), lambda b: b.x, lambda b: b.y),
        (lambda x, y, i: Encoding(x=x, y=y), lambda b: b["x"], lambda b: b["y"]),
        (
            lambda x, y, i: {"deep": [(x, {"y": y, "i": i, "f": i / 7})]},
            lambda b: b["deep"][0][0],
            lambda b: b["deep"][0][1]["y"],
        ),
    ],
    ids=["list", "dict", "namedtuple", "dataclass", "frozen dataclass", "UserDict", "nested"],
)
def test_batches_of_all_kinds(pack, x, y):
    def script(diary: Diary) -> None:
        model = Net()
        optimizer = adamw(model)

        def step_fn(batch: Any) -> Tensor:
            return nn.functional.cross_entropy(model(x(batch)), y(batch))

        step = diary.step(step_fn, model=model, optimizer=optimizer)
        for index, (xs, ys) in enumerate(batches(36)):
            diary.write("loss", step(pack(xs, ys, index)))
            diary.write_state(model, optimizer)

    both(script, replays=28, plan="{F} {B} {O}")


def test_keyword_arguments_and_unread_tensors():
    def script(diary: Diary) -> None:
        model = Net()
        optimizer = adamw(model)

        def step_fn(*, x: Tensor, y: Tensor, extra: Tensor) -> dict[str, Any]:
            return {"loss": nn.functional.cross_entropy(model(x), y), "extra": extra}

        step = diary.step(step_fn, model=model, optimizer=optimizer)
        for index, (x, y) in enumerate(batches(36)):
            diary.write("out", step(x=x, y=y, extra=torch.tensor([index])))
        diary.write_state(model, optimizer)

    both(script, replays=30, plan="{F} {B} {O}")


def test_a_number_that_the_step_reads_and_that_changes_once_in_a_while():
    def script(diary: Diary) -> None:
        model = Net()
        optimizer = adamw(model)
        step = diary.step(
            lambda batch, factor: loss_of(model)(batch) * factor, model=model, optimizer=optimizer
        )
        for index, batch in enumerate(batches(60)):
            diary.write("loss", step(batch, 1.0 if index % 40 < 20 else 0.5))
            diary.write_state(model, optimizer)

    both(script, replays=45, plan="{F} {B} {O}")


def test_same_tensor_twice_and_views_of_one_tensor_in_a_batch():
    def script(diary: Diary) -> None:
        model = Net()
        optimizer = adamw(model)

        def step_fn(a: Tensor, b: Tensor, y: Tensor) -> Tensor:
            return nn.functional.cross_entropy(model(a) + model(b), y)

        step = diary.step(step_fn, model=model, optimizer=optimizer)
        for index, (x, y) in enumerate(batches(60)):
            other = x if index % 20 < 10 else x.clone()
            diary.write("loss", step(x, other, y))
            diary.write_state(model, optimizer)

    both(script, replays=35, plan="{F} {B} {O}")


def test_two_alternating_lengths():
    def script(diary: Diary) -> None:
        model = Net()
        optimizer = adamw(model)
        step = diary.step(loss_of(model), model=model, optimizer=optimizer)
        for index in range(50):
            diary.write("loss", step(batches(1, size=4 + 4 * (index % 2))[0]))
            diary.write_state(model, optimizer)

    both(script, replays=30, plan="{F} {B} {O}")


# -- outputs -------------------------------------------------------------------------------------------------


def test_outputs_kept_over_many_steps_keep_their_values():
    def script(diary: Diary) -> None:
        model = Net()
        optimizer = adamw(model)

        def step_fn(batch: Any) -> dict[str, Any]:
            logits = model(batch[0])
            loss = nn.functional.cross_entropy(logits, batch[1])
            accuracy = (logits.argmax(1) == batch[1]).float().mean()
            return {
                "loss": loss,
                "logits": logits,
                "more": [accuracy, logits.sum(0)],
                "name": "fixed",
                "n": 7,
            }

        step = diary.step(step_fn, model=model, optimizer=optimizer)
        kept = [step(batch) for batch in batches(36)]
        diary.write("outputs", kept)
        diary.write_state(model, optimizer)
        if diary.graphed:
            assert not any(
                t.requires_grad for out in kept for t in (out["loss"], out["logits"], out["more"][0])
            )

    both(script, replays=30, plan="{F} {B} {O}")


@pytest.mark.slow_after(3)
@pytest.mark.parametrize(
    "values",
    [
        range(40),
        [10**6 + i for i in range(40)],
        [i / 3 for i in range(40)],
        [str(i) for i in range(40)],
        [i % 7 == 6 for i in range(40)],
    ],
    ids=["small", "large", "float", "str", "bool"],
)
@pytest.mark.parametrize("through", ["argument", "attribute", "nested"])
def test_a_python_value_passed_through_is_never_stale(values, through):
    def script(diary: Diary) -> None:
        model = Net()
        optimizer = adamw(model)

        def step_fn(batch: Any, value: Any) -> dict[str, Any]:
            loss = loss_of(model)(batch)
            if through == "attribute":
                return {"loss": loss, "value": model.epoch}
            return {"loss": loss, "value": [{"deep": (value,)}] if through == "nested" else value}

        step = diary.step(step_fn, model=model, optimizer=optimizer)
        for value, batch in zip(values, batches(40), strict=True):
            model.epoch = value
            diary.write("out", step(batch, value))
        diary.write_state(model, optimizer)

    both(script, replays=25)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("given", ["hidden", "batch"])
@pytest.mark.parametrize("reads", [False, True])
def test_a_checkpointed_block_with_batch_norm(reentrant: bool, given: str, reads: bool):
    seen: list[float] = []

    def script(diary: Diary) -> None:
        block = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2))
        model = nn.ModuleList([nn.Linear(6, 6), block, nn.Linear(8, 3)])
        optimizer = sgd(model)

        def step_fn(batch: Any) -> torch.Tensor:
            x = model[0](batch[0]) if given == "hidden" else batch[0]
            hidden = checkpoint(model[1], x, use_reentrant=reentrant)
            loss = nn.functional.cross_entropy(model[2](hidden), batch[1])
            if reads:
                seen.append(loss.item())
            return loss

        step = diary.step(step_fn, model=model, optimizer=optimizer)
        for batch in batches(30):
            diary.write("loss", step(batch))
            diary.write_state(model, optimizer)

    if reentrant and given == "batch":
        both(script, replays=40)
    else:
        both(script, replays=15)


def test_a_checkpointed_batch_norm_whose_backward_has_a_graph_of_its_own():
    """Its statistics change twice in a step: once more in the recomputation."""

    def script(diary: Diary) -> None:
        model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
        optimizer = sgd(model)

        def step_fn(batch: Any) -> torch.Tensor:
            return nn.functional.cross_entropy(checkpoint(model, batch[0], use_reentrant=False), batch[1])

        step = diary.step(step_fn, model=model, optimizer=optimizer)
        for batch in batches(40):
            diary.write("loss", step(batch))
            diary.write_state(model, optimizer)

    both(script, backward="off", replays=17)


def test_an_error_in_a_replay_leaves_no_gradients_of_the_step_before():
    def script(diary: Diary) -> None:
        model = Net()
        optimizer = sgd(model)
        step = diary.step(loss_of(model), model=model, optimizer=optimizer)
        for index, (x, y) in enumerate(batches(40)):
            try:
                diary.write("loss", step((x, y + 7 if index in (20, 25) else y)))
            except IndexError as error:
                diary.write("error", str(error))
            diary.write_state(model, optimizer)

    both(script, replays=20, plan="{F} {B} {O}")


def test_step_fn_that_returns_its_learning_rate_sees_the_scheduled_number() -> None:
    """The rate is read in Python: every change is another variant, never a stale number or a device tensor."""

    def script(diary: Diary) -> None:
        model = Net()
        optimizer = adamw(model)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 12, 0.5)

        def step_fn(batch: Any) -> dict[str, Any]:
            return {"loss": loss_of(model)(batch), "lr": optimizer.param_groups[0]["lr"]}

        step = diary.step(step_fn, model=model, optimizer=optimizer)
        for batch in batches(40):
            result = step(batch)
            assert type(result["lr"]) is float
            diary.write("lr", result["lr"])
            diary.write("loss", result["loss"])
            scheduler.step()
        diary.write_state(model, optimizer)

    assert both(script, replays=12).steps_replayed >= 12


def test_comparisons_under_autocast_leave_no_casts_of_weights(monkeypatch):
    """Autocast keeps casts of weights until it ends, and each plain run of a comparison has weights of its own."""
    monkeypatch.setattr(Fingerprint, "same_bits", lambda *_: False)
    model = Net()
    # a capture of the update would let go of casts
    config = PyGraphConfig(engine="emulated", optimizer="off")
    step = GraphedStep(loss_of(model), model=model, optimizer=adamw(model), config=config)
    with torch.autocast("cpu", torch.bfloat16):
        for batch in batches(12):
            step(batch)
        kept = [t for t in gc.get_objects() if type(t) is Tensor and t.is_leaf and t.requires_grad]
    assert step.report().to_dict()["phases_from_graphs"]["F"] >= 6, str(step.report())
    assert sum(t.shape == model.first.weight.shape for t in kept) == 1, "the graph's own one alone"
