"""A step that raises an exception: the loop goes on with what plain training has then, in Python too."""

from __future__ import annotations

import io
import random
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training import Diary, Net, adamw, batches, both, sgd

TRACED = (0, 1)  # steps that run through Dynamo's graph, with `warmup_steps=2`
REPLAYED = 9


class Counting(Net):
    """Counts its steps before and after its layers, in Python and in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.begun, self.ended, self.kept = 0, 0, []
        self.register_buffer("count", torch.zeros(()))

    def loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        self.begun += 1
        self.count += 1
        self.kept.append(batch[0].mean())
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1])
        self.ended += 1
        self.last = loss.detach()
        self.count += 10
        return loss


def spoiled(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """With a class that does not exist."""
    x, y = batch
    return x, torch.cat([y[1:], torch.tensor([7])])


def attempt(diary: Diary, step: Any, batch: Any) -> None:
    """Make a step, as a loop that leaves out batches which fail."""
    try:
        diary.write("loss", step(batch))
    except IndexError as error:
        diary.write("error", str(error))


@pytest.mark.parametrize("bad", [*TRACED, 2, REPLAYED])
def test_python_has_what_the_step_wrote_before_it_raised(bad):
    def script(diary: Diary) -> None:
        model = Counting()
        optimizer = adamw(model)
        step = diary.step(model.loss, model=model, optimizer=optimizer)
        for index, batch in enumerate(batches(16)):
            attempt(diary, step, spoiled(batch) if index == bad else batch)
            diary.write_state(model, optimizer)
            diary.write("python", [model.begun, model.ended, model.kept, getattr(model, "last", None)])
        diary.write("written", [model.begun, model.ended] == [16, 15])

    both(script, replays=9, plan="{F B O}")


@pytest.mark.parametrize("verify", ["off", "first", "always"])
@pytest.mark.parametrize("bad", [(4,), (5,), (6,), (4, 5, 6, 7), (9, 10)], ids=str)
def test_a_batch_that_fails_in_a_capture_or_a_comparison_speaks_against_no_graph(bad, verify):
    def script(diary: Diary) -> None:
        model = Counting()
        optimizer = adamw(model)
        step = diary.step(model.loss, model=model, optimizer=optimizer)
        for index, batch in enumerate(batches(20)):
            attempt(diary, step, spoiled(batch) if index in bad else batch)
            diary.write_state(model, optimizer)
            diary.write("python", [model.begun, model.ended, model.kept])

    report = both(script, replays=11, plan="{F B O}", verify=verify)
    assert not report.fallbacks, str(report)


def test_python_has_what_a_step_of_an_accumulation_wrote():
    def script(diary: Diary) -> None:
        model = Counting()
        optimizer = sgd(model)
        step = diary.step(model.loss, model=model, optimizer=optimizer, max_grad_norm=0.5)
        for index, batch in enumerate(batches(36)):
            made = step if index % 3 == 2 else step.accumulate
            attempt(diary, made, spoiled(batch) if index in (15, 19, 23, 25) else batch)
            diary.write_state(model, optimizer)
            diary.write("python", [model.begun, model.ended, model.kept])

    both(script, replays=20, plan="{F B O}")


@pytest.mark.parametrize("bad", [*TRACED, REPLAYED])
def test_a_teacher_that_is_written_in_a_list_follows_once(bad):
    def script(diary: Diary) -> None:
        model, teacher = Counting(), Net()
        optimizer = adamw(model)

        def step_fn(batch: tuple[Tensor, Tensor]) -> Tensor:
            with torch.no_grad():
                torch._foreach_lerp_(list(teacher.parameters()), list(Net.parameters(model)), 0.1)
            return model.loss(batch) + teacher(batch[0]).square().mean()

        step = diary.step(step_fn, model=model, optimizer=optimizer)
        for index, batch in enumerate(batches(16)):
            attempt(diary, step, spoiled(batch) if index == bad else batch)
            diary.write_state(model, optimizer)
            diary.write("teacher", [p.detach().clone() for p in teacher.parameters()])

    both(script, replays=9, plan="{F B O}")


@pytest.mark.parametrize("bad", [*TRACED, 5, 30, 31])
def test_random_numbers_of_the_host_are_drawn_as_far_as_the_step_came(bad):
    def script(diary: Diary) -> None:
        model = Net()
        optimizer = adamw(model)
        random.seed(3)

        def step_fn(batch: tuple[Tensor, Tensor]) -> Tensor:
            x = batch[0] * 2 if random.random() < 0.5 else batch[0]
            loss = nn.functional.cross_entropy(model(x), batch[1])
            return loss * 3 if random.random() < 0.5 else loss

        step = diary.step(step_fn, model=model, optimizer=optimizer)
        for index, batch in enumerate(batches(40)):
            attempt(diary, step, spoiled(batch) if index == bad else batch)
            diary.write_state(model, optimizer)
            diary.write("drawn", hash(random.getstate()))

    both(script, replays=15)


def wider(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """With more features than the model takes."""
    return torch.cat([batch[0], batch[0]], 1), batch[1]


@pytest.mark.parametrize(("spoil", "bad"), [(spoiled, 8), (wider, 4)])
def test_a_batch_that_fails_ends_no_regions(spoil, bad):
    """Neither where Dynamo traces anew for it, nor in a capture."""

    def script(diary: Diary) -> None:
        model = Net()
        optimizer = adamw(model)

        def step_fn(batch: tuple[Tensor, Tensor]) -> Tensor:
            found = model(batch[0])
            print(found.sum().item(), file=io.StringIO())  # one graph before, another one after it
            return nn.functional.cross_entropy(found, batch[1])

        step = diary.step(step_fn, model=model, optimizer=optimizer)
        for index, batch in enumerate(batches(60)):
            try:
                diary.write("loss", step(spoil(batch) if index == bad else batch))
            except (IndexError, RuntimeError) as error:
                diary.write("error", type(error).__name__)
            diary.write_state(model, optimizer)

    both(script, replays=190, forward="on", backward="on")
