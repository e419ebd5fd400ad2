"""Hyperparameters that change on every step are read anew by each replay, where the engine can rewrite them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from faults import numbers_are_not_found
from torch import nn
from training import Diary, Net, adamw, batches, both, loss_of, sgd

from pygraph_train.graphs.emulated import EmulatedEngine, EmulatedGraph
from pygraph_train.graphs.emulated_trees import RecordedNumbers
from pygraph_train.graphs.engine import NumbersNotFound
from pygraph_train.optimizers.preparation import OptimizerPreparation

OFF = {"forward": "off", "backward": "off"}
PLANS = pytest.mark.parametrize("alone", [False, True], ids=["whole step", "optimizer alone"])
FOLLOWS = pytest.mark.notices("replays keep the hyperparameters of their capture")


@pytest.fixture
def no_rewriting(monkeypatch: pytest.MonkeyPatch) -> None:
    """What holds on CUDA: an engine that bakes numbers in for good."""
    numbers_are_not_found(monkeypatch)


def compare(
    script: Any, alone: bool, *, replays: int = 40, captures: int = 1, plan: str = "{F} {B} {O}"
) -> Any:
    """Compare with plain training; the optimizer stays in a graph to the end."""
    report = both(script, **(OFF if alone else {}), replays=replays, plan=None if alone else plan)
    if alone:
        assert report.optimizer_steps_replayed >= replays, str(report)
    assert not [f for f in report.fallbacks if "hyperparameter" in f.reason], str(report)
    assert sum(c.plan == "{O}" for c in report.captures) == captures, str(report)
    return report


def one_cycle(make: Any) -> Any:
    def script(diary: Diary) -> None:
        model = Net()
        optimizer = make(model)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=60)
        step = diary.step(loss_of(model), model=model, optimizer=optimizer)
        for batch in batches(60):
            diary.write("loss", step(batch))
            if scheduler.last_epoch < 59:
                scheduler.step()
            diary.write_state(model, optimizer)
            group = optimizer.param_groups[0]
            diary.write("types", [str(type(v)) for v in group.values()])

    return script


@FOLLOWS
@PLANS
@pytest.mark.parametrize("make", [adamw, sgd])
def test_one_cycle_with_its_defaults_stays_in_the_graph(make, alone):
    compare(one_cycle(make), alone)


MADE = {
    "adam": lambda ps: torch.optim.Adam(ps, lr=1e-2, weight_decay=0.1, fused=True),
    "amsgrad": lambda ps: torch.optim.Adam(ps, lr=1e-2, amsgrad=True, maximize=True, fused=True),
    "adamw": lambda ps: torch.optim.AdamW(ps, lr=1e-2, fused=True),
    "sgd": lambda ps: torch.optim.SGD(ps, lr=1e-2, momentum=0.9, dampening=0.1, weight_decay=0.1, fused=True),
    "nesterov": lambda ps: torch.optim.SGD(ps, lr=1e-2, momentum=0.9, nesterov=True, fused=True),
    "adagrad": lambda ps: torch.optim.Adagrad(ps, lr=1e-2, lr_decay=0.01, weight_decay=0.1, fused=True),
}


def shrink(group: dict[str, Any], factor: float) -> None:
    """Change every hyperparameter that is a number, and that is not zero."""
    for key, value in group.items():
        if key in ("params", "initial_lr") or isinstance(value, bool):
            continue
        if isinstance(value, tuple):
            group[key] = tuple(item * factor for item in value)
        elif isinstance(value, float):
            group[key] = value * factor


@FOLLOWS
@PLANS
@pytest.mark.slow_after(6)
@pytest.mark.parametrize("name", MADE)
def test_every_number_of_fused_kernels_may_change_on_every_step(name, alone):
    def script(diary: Diary) -> None:
        model = Net()
        optimizer = MADE[name](model.parameters())
        step = diary.step(loss_of(model), model=model, optimizer=optimizer)
        for index, batch in enumerate(batches(60)):
            shrink(optimizer.param_groups[0], 1.004 if index % 3 else 0.99)
            diary.write("loss", step(batch))
            diary.write_state(model, optimizer)

    compare(script, alone)


@FOLLOWS
@PLANS
def test_a_weight_decay_schedule_in_a_numpy_array(alone):
    """As vision models that teach themselves have it: one group is regularized, the other one never."""

    def script(diary: Diary) -> None:
        model = Net()
        groups = [
            {"params": [p for p in model.parameters() if p.dim() > 1]},
            {"params": [p for p in model.parameters() if p.dim() == 1], "weight_decay": 0.0},
        ]
        optimizer = torch.optim.AdamW(groups, lr=1e-2, fused=True)
        rates, decays = np.linspace(1e-2, 1e-4, 60), np.linspace(0.04, 0.4, 60)
        step = diary.step(loss_of(model), model=model, optimizer=optimizer)
        for index, batch in enumerate(batches(60)):
            for group in optimizer.param_groups:
                group["lr"] = rates[index]
            optimizer.param_groups[0]["weight_decay"] = decays[index]
            diary.write("loss", step(batch))
            diary.write_state(model, optimizer)
            diary.write("types", [str(type(v)) for g in optimizer.param_groups for v in g.values()])

    compare(script, alone)


@PLANS
def test_groups_have_numbers_of_their_own(alone):
    """Two groups with the same numbers, one of which changes, and one whose layers are frozen for a while."""

    def script(diary: Diary) -> None:
        model = Net()
        groups = [{"params": m.parameters()} for m in (model.first, model.norm, model.second)]
        optimizer = torch.optim.AdamW(groups, lr=1e-2, fused=True)
        step = diary.step(loss_of(model), model=model, optimizer=optimizer)
        for index, batch in enumerate(batches(120)):
            if index in (40, 70):
                model.first.requires_grad_(index == 70)
                model.first.zero_grad()
            optimizer.param_groups[1]["weight_decay"] = 0.1 + 0.001 * index
            if index > 60:
                shrink(optimizer.param_groups[0], 0.999)
            diary.write("loss", step(batch))
            diary.write_state(model, optimizer)

    report = both(script, **(OFF if alone else {}), replays=80)
    assert not [f for f in report.fallbacks if "hyperparameter" in f.reason], str(report)


@PLANS
def test_a_number_that_becomes_zero_is_captured_anew(alone):
    """torch's Python code leaves out what is multiplied by zero."""

    def script(diary: Diary) -> None:
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9, weight_decay=0.0, fused=True)
        step = diary.step(loss_of(model), model=model, optimizer=optimizer)
        group = optimizer.param_groups[0]
        for index, batch in enumerate(batches(100)):
            group["momentum"] = 0.0 if 30 <= index < 60 else 0.9 - 0.001 * index
            group["weight_decay"] = 0.0 if index < 80 else 0.001 * index
            diary.write("loss", step(batch))
            diary.write_state(model, optimizer)

    compare(script, alone, replays=70, captures=4)


