"""Tensors that the loop gives other memory, or replaces, between steps: graphs go on, with the present values."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from replays import text_of
from torch import Tensor, nn
from training import Diary, Net, adamw, batches, both, loss_of, sgd

STEPS = 40


def train(step_of: Any, between: Any, make: Any = Net, *, optimizer: Any = sgd, **config: Any) -> Any:
    """Train with `between(model, index, diary)` before each step; everything must be as in plain training."""

    def script(diary: Diary) -> None:
        model = make()
        opt = optimizer(model)
        step = diary.step(step_of(model), model=model, optimizer=opt)
        for index, batch in enumerate(batches(STEPS)):
            between(model, index, diary)
            diary.write("loss", step(batch))
            diary.write_state(model, opt)

    return both(script, **config)


class Teacher(nn.Module):
    """A student, and a teacher beside it that the loop moves."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Linear(6, 3)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.temperature = torch.tensor(0.5)

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x, y = batch
        apart = nn.functional.mse_loss(self.student(x), self.teacher(x))
        return nn.functional.cross_entropy(self.student(x), y) + self.temperature * apart


def _of_teacher(model: Any) -> Any:
    return lambda batch: model.loss(batch)


def _follow(model: Any, index: int, diary: Diary) -> None:
    for q, p in zip(model.teacher.parameters(), model.student.parameters(), strict=True):
        q.data = 0.9 * q.data + 0.1 * p.data


def _clip(model: Any, index: int, diary: Diary) -> None:
    for p in model.parameters():
        p.data = p.data.clamp(-0.2, 0.2)


def captures_of(report: Any) -> int:
    return len(report.captures)


def test_a_teacher_that_the_loop_assigns_is_brought_home() -> None:
    report = train(_of_teacher, _follow, Teacher, replays=25, plan="{F B O}")
    assert captures_of(report) <= 2, str(report)


@pytest.mark.parametrize("optimizer", [sgd, adamw])
def test_weights_that_the_loop_clips_through_their_data_are_brought_home(optimizer: Any) -> None:
    report = train(loss_of, _clip, optimizer=optimizer, replays=25, plan="{F B O}")
    assert captures_of(report) <= 2, str(report)


def test_a_number_in_a_tensor_that_is_replaced_now_and_then_is_loaded() -> None:
    def anneal(model: Any, index: int, diary: Diary) -> None:
        if index % 3 == 0:
            model.temperature = torch.tensor(0.5 / (1 + index))

    report = train(_of_teacher, anneal, Teacher, replays=20, plan="{F B O}")
    assert captures_of(report) <= 3, str(report)


def test_a_batch_in_a_closure_is_loaded() -> None:
    held: dict[str, Tensor] = {}

    def step_of(model: Any) -> Any:
        return lambda batch: (
            loss_of(model)(batch) + nn.functional.mse_loss(model(held["other"]), torch.ones(8, 3))
        )

    def between(model: Any, index: int, diary: Diary) -> None:
        held["other"] = torch.randn(8, 6, generator=torch.Generator().manual_seed(index))

    report = train(step_of, between, replays=20, plan="{F B O}")
    assert captures_of(report) <= 3, str(report)


def test_a_teacher_whose_old_memory_somebody_holds_keeps_those_values() -> None:
    def between(model: Any, index: int, diary: Diary) -> None:
        before = model.teacher.weight.data
        _follow(model, index, diary)
        diary.write("the old weight", before)
        held.append((before, before.clone()))
        for old, copied in held[-3:]:
            assert torch.equal(old, copied)

    held: list[tuple[Tensor, Tensor]] = []
    train(_of_teacher, between, Teacher, replays=20)


def test_a_teacher_that_shares_the_students_memory_from_time_to_time() -> None:
    def between(model: Any, index: int, diary: Diary) -> None:
        if index % 5 == 0:  # it follows the student's updates for these steps
            model.teacher.weight.data = model.student.weight.data
        elif index % 5 == 2:
            model.teacher.weight.data = model.teacher.weight.data.clone()

    train(_of_teacher, between, Teacher, replays=10)


def test_a_tensor_that_becomes_a_view_of_a_weight_shows_its_updates() -> None:
    held: dict[str, Tensor] = {"row": torch.ones(6)}

    def step_of(model: Any) -> Any:
        return lambda batch: loss_of(model)(batch) + held["row"].sum() * 0.1 * model.head.bias.sum()

    def between(model: Any, index: int, diary: Diary) -> None:
        held["row"] = torch.full((6,), float(index))
        if index % 7 == 6:
            held["row"] = next(model.parameters()).data.view(-1)[:6]

    train(step_of, between, Row, replays=10)


class Row(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).relu())


