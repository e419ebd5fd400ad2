"""`p.data = ...` inside a step: after each replay the tensor has the values of plain training."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from replays import text_of
from torch import Tensor, nn
from training import Diary, Net, batches, both, line_of, sgd


class Pair(nn.Module):
    """A student that learns, and a teacher that follows it."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.Linear(6, 3)
        self.teacher = nn.Linear(6, 3).requires_grad_(False)
        self.register_buffer("mean", torch.zeros(3))

    def follow(self) -> None:
        with torch.no_grad():
            for s, t in zip(self.student.parameters(), self.teacher.parameters(), strict=True):
                t.data = t.data * 0.9 + s.data * 0.1


def distance(pair: Pair, batch: tuple[Tensor, Tensor]) -> Tensor:
    x, y = batch
    apart = nn.functional.mse_loss(pair.student(x), pair.teacher(x))
    return nn.functional.cross_entropy(pair.student(x), y) + apart


def train(
    step_of: Any, between: Any = lambda diary, pair, index: None, *, steps: int = 36, **config: Any
) -> Any:
    def script(diary: Diary) -> None:
        pair = Pair()
        optimizer = sgd(pair.student)
        step = diary.step(step_of(pair), model=pair, optimizer=optimizer)
        for index, batch in enumerate(batches(steps)):
            between(diary, pair, index)
            diary.write("loss", step(batch))
            diary.write_state(pair, optimizer)

    return both(script, **config)


def _moco(pair: Pair) -> Any:
    def step_fn(batch: Any) -> Tensor:
        pair.follow()
        return distance(pair, batch)

    return step_fn


def _moco_at_the_end(pair: Pair) -> Any:
    def step_fn(batch: Any) -> Tensor:
        loss = distance(pair, batch)
        pair.follow()
        return loss

    return step_fn


def _clipped(pair: Pair) -> Any:
    def step_fn(batch: Any) -> Tensor:
        for p in pair.student.parameters():
            p.data = p.data.clamp(-0.2, 0.2)
        return distance(pair, batch)

    return step_fn


def _clipped_in_place(pair: Pair) -> Any:
    def step_fn(batch: Any) -> Tensor:
        for p in pair.student.parameters():
            p.data.mul_(0.99).clamp_(-0.2, 0.2)
        return distance(pair, batch)

    return step_fn


def _buffer(pair: Pair) -> Any:
    def step_fn(batch: Any) -> Tensor:
        loss = distance(pair, batch)
        pair.mean.data = 0.9 * pair.mean + 0.1 * pair.student(batch[0]).detach().mean(0)
        return loss + pair.mean.sum()

    return step_fn


def _old_view_is_read(pair: Pair) -> Any:
    def step_fn(batch: Any) -> Tensor:
        before = pair.teacher.weight.data.t()
        pair.follow()
        return distance(pair, batch) + (batch[0] @ before).mean() + (pair.student.weight @ before).mean()

    return step_fn


@pytest.mark.slow_after(3)
@pytest.mark.parametrize(
    "step_of", [_moco, _moco_at_the_end, _clipped, _clipped_in_place, _buffer, _old_view_is_read]
)
def test_tensors_that_the_step_rebinds_are_replayed(step_of: Any) -> None:
    train(step_of, replays=20, plan="{F B O}")


@pytest.mark.parametrize("fuse", ["auto", "off"])
def test_a_parameter_keeps_the_node_that_adds_to_its_gradient(fuse: str) -> None:
    nodes: list[Any] = []

    def between(diary: Diary, pair: Pair, index: int) -> None:
        if index == 0:
            nodes[:] = [torch.autograd.graph.get_gradient_edge(pair.student.weight).node]
        if index in (20, 21):
            handle = nodes[0].register_hook(lambda *_: diary.write("called", True))
            nodes.append(handle)
        if index == 23:
            nodes.pop().remove()
            nodes.pop().remove()

    train(_clipped, between, steps=50, fuse=fuse, replays=20)


def test_weights_kept_between_steps_keep_their_values() -> None:
    kept: list[Any] = []

    def between(diary: Diary, pair: Pair, index: int) -> None:
        if index == 0:
            kept.clear()
        if index in (12, 13, 24):
            kept.append(pair.teacher.weight.detach())  # shares the memory, as state_dict() does
        if index == 20:
            kept.pop(0)
        diary.write("kept", kept)

    report = train(_moco, between, replays=15)
    assert report.steps_replayed >= 15, str(report)


def test_a_teacher_that_the_loop_changes_in_between() -> None:
    def between(diary: Diary, pair: Pair, index: int) -> None:
        if index == 10:
            pair.teacher.load_state_dict(pair.student.state_dict())
        if index == 14:
            pair.teacher.weight.data.mul_(0.5)
        if index == 18:
            pair.teacher.weight.data = pair.teacher.weight.data.clone()
        if index == 22:
            pair.teacher.weight.data = pair.teacher.weight.data.t().contiguous().t()

    report = train(_moco, between, replays=15)
    assert report.steps_replayed >= 15, str(report)


def _shares_the_students_memory(pair: Pair) -> Any:
    def step_fn(batch: Any) -> Tensor:
        loss = distance(pair, batch)
        pair.teacher.weight.data = pair.student.weight.data  # and follows it from now on
        return loss

    return step_fn


def test_a_tensor_that_gets_another_ones_memory() -> None:
    report = train(_shares_the_students_memory, replays=60)
    assert report.steps_replayed == 0 and report.plan == "{F} {B} {O}", str(report)
    assert "memory that another tensor uses as well" in text_of(report)


def _grows(pair: Pair) -> Any:
    def step_fn(batch: Any) -> Tensor:
        loss = distance(pair, batch)
        pair.mean.data = torch.cat([pair.mean, loss.detach()[None]])
        return loss

    return step_fn


def test_a_tensor_that_gets_another_shape() -> None:
    report = train(_grows, replays=80)
    assert report.steps_replayed == 0, str(report)


def test_a_batch_that_is_changed_through_its_data() -> None:
    def script(diary: Diary) -> None:
        model = Net()

        def step_fn(batch: Any) -> Tensor:
            batch[0].data.mul_(0.9)
            return nn.functional.cross_entropy(model(batch[0]), batch[1])

        step = diary.step(step_fn, model=model, optimizer=sgd(model))
        kept = batches(6)
        for batch in kept * 4:
            diary.write("loss", step(batch))
        diary.write("batches", kept)

    report = both(script, replays=35)
    assert report.steps_replayed == 0, str(report)
    assert report.fallbacks[0].reason.startswith("batch[0]: the step changes its batch")
    assert report.fallbacks[0].where == line_of(test_a_batch_that_is_changed_through_its_data, ".data.mul_")