@PLANS
def test_numbers_of_another_type_are_baked_in(alone):
    def script(diary: Diary) -> None:
        model = Net()
        optimizer = adamw(model)
        step = diary.step(loss_of(model), model=model, optimizer=optimizer)
        for index, batch in enumerate(batches(90)):
            value = 0.3 if index < 30 else 1 if index < 60 else 0.3
            optimizer.param_groups[0]["weight_decay"] = value
            diary.write("loss", step(batch))
            diary.write_state(model, optimizer)

    compare(script, alone, replays=60, captures=3)


@PLANS
def test_checkpoints_and_new_groups_in_mid_run(alone):
    """Loading makes new groups; numbers are those of the groups that there are."""

    def script(diary: Diary) -> None:
        model, late = Net(), nn.Linear(6, 3)
        optimizer = adamw(model)
        step = diary.step(
            lambda b: loss_of(model)(b) + late(b[0]).square().mean(), model=model, optimizer=optimizer
        )
        saved: dict[str, Any] = {}
        for index, batch in enumerate(batches(160)):
            if index == 30:
                saved = optimizer.state_dict()
            if index == 60:
                optimizer.load_state_dict(saved)
            if index == 90:
                optimizer.add_param_group({"params": late.parameters(), "weight_decay": 0.2})
            if index == 120:
                optimizer.param_groups[0] = dict(optimizer.param_groups[0])
            for group in optimizer.param_groups:
                shrink(group, 0.999)
            diary.write("loss", step(batch))
            diary.write_state(model, optimizer)

    compare(script, alone, replays=120, captures=3)


def test_a_scaler_that_skips_steps():
    def script(diary: Diary) -> None:
        model = Net()
        optimizer = adamw(model)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=5)

        def step_fn(batch: Any, factor: torch.Tensor) -> torch.Tensor:
            return loss_of(model)(batch) * factor

        step = diary.step(step_fn, model=model, optimizer=optimizer, scaler=scaler)
        for index, batch in enumerate(batches(60)):
            shrink(optimizer.param_groups[0], 0.999)
            step(batch, torch.tensor(float("inf") if index % 7 == 5 else 1.0))
            diary.write_state(model, optimizer)

    compare(script, alone=False)


def test_a_step_that_reads_hyperparameters_gets_those_of_the_user():
    """Only the optimizer's step meets the values by which a capture finds them."""

    def script(diary: Diary) -> None:
        model = Net()
        optimizer = adamw(model)
        fn, group = loss_of(model), optimizer.param_groups[0]
        step = diary.step(lambda b: fn(b) * group["betas"][0], model=model, optimizer=optimizer)
        for batch in batches(40):
            group["weight_decay"] *= 0.99  # which the step does not read
            diary.write("loss", step(batch))
            diary.write_state(model, optimizer)

    compare(script, alone=False, replays=30)