def test_a_replaced_tensor_that_the_step_changes_is_not_loaded() -> None:
    held: dict[str, Tensor] = {"sum": torch.zeros(3)}

    def step_of(model: Any) -> Any:
        held["sum"] = torch.zeros(3)

        def step(batch: Any) -> Tensor:
            held["sum"].add_(model(batch[0]).detach().sum(0))
            return loss_of(model)(batch) + held["sum"].mean()

        return step

    def between(model: Any, index: int, diary: Diary) -> None:
        diary.write("sum", held["sum"])
        held["sum"] = torch.zeros(3)

    report = train(step_of, between, replays=4)
    assert "lives at a new address again and again" in text_of(report)


def test_a_replaced_tensor_that_the_step_returns_is_not_loaded() -> None:
    held: dict[str, Tensor] = {}

    def step_of(model: Any) -> Any:
        return lambda batch: {"loss": loss_of(model)(batch) + held["x"].mean(), "x": held["x"][:2]}

    def between(model: Any, index: int, diary: Diary) -> None:
        held["x"] = torch.full((4,), float(index))

    report = train(step_of, between, replays=4)
    assert "lives at a new address again and again" in text_of(report)


def test_running_statistics_that_are_replaced_are_not_loaded() -> None:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))

    def between(model: Any, index: int, diary: Diary) -> None:
        model[1].running_mean = torch.full((8,), 0.1 * index)

    report = train(loss_of, between, make, replays=4)
    assert "lives at a new address again and again" in text_of(report)


def test_a_replaced_tensor_of_another_shape_or_alignment() -> None:
    held: dict[str, Tensor] = {}

    def step_of(model: Any) -> Any:
        return lambda batch: loss_of(model)(batch) + (held["x"] * 0.1).mean() * next(model.parameters()).sum()

    def between(model: Any, index: int, diary: Diary) -> None:
        held["x"] = torch.randn(9 if index > 30 else 8, generator=torch.Generator().manual_seed(index))
        if index % 10 == 9:
            held["x"] = held["x"][1:]

    train(step_of, between, replays=6)


def test_two_kinds_of_steps_share_a_tensor_that_moves() -> None:
    def script(diary: Diary) -> None:
        model = Teacher()
        opt = sgd(model.student)
        step = diary.step(_of_teacher(model), model=model, optimizer=opt)
        for index, (x, y) in enumerate(batches(80)):
            _follow(model, index, diary)
            cut = 5 if index % 4 == 3 else 8
            diary.write("loss", step((x[:cut], y[:cut])))
            diary.write_state(model, opt)

    both(script, replays=50)


def test_a_moved_weight_with_accumulation() -> None:
    def script(diary: Diary) -> None:
        model = Net()
        opt = sgd(model)
        step = diary.step(loss_of(model), model=model, optimizer=opt)
        for index, batch in enumerate(batches(80)):
            if index % 4 == 1:  # in the middle of an accumulation
                _clip(model, index, diary)
            diary.write("loss", (step if index % 2 else step.accumulate)(batch))
            diary.write_state(model, opt)

    both(script, replays=50)


def test_a_row_names_what_moves_and_cannot_be_followed() -> None:
    held: list[Tensor] = []

    def between(model: Any, index: int, diary: Diary) -> None:
        for p in model.parameters():
            p.data = p.data.clone()
            held.append(p.data)  # somebody holds all of its memory

    report = train(loss_of, between, replays=4)
    assert "lives at a new address again and again" in text_of(report)
    assert "keep no views of it" in text_of(report)


def _halve_moments(optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        for key in state.keys() - {"step"}:
            state[key].data = state[key].data * 0.5


def _begin_moments_anew(optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        for key in state.keys() - {"step"}:
            state[key].set_(torch.zeros_like(state[key]))


def _halve_rate(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        group["lr"].data = group["lr"].data * 0.5


@pytest.mark.parametrize(
    "config", [{"plan": "{F B O}"}, {"forward": "off", "backward": "off", "plan": "F B {O}"}]
)
@pytest.mark.parametrize("optimizer", [adamw, sgd])
@pytest.mark.parametrize("change", [_halve_moments, _begin_moments_anew, _halve_rate])
def test_what_the_optimizer_holds_gets_other_memory(change: Any, optimizer: Any, config: Any) -> None:
    """As if its state had been away in the memory of the host: it is another block of memory afterwards."""

    def script(diary: Diary) -> None:
        model = Net()
        opt = optimizer(model, lr=torch.tensor(1e-2))
        step = diary.step(loss_of(model), model=model, optimizer=opt)
        for index, batch in enumerate(batches(STEPS)):
            if index in (20, 25):
                change(opt)
            diary.write("loss", step(batch))
            diary.write_state(model, opt)

    both(script, replays=20, **config)
