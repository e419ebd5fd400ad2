"""Steps in which several models take part and one trains: the others are part of the whole step's graph."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from training import Diary, Net, adamw, batches, both, sgd
from training import replayed as whole_steps

pytestmark = pytest.mark.quick

STEPS = 35


# -- what is trained --------------------------------------------------------------------------------------


class Features(nn.Module):
    """Two layers of features, for a loss that compares them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.norm = nn.BatchNorm1d(8)
        self.second = nn.Linear(8, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = torch.relu(self.norm(self.first(x)))
        return h, self.second(h)


def matching(student: Tensor, teacher: Tensor) -> Tensor:
    """What a student loses where it differs from its teacher."""
    soft, target = functional.log_softmax(student / 2, dim=-1), functional.softmax(teacher / 2, dim=-1)
    return functional.kl_div(soft, target, reduction="batchmean")


def distillation(student: nn.Module, teacher: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        target = teacher(x)
    out = student(x)
    return functional.cross_entropy(out, y) + matching(out, target)


def distillation_with_gradients(student: nn.Module, teacher: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Somebody forgot `torch.no_grad()`."""
    out = student(x)
    return functional.cross_entropy(out, y) + matching(out, teacher(x))


def preference(policy: nn.Module, reference: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """As in DPO: `y` is preferred to another answer."""

    def likelihood(model: nn.Module, answer: Tensor) -> Tensor:
        return functional.log_softmax(model(x), dim=-1).gather(1, answer[:, None]).squeeze(1)

    worse = (y + 1) % 3
    with torch.no_grad():
        better_before, worse_before = likelihood(reference, y), likelihood(reference, worse)
    margin = likelihood(policy, y) - better_before - likelihood(policy, worse) + worse_before
    return -functional.logsigmoid(0.1 * margin).mean()


def perceptual(maker: nn.Module, judge: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    """Gradients go through the frozen model."""
    made = maker(x)
    pairs = zip(judge(made), judge(x), strict=True)
    return functional.mse_loss(made, x) + sum(functional.l1_loss(a, b) for a, b in pairs)


Loss = Callable[[nn.Module, nn.Module, Tensor, Tensor], Tensor]


def models(loss: Loss, state: str) -> tuple[nn.Module, nn.Module]:
    """The model that trains and the other one."""
    if loss is perceptual:
        trains, other = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)), Features()
    else:
        trains, other = Net(), Net()
    if loss is preference:
        other.load_state_dict(trains.state_dict())
    if "eval" in state:
        other.eval()
    if "frozen" in state:
        other.requires_grad_(False)
    return trains, other


LOSSES = pytest.mark.parametrize(
    "loss",
    [distillation, distillation_with_gradients, preference, perceptual],
    ids=lambda loss: loss.__name__,
)
STATES = pytest.mark.parametrize("state", ["frozen, eval", "frozen, train", "trainable, eval"])


# -- four loops -------------------------------------------------------------------------------------------


@LOSSES
@STATES
def test_a_graphed_step_holds_both_models(loss: Loss, state: str) -> None:
    def script(diary: Diary) -> None:
        trains, other = models(loss, state)
        optimizer = adamw(trains)
        step = diary.step(
            lambda batch: loss(trains, other, *batch), model=trains, optimizer=optimizer, max_grad_norm=1.0
        )
        for batch in batches(STEPS):
            diary.write("loss", step(batch))
        diary.write_state(trains, optimizer)
        diary.write_state(other)

    whole_steps(both(script, replays=30), least=30)


@LOSSES
@STATES
def test_a_graphed_step_of_accelerate_holds_both_models(loss: Loss, state: str) -> None:
    pytest.importorskip("accelerate")
    from accelerate_training import Script
    from accelerate_training import both as both_of_accelerate

    def script(script: Script) -> None:
        accelerator = script.accelerator
        trains, other = models(loss, state)
        optimizer: Any = adamw(trains)
        trains, other, optimizer = accelerator.prepare(trains, other, optimizer)

        @script.graphed
        def step(x: Tensor, y: Tensor) -> Tensor:
            found = loss(trains, other, x, y)
            accelerator.backward(found)
            accelerator.clip_grad_norm_(trains.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            return found

        for batch in batches(STEPS):
            script.write("loss", step(*batch))
        script.write_state(trains, optimizer)
        script.write_state(other, optimizer)

    ((_, step),) = both_of_accelerate(script, replays=30).whole_steps.items()
    assert step.plan == "{F B O}" and step.steps_replayed >= 30, str(step)


@LOSSES
@STATES
def test_a_graphed_step_of_fabric_holds_both_models(loss: Loss, state: str) -> None:
    pytest.importorskip("lightning.fabric")
    from fabric_training import Script
    from fabric_training import both as both_of_fabric

    def script(script: Script) -> None:
        trains, other = models(loss, state)
        model, optimizer = script.fabric.setup(trains, adamw(trains))
        judge = script.fabric.setup_module(other)
        judge.train(other.training)

        def found(x: Tensor, y: Tensor) -> Tensor:
            return loss(model, judge, x, y)

        step = script.whole(found, model, optimizer, max_norm=1.0, error_if_nonfinite=False)
        for batch in batches(STEPS):
            script.write("loss", step(*batch))
        script.write_state(model, optimizer)
        script.write_state(judge)

    ((_, step),) = both_of_fabric(script, replays=30).whole_steps.items()
    assert step.plan == "{F B O}" and step.steps_replayed >= 30, str(step)


@LOSSES
@STATES
@pytest.mark.parametrize("part", [True, False], ids=["a part of the module", "in a list"])
def test_a_step_of_lightning_holds_both_models(loss: Loss, state: str, part: bool) -> None:
    pytest.importorskip("lightning.pytorch")
    from lightning_training import Module, parity

    class Two(Module):
        """One that trains and another, which its checkpoints hold or do not."""

        def __init__(self) -> None:
            super().__init__()
            self.net, other = models(loss, state)
            if part:
                self.other = other
            self.others = [other]

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            found = loss(self.net, self.others[0], *batch)
            self.log("loss", found, prog_bar=True, on_step=True, on_epoch=True)
            return found

        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", loss(self.net, self.others[0], *batch))

        def configure_optimizers(self) -> Any:
            return adamw(self.net)

    plain, graphed = parity(Two, validate=True, replays=36, plan="{F B O}")
    kept = [[p.grad for p in fit.module.others[0].parameters()] for fit in (plain, graphed)]
    assert all((a is None and b is None) or torch.equal(a, b) for a, b in zip(*kept, strict=True))


# -- teachers that follow their students inside of the step --------------------------------------------------


def multiplied(teacher: Tensor, student: Tensor) -> None:
    teacher.mul_(0.9).add_(student, alpha=0.1)


def interpolated(teacher: Tensor, student: Tensor) -> None:
    teacher.lerp_(student, 0.1)


def through_data(teacher: Tensor, student: Tensor) -> None:
    teacher.data.mul_(0.9).add_(student.data, alpha=0.1)


def given_other_memory(teacher: Tensor, student: Tensor) -> None:
    teacher.data = teacher.data * 0.9 + student.data * 0.1


def copied(teacher: Tensor, student: Tensor) -> None:
    teacher.copy_(teacher * 0.9 + student * 0.1)


def one_by_one(change: Callable[[Tensor, Tensor], None]) -> Callable[[list[Tensor], list[Tensor]], None]:
    def follow(teacher: list[Tensor], student: list[Tensor]) -> None:
        for mine, theirs in zip(teacher, student, strict=True):
            change(mine, theirs)

    return follow


def all_at_once(teacher: list[Tensor], student: list[Tensor]) -> None:
    torch._foreach_mul_(teacher, 0.9)
    torch._foreach_add_(teacher, student, alpha=0.1)


def all_interpolated(teacher: list[Tensor], student: list[Tensor]) -> None:
    torch._foreach_lerp_(teacher, student, 0.1)


def through_views(teacher: list[Tensor], student: list[Tensor]) -> None:
    torch._foreach_lerp_([mine.view(-1) for mine in teacher], [theirs.view(-1) for theirs in student], 0.1)


def through_data_of_lists(teacher: list[Tensor], student: list[Tensor]) -> None:
    torch._foreach_lerp_([mine.data for mine in teacher], [theirs.data for theirs in student], 0.1)


def into_parts(teacher: list[Tensor], student: list[Tensor]) -> None:
    for mine, theirs in zip(teacher, student, strict=True):
        mine.detach()[0:1].add_(theirs[0:1], alpha=0.1)


def as_an_output(teacher: Tensor, student: Tensor) -> None:
    torch.lerp(teacher, student, 0.1, out=teacher)


def with_an_index(teacher: Tensor, student: Tensor) -> None:
    teacher[...] = teacher * 0.9 + student * 0.1


with_library = torch.library.Library("several_models", "DEF")
with_library.define("follow(Tensor student, Tensor(a!) teacher) -> ()")
with_library.define("follow_all(Tensor[] student, Tensor(a!)[] teacher) -> ()")


@torch.library.impl(with_library, "follow", "CompositeExplicitAutograd")
def _follow(student: Tensor, teacher: Tensor) -> None:
    teacher.data.lerp_(student, 0.1)


@torch.library.impl(with_library, "follow_all", "CompositeExplicitAutograd")
def _follow_all(student: list[Tensor], teacher: list[Tensor]) -> None:
    for mine, theirs in zip(teacher, student, strict=True):
        mine.data.lerp_(theirs, 0.1)


@torch.library.register_fake("several_models::follow", lib=with_library)
def _(student: Tensor, teacher: Tensor) -> None:
    return None


@torch.library.register_fake("several_models::follow_all", lib=with_library)
def _(student: list[Tensor], teacher: list[Tensor]) -> None:
    return None


def by_an_operator(teacher: Tensor, student: Tensor) -> None:
    torch.ops.several_models.follow(student, teacher)


def by_an_operator_of_lists(teacher: list[Tensor], student: list[Tensor]) -> None:
    torch.ops.several_models.follow_all(student, teacher)


def by_an_operator_of_data(teacher: Tensor, student: Tensor) -> None:
    torch.ops.several_models.follow(student, teacher.data)


FOLLOW = {
    **{
        f.__name__: one_by_one(f)
        for f in (
            *(multiplied, interpolated, through_data, given_other_memory, copied),
            *(as_an_output, with_an_index, by_an_operator, by_an_operator_of_data),
        )
    },
    "all_at_once": all_at_once,
    "all_interpolated": all_interpolated,
    "through_views": through_views,
    "through_data_of_lists": through_data_of_lists,
    "into_parts": into_parts,
    "by_an_operator_of_lists": by_an_operator_of_lists,
}


@pytest.mark.parametrize("how", FOLLOW)
@pytest.mark.parametrize("when", ["before the loss", "after the loss"])
def test_a_teacher_that_follows_its_student_inside_of_the_step(how: str, when: str) -> None:
    def script(diary: Diary) -> None:
        student = Net()
        teacher = copy.deepcopy(student).requires_grad_(False)
        optimizer = adamw(student)

        @torch.no_grad()
        def follow() -> None:
            FOLLOW[how](list(teacher.parameters()), list(student.parameters()))
            for mine, theirs in zip(teacher.buffers(), student.buffers(), strict=True):
                mine.copy_(theirs)

        def loss(batch: tuple[Tensor, Tensor]) -> Tensor:
            if when == "before the loss":
                follow()
            found = distillation(student, teacher, *batch)
            if when == "after the loss":
                follow()
            return found

        step = diary.step(loss, model=student, optimizer=optimizer)
        for batch in batches(STEPS):
            diary.write("loss", step(batch))
            diary.write("teacher", teacher.state_dict())
        diary.write_state(student, optimizer)

    whole_steps(both(script, replays=30), least=30)


def test_a_queue_of_keys_that_the_step_fills() -> None:
    """As in MoCo: a key network that follows, and a queue of its results in a buffer."""

    class Contrast(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.query = Net()
            self.key = copy.deepcopy(self.query).requires_grad_(False)
            self.register_buffer("queue", functional.normalize(torch.randn(3, 32), dim=0))
            self.register_buffer("place", torch.zeros((), dtype=torch.long))

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                one_by_one(multiplied)(list(self.key.parameters()), list(self.query.parameters()))
                key = functional.normalize(self.key(x), dim=1)
            query = functional.normalize(self.query(x), dim=1)
            others = query @ self.queue.clone()
            scores = torch.cat([(query * key).sum(1, keepdim=True), others], dim=1) / 0.1
            with torch.no_grad():
                self.queue[:, (self.place + torch.arange(len(x))) % 32] = key.T
                self.place.add_(len(x)).remainder_(32)
            return functional.cross_entropy(scores, torch.zeros(len(x), dtype=torch.long))

    def script(diary: Diary) -> None:
        model = Contrast()
        optimizer = sgd(model)
        step = diary.step(model, model=model, optimizer=optimizer)
        for x, _ in batches(STEPS):
            diary.write("loss", step(x))
        diary.write_state(model, optimizer)

    whole_steps(both(script, replays=30), least=30)


def test_a_teacher_that_becomes_another_one_in_mid_run() -> None:
    def script(diary: Diary) -> None:
        student, teachers = Net(), [Net().eval().requires_grad_(False)]
        optimizer = adamw(student)
        step = diary.step(
            lambda batch: distillation(student, teachers[0], *batch), model=student, optimizer=optimizer
        )
        for index, batch in enumerate(batches(50)):
            if index == 20:
                teachers[0] = copy.deepcopy(student).eval().requires_grad_(False)
            if index == 35:
                teachers[0].load_state_dict(student.state_dict())
            diary.write("loss", step(batch))
        diary.write_state(student, optimizer)

    whole_steps(both(script, replays=40), least=40)