def test_an_error_in_a_capture_leaves_the_groups_as_they_were():
    model = Net()
    optimizer = adamw(model)
    numbers = OptimizerPreparation(optimizer, emulated=True).live_numbers()
    before = dict(optimizer.param_groups[0])
    with pytest.raises(KeyError), numbers.marked():
        assert optimizer.param_groups[0]["betas"] != before["betas"]
        raise KeyError
    assert optimizer.param_groups[0] == before


@PLANS
def test_an_engine_that_cannot_rewrite_numbers_gives_the_optimizer_back(alone, no_rewriting):
    both(
        one_cycle(adamw),
        **(OFF if alone else {}),
        **({"refused": "changes again and again"} if alone else {"replays": 15, "plan": "{F} {B} O"}),
    )


def test_numbers_are_found_wherever_operations_of_a_name_have_them():
    engine, x = EmulatedEngine(), torch.ones(3)
    graph, _ = engine.capture(
        lambda: (x.mul_(0.3125), torch.full_like(x, 0.3125), x.add_(x, alpha=0.3125), x.sub_(0.75))
    )
    written = graph.numbers([[0.3125], [0.75]], ["aten.mul_", "aten.add_", "aten.sub_"])
    written.write([2.0, 1.0])
    x.fill_(1.0)
    graph.replay()
    assert x.tolist() == [5.0] * 3
    graph.close()


@pytest.mark.parametrize(
    ("sets", "kernels"),
    [
        ([[0.5]], ["aten.mul_"]),  # in no operation
        ([[0.3125]], ["aten.full_like"]),  # not in the operation of that name
        ([[0.3125]], ["aten.mul_", "aten.sub_"]),  # not in each
        ([[0.3125, 0.25]], ["aten.addcmul_"]),  # one of two
        ([[0.3125], [0.25]], ["aten.mul_"]),  # one set in none
        ([[0.125]], ["aten.addmm"]),  # twice in one
        ([[0.3125], [0.625]], ["aten.mul_", "aten.sub_", "aten.elu_"]),  # two sets in one
    ],
)
def test_numbers_that_are_not_where_they_should_be_are_told(sets, kernels):
    engine, x = EmulatedEngine(), torch.ones(3, 3)

    def work() -> None:
        x.mul_(0.3125)
        torch.full_like(x, 0.625)
        x.sub_(0.625)
        x.addcmul_(x, x, value=0.3125)
        torch.addmm(x, x, x, beta=0.125, alpha=0.125)
        torch.ops.aten.elu_(x, 0.3125, 0.625)

    graph, _ = engine.capture(work)
    with pytest.raises(NumbersNotFound):
        graph.numbers(sets, kernels)
    graph.close()


@PLANS
@pytest.mark.notices("other hyperparameters are baked in")
def test_a_capture_whose_numbers_are_not_found_is_made_again_with_those_of_the_step(alone, monkeypatch):
    """What a kernel of another torch might do: it takes a number in another form."""
    tried = 0

    def numbers(self: Any, sets: Any, kernels: Any) -> Any:
        nonlocal tried
        tried += 1
        raise NumbersNotFound("not found")

    monkeypatch.setattr(EmulatedGraph, "numbers", numbers)

    def script(diary: Diary) -> None:
        model = Net()
        optimizer = adamw(model)
        step = diary.step(loss_of(model), model=model, optimizer=optimizer)
        for index, batch in enumerate(batches(60)):
            if index == 30:
                shrink(optimizer.param_groups[0], 0.9)
            diary.write("loss", step(batch))
            diary.write_state(model, optimizer)

    report = compare(script, alone, captures=2)
    assert tried == 1, report


def test_numbers_that_a_graph_refuses_are_not_found():
    class Refusing:
        nodes = 1

        def replay(self) -> None: ...
        def close(self) -> None: ...
        def numbers(self, sets: Any, kernels: Any) -> Any:
            return self

        def write(self, values: Any) -> None:
            raise RuntimeError("the driver refuses")

    model = Net()
    loss_of(model)(batches(1)[0]).backward()
    numbers = OptimizerPreparation(adamw(model), emulated=True).live_numbers()
    with numbers.marked():
        pass
    with pytest.raises(NumbersNotFound, match="the driver refuses"):
        numbers.follow(Refusing())


def test_numbers_are_written_only_where_they_have_changed(monkeypatch):
    written: list[Any] = []
    write = RecordedNumbers.write

    def count(self: Any, values: Any) -> None:
        written.append(list(values))
        write(self, values)

    monkeypatch.setattr(RecordedNumbers, "write", count)

    def script(diary: Diary) -> None:
        model = Net()
        optimizer = adamw(model)
        step = diary.step(loss_of(model), model=model, optimizer=optimizer)
        for index, batch in enumerate(batches(60)):
            optimizer.param_groups[0]["weight_decay"] = 0.1 if index < 30 else 0.2
            diary.write("loss", step(batch))
            diary.write_state(model, optimizer)

    compare(script, alone=False)
    assert len(written) == 2, written
