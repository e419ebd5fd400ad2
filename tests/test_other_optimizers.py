"""Optimizers of other libraries get a graph of their own where that changes nothing, and a reason where not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from training import Diary, Net, batches, both, line_of, loss_of

from pygraph_train import StepReport
from pygraph_train.optimizers.trial import OptimizerTrial


class Lion(torch.optim.Optimizer):
    """Pure tensor math."""

    def __init__(self, params: Any, lr: float = 1e-3, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["mean"] = torch.zeros_like(p)
                update = state["mean"].lerp(p.grad, 0.3).sign()
                p.add_(update, alpha=-group["lr"])
                state["mean"].lerp_(p.grad, 1 - group["beta"])


class Reads(Lion):
    """Looks at the gradient on the host."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        norm = self.param_groups[0]["params"][0].grad.norm().item()
        if norm < 1e9:
            super().step()


class Counts(Lion):
    """A bias correction that is a Python number."""

    where = "state"

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                place: Any = {"state": self.state[p], "group": group, "attribute": vars(self)}[self.where]
                place["count"] = place.get("count", 0) + 1
                p.add_(p.grad, alpha=-group["lr"] / (1 - 0.9 ** place["count"]))


class CountsInGroup(Counts):
    where = "group"


class CountsOnItself(Counts):
    where = "attribute"


STEPS_MADE = [0]


class Hidden(Lion):
    """Its correction depends on something that only the training loop changes."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for p in self.param_groups[0]["params"]:
            p.add_(p.grad, alpha=-0.01 / (1 - 0.9 ** (1 + STEPS_MADE[0])))


def train(
    make: Any, *, scheduler: bool = False, every: int = 20, steps: int = 60, **config: Any
) -> StepReport:
    def script(diary: Diary) -> None:
        model = Net()
        optimizer = make(model.parameters())
        STEPS_MADE[0] = 0
        schedule = (
            torch.optim.lr_scheduler.StepLR(optimizer, every, 0.5 ** (every / 20)) if scheduler else None
        )
        step = diary.step(loss_of(model), model=model, optimizer=optimizer, max_grad_norm=0.1)
        for batch in batches(steps):
            diary.write("loss", step(batch))
            STEPS_MADE[0] += 1
            diary.write("parameters", dict(model.named_parameters()))
            diary.write("state", optimizer.state_dict())
            if schedule is not None:
                schedule.step()

    return both(script, **config)


@pytest.mark.parametrize("config", [{}, {"forward": "off"}, {"fuse": "off"}], ids=str)
def test_tensor_math_of_another_library_is_graphed(config):
    report = train(Lion, **config, replays=30)
    assert report.optimizer_steps_replayed >= 30 and "{O}" in report.plan, str(report)


def test_a_new_learning_rate_is_captured_anew():
    report = train(Lion, scheduler=True, replays=80)
    assert [c.plan for c in report.captures].count("{O}") == 3, str(report)


def test_a_learning_rate_that_changes_on_every_step_is_named():
    report = train(lambda params: Lion(params), scheduler=True, every=1, steps=30, replays=19)
    assert report.optimizer_steps_replayed == 0 and "{O}" not in report.plan, str(report)
    assert any("bakes in its learning rate" in f.reason for f in report.fallbacks), str(report)
    assert not report.captures or all(c.plan != "{O}" for c in report.captures), str(report)


def test_a_host_read_is_named_with_its_line():
    report = train(Reads, replays=40)
    assert report.optimizer_steps_replayed == 0
    where = line_of(Reads, "if norm")  # Dynamo says where the number decides something
    assert any(f.where == where and "on the host" in f.reason for f in report.fallbacks), str(report)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (Counts, "'count' of parameter 0"),
        (CountsInGroup, "'count' of parameter group 0"),
        (CountsOnItself, "count"),
    ],
)
def test_a_counter_in_python_keeps_it_out(make, name):
    report = train(make, replays=40)
    assert report.optimizer_steps_replayed == 0
    assert any(name in f.reason and "in Python" in f.reason for f in report.fallbacks), str(report)


def test_a_number_that_the_loop_changes_is_named_and_never_replayed():
    report = train(Hidden, steps=30, replays=19)
    assert report.optimizer_steps_replayed == 0
    row = next(f for f in report.fallbacks if "STEPS_MADE[0]" in f.reason)
    assert row.where == line_of(Hidden, "STEPS_MADE[0]"), str(report)


class Schedule:
    """Counts where nobody looks, by so little that no tolerance sees it."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> float:
        self.count += 1
        return 1e-2 / (1 + 1e-6 * self.count)


class WithSchedule(Lion):
    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.schedule = Schedule()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        lr = self.schedule()
        for p in self.param_groups[0]["params"]:
            p.add_(p.grad, alpha=-lr)


def test_a_schedule_in_an_object_of_the_optimizer_counts_every_step():
    made: list[WithSchedule] = []
    report = train(lambda params: made.append(WithSchedule(params)) or made[-1], replays=40)
    assert [o.schedule.count for o in made] == [60, 60]
    row = next(f for f in report.fallbacks if "self.schedule.count" in f.reason)
    assert row.where == line_of(Schedule, "self.count += 1"), str(report)


DECAY = [1.0]


class Decays(Lion):
    """Reads a number of its module, and has a tensor that is no state of torch's."""

    def __init__(self, params: Any) -> None:
        super().__init__(params)
        self.schedule = Schedule()
        self.schedule.scale = torch.tensor(1e-2)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.schedule.scale.mul_(0.999)
        for p in self.param_groups[0]["params"]:
            p.mul_(DECAY[0]).sub_(p.grad * self.schedule.scale)


def changed_late(make: Any, change: Any, *, steps: int = 60) -> StepReport:
    """Trains, and after 40 steps calls `change(optimizer)`."""

    def script(diary: Diary) -> None:
        model = Net()
        DECAY[0] = 1.0
        optimizer = make(model.parameters())
        step = diary.step(loss_of(model), model=model, optimizer=optimizer)
        for index, batch in enumerate(batches(steps)):
            if index == 40:
                change(optimizer)
            diary.write("loss", step(batch))
            diary.write_state(model, optimizer)

    report = both(script, replays=30)
    assert report.optimizer_steps_replayed >= 30, str(report)
    return report


@pytest.mark.parametrize("by", [1e-2, 1e-6, 1e-9])
def test_a_number_that_changes_once_in_mid_run_is_noticed_before_the_next_replay(by):
    report = changed_late(Decays, lambda optimizer: DECAY.__setitem__(0, 1 - by))
    assert [c.plan for c in report.captures].count("{O}") == 2, str(report)


def test_a_tensor_that_is_replaced_in_an_object_of_the_optimizer_is_read_at_its_new_place():
    changed_late(Decays, lambda optimizer: setattr(optimizer.schedule, "scale", torch.tensor(3e-2)))


def test_a_new_method_of_an_optimizer_is_run():
    def other(self: Any, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            p.data.sub_(p.grad, alpha=5e-2)

    mine = [type(f"Decays{k}", (Decays,), {}) for k in range(2)]
    changed_late(lambda params: mine.pop()(params), lambda optimizer: setattr(type(optimizer), "step", other))


class AsksDynamo(Lion):
    """Another step under Dynamo than without it."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        factor = 1.0 if torch.compiler.is_compiling() else DECAY[0]
        for p in self.param_groups[0]["params"]:
            p.add_(p.grad, alpha=-1e-2 * factor)


def test_a_step_that_is_another_one_under_dynamo_is_not_replayed():
    report = train(AsksDynamo, steps=30, replays=19)
    assert report.optimizer_steps_replayed == 0
    assert any("is_compiling" in f.reason for f in report.fallbacks), str(report)


class BeginsToCount(Decays):
    made = 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        if DECAY[0] < 1:
            self.made += 1


def test_a_count_that_begins_in_mid_run_is_kept():
    made: list[BeginsToCount] = []
    report = changed_late(
        lambda params: made.append(BeginsToCount(params)) or made[-1],
        lambda optimizer: DECAY.__setitem__(0, 0.999),
    )
    assert [o.made for o in made] == [20, 20]
    row = next(f for f in report.fallbacks if "its attribute made" in f.reason)
    assert row.where == line_of(BeginsToCount, "@torch.no_grad()"), str(report)


def test_a_step_that_counts_on_its_optimizer_counts_in_replays():
    optimizers = []

    def script(diary: Diary) -> None:
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        optimizers.append(optimizer)
        optimizer.calls = 0  # type: ignore[attr-defined]
        loss = loss_of(model)

        def step_fn(batch: Any) -> Any:
            optimizer.calls += 1  # type: ignore[attr-defined]
            return loss(batch)

        step = diary.step(step_fn, model=model, optimizer=optimizer)
        for batch in batches(30):
            diary.write("loss", step(batch))
        diary.write("calls", optimizer.calls)  # type: ignore[attr-defined]

    both(script, replays=20, plan="{F B O}")


def test_parameters_of_several_groups():
    report = train(lambda params: Lion([{"params": [p]} for p in params], lr=1e-2), replays=30)
    assert report.optimizer_steps_replayed >= 30, str(report)


def test_what_a_trial_inherits_is_set_up() -> None:
    trial = OptimizerTrial(Lion([torch.nn.Parameter(torch.ones(2))]), emulated=True)
    assert not trial.watches_parameters
    with trial.resumed():
        assert trial.hyperparameters() is not None
