"""`GraphedStep(manual_optimization=True)`: functions that make their backwards and updates themselves."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils import clip_grad_norm_, clip_grad_value_
from training import CONFIG, Diary, Net, adam, adamw, batches, both, line_of, loss_of, sgd

from pygraph_train import GraphedStep, explain
from pygraph_train.problems import PyGraphError

STEPS = 45


def manual(diary: Diary, step_fn: Callable[..., Any], model: nn.Module, *optimizers: Any) -> Any:
    return diary.step(step_fn, model=model, optimizer=list(optimizers), manual_optimization=True)


class Gan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.maker = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 6))
        self.judge = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.1), nn.LeakyReLU(0.2), nn.Linear(8, 1))


def told(judge: nn.Module, x: Tensor, real: bool) -> Tensor:
    score = judge(x)
    return functional.binary_cross_entropy_with_logits(
        score, torch.ones_like(score) if real else torch.zeros_like(score)
    )


@pytest.mark.parametrize("optimizers", [adamw, sgd])
@pytest.mark.parametrize("backwards", [1, 2])
@pytest.mark.parametrize("empties", ["optimizer", "module", "late", "zeros"])
def test_a_gan(optimizers: Any, backwards: int, empties: str) -> None:
    """As the tutorials write it: backwards of the judge for real and made images, and of the maker."""

    def script(diary: Diary) -> None:
        model = Gan()
        of_maker, of_judge = optimizers(model.maker), optimizers(model.judge)
        schedule = torch.optim.lr_scheduler.ExponentialLR(of_maker, 0.98)

        def empty(part: nn.Module, optimizer: torch.optim.Optimizer) -> None:
            if empties == "module":
                part.zero_grad()
            else:
                optimizer.zero_grad(set_to_none=empties != "zeros")

        def step(real: Tensor) -> dict[str, Tensor]:
            if empties != "late":
                empty(model.judge, of_judge)
            made = model.maker(torch.randn(len(real), 4))
            first, second = told(model.judge, real, True), told(model.judge, made.detach(), False)
            if backwards == 2:
                first.backward()
                second.backward()
            else:
                (first + second).backward()
            of_judge.step()
            if empties == "late":
                of_judge.zero_grad()
            empty(model.maker, of_maker)
            loss = told(model.judge, made, True)
            loss.backward()
            of_maker.step()
            if empties == "late":
                of_judge.zero_grad()
                of_maker.zero_grad()
            return {"judge": (first + second).detach(), "maker": loss.detach()}

        step = manual(diary, step, model, of_maker, of_judge)
        for real, _ in batches(STEPS):
            diary.write("losses", step(real))
            schedule.step()
            diary.write_state(model, of_maker, of_judge)

    both(script, replays=35, plan="{F B O}")


def test_a_critic_with_several_steps_and_clipped_weights() -> None:
    def script(diary: Diary) -> None:
        model = Gan()
        of_maker, of_judge = adamw(model.maker), adamw(model.judge)

        def step(real: Tensor) -> tuple[Tensor, ...]:
            for _ in range(3):
                made = model.maker(torch.randn(len(real), 4)).detach()
                of_judge.zero_grad()
                critic = model.judge(made).mean() - model.judge(real).mean()
                critic.backward()
                norm = clip_grad_norm_(model.judge.parameters(), 0.5)
                of_judge.step()
                with torch.no_grad():
                    for p in model.judge.parameters():
                        p.clamp_(-0.1, 0.1)
            of_maker.zero_grad()
            loss = -model.judge(model.maker(torch.randn(len(real), 4))).mean()
            loss.backward()
            clip_grad_value_(model.maker.parameters(), 0.05)
            of_maker.step()
            return critic.detach(), norm, loss.detach()

        step = manual(diary, step, model, of_maker, of_judge)
        for real, _ in batches(STEPS):
            diary.write("losses", step(real))
            diary.write_state(model, of_maker, of_judge)

    both(script, replays=35, plan="{F B O}")


def test_an_actor_and_a_critic_with_targets() -> None:
    """Deep deterministic policy gradients: two losses, two optimizers, targets that follow inside of the step."""

    def script(diary: Diary) -> None:
        model = nn.ModuleDict({"actor": nn.Linear(6, 2), "critic": nn.Linear(8, 1)})
        targets = copy.deepcopy(model).requires_grad_(False)
        of_actor, of_critic = adamw(model["actor"]), adamw(model["critic"])

        def value(held: nn.ModuleDict, seen: Tensor, action: Tensor) -> Tensor:
            return held["critic"](torch.cat([seen, action], dim=-1))

        def step(seen: Tensor, action: Tensor, reward: Tensor) -> tuple[Tensor, Tensor]:
            with torch.no_grad():
                wanted = reward + 0.9 * value(targets, seen, torch.tanh(targets["actor"](seen)))
            of_critic.zero_grad()
            error = functional.mse_loss(value(model, seen, action), wanted)
            error.backward()
            of_critic.step()
            of_actor.zero_grad()
            loss = -value(model, seen, torch.tanh(model["actor"](seen))).mean()
            loss.backward()
            of_actor.step()
            with torch.no_grad():
                for target, p in zip(targets.parameters(), model.parameters(), strict=True):
                    target.lerp_(p, 0.05)
            return error, loss

        everything = nn.ModuleList([model, targets])
        step = manual(diary, step, everything, of_actor, of_critic)
        for seen, _ in batches(STEPS):
            found = step(seen, torch.randn(8, 2), torch.randn(8, 1))
            diary.write("losses", [loss.detach() for loss in found])
            diary.write_state(everything, of_actor, of_critic)

    both(script, replays=35, plan="{F B O}")


@pytest.mark.parametrize("empties", [True, False])
def test_an_update_before_the_backward(empties: bool) -> None:
    """Each step begins with the gradients that the step before has left, and leaves others."""

    def script(diary: Diary) -> None:
        model = Net()
        optimizer = sgd(model, lr=1e-3)

        def step(batch: Any) -> Tensor:
            optimizer.step()
            if empties:
                optimizer.zero_grad()
            loss = loss_of(model)(batch)
            loss.backward()
            return loss

        step = manual(diary, step, model, optimizer)
        for batch in batches(STEPS):
            diary.write("loss", step(batch))
            diary.write_state(model, optimizer)

    both(script, replays=35, plan="{F B O}")


@pytest.mark.parametrize("compiled", [False, True])
def test_one_optimizer_shapes_that_change_and_autocast(compiled: bool) -> None:
    def script(diary: Diary) -> None:
        model = Net()
        optimizer = adamw(model)

        def step(x: Tensor, y: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                loss = functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss

        step = manual(diary, step, model, optimizer)
        for index, (x, y) in enumerate(batches(60)):
            size = 8 if index % 3 else 5
            diary.write("loss", step(x[:size], y[:size]))
            diary.write_state(model, optimizer)

    both(script, replays=35, plan="{F B O}", compile=compiled)


def test_saved_and_loaded_in_the_middle_of_a_run() -> None:
    def script(diary: Diary) -> None:
        model = Net()
        optimizer = adamw(model)

        def step(batch: Any) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model)(batch)
            loss.backward()
            optimizer.step()
            return loss

        step = manual(diary, step, model, optimizer)
        for index, batch in enumerate(batches(80)):
            diary.write("loss", step(batch))
            if index == 30:
                kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            if index == 50:
                model.load_state_dict(kept[0])
                optimizer.load_state_dict(kept[1])
            diary.write_state(model, optimizer)

    both(script, replays=55, plan="{F B O}")


class Steps:
    """A step in the middle of which something is done: what, is the name of a method."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, kind: str) -> None:
        self.model, self.optimizer, self.kind = model, optimizer, kind
        self.other = sgd(model)
        self.saved = optimizer.step
        self.count = self.turn = 0

    def __call__(self, batch: Any) -> Any:
        loss = loss_of(self.model)(batch)
        if self.kind == "list":
            torch.autograd.backward([loss])
        elif self.kind == "create":
            loss.backward(create_graph=True)
        else:
            loss.backward()
        found = getattr(self, self.kind, self.plainly)()
        self.optimizer.zero_grad()
        return loss.detach(), found

    def plainly(self) -> None:
        self.optimizer.step()

    def counts(self) -> None:
        for p in self.model.parameters():
            if p.grad is not None:
                self.count += 1
        self.optimizer.step()

    def norms(self) -> float:
        total = sum(p.grad.norm().item() ** 2 for p in self.model.parameters() if p.grad is not None)
        self.optimizer.step()
        return total

    def unknown(self) -> None:
        self.other.step()

    def kept(self) -> None:
        self.saved()

    def closure(self) -> None:
        self.optimizer.step(lambda: torch.zeros(()))

    def every_other(self) -> None:
        self.turn += 1
        if self.turn % 2:
            self.optimizer.step()

    def rate(self) -> None:
        self.optimizer.step()
        self.optimizer.param_groups[0]["lr"] *= 0.99

    def frozen(self) -> None:
        for p in self.model.parameters():
            p.requires_grad_(False)
        self.optimizer.step()
        for p in self.model.parameters():
            p.requires_grad_(True)

    def finite(self) -> None:
        clip_grad_norm_(self.model.parameters(), 1.0, error_if_nonfinite=True)
        self.optimizer.step()


@pytest.mark.parametrize(
    ("kind", "reason", "line"),
    [
        ("counts", r"asks whether .*grad exists", "if p.grad is not None:"),
        ("norms", r"on the host|asks whether", "total = sum"),
        ("unknown", r"an optimizer that pygraph-train does not know", "self.other.step()"),
        ("kept", r"an optimizer that pygraph-train does not know", "self.saved()"),
        ("closure", r"it calls step\(closure\)", "self.optimizer.step(lambda"),
        ("every_other", r"turn is written", "self.turn += 1"),
        ("rate", r"param_groups\[0\] is written", 'self.optimizer.param_groups[0]["lr"] *='),
        ("frozen", r"requires_grad", "p.requires_grad_(False)"),
        ("finite", r"error_if_nonfinite=True", "clip_grad_norm_(self.model"),
        ("list", r"it calls backward\(\) that pygraph-train does not know", "torch.autograd.backward"),
        ("create", r"it calls backward\(create_graph=True\)", "loss.backward(create_graph=True)"),
    ],
)
def test_what_no_graph_can_hold_runs_as_it_is_written(kind: str, reason: str, line: str) -> None:
    def script(diary: Diary) -> None:
        model = Net()
        optimizer = adamw(model)
        steps = Steps(model, optimizer, kind)
        step = manual(diary, steps, model, optimizer)
        for batch in batches(30):
            diary.write("loss", step(batch))
            diary.write("count", steps.count)
            diary.write_state(model, optimizer)

    report = both(script, never=reason)
    assert report.steps_replayed == 0
    assert any(f.where == line_of(Steps, line) for f in report.fallbacks), str(report)


def test_an_optimizer_that_torch_cannot_capture() -> None:
    def script(diary: Diary) -> None:
        model = Net()
        optimizer = adam(model)
        step = manual(diary, Steps(model, optimizer, "plainly"), model, optimizer)
        for batch in batches(30):
            diary.write("loss", step(batch))
            diary.write_state(model, optimizer)

    both(script, never="Adam|host|capturable")


def test_an_optimizer_that_is_replaced_in_the_middle_of_a_run() -> None:
    def script(diary: Diary) -> None:
        model = Net()
        optimizer = adamw(model)
        steps = Steps(model, optimizer, "plainly")
        step = manual(diary, steps, model, optimizer)
        for index, batch in enumerate(batches(60)):
            if index == 30:
                steps.optimizer = sgd(model)
            diary.write("loss", step(batch))
            diary.write_state(model, optimizer, steps.optimizer)

    both(script, replays=20)


@pytest.mark.parametrize("at", [2, 6, 30])
def test_exceptions_leave_everything_as_it_was(at: int) -> None:
    class Wrong(Net):
        fails = False

        def forward(self, x: Tensor) -> Tensor:
            found = super().forward(x)
            if self.fails:
                raise RuntimeError("wrong")
            return found

    def script(diary: Diary) -> None:
        model = Wrong()
        optimizer = adamw(model)
        step = manual(diary, Steps(model, optimizer, "plainly"), model, optimizer)
        for index, batch in enumerate(batches(60)):
            model.fails = index == at
            try:
                diary.write("loss", step(batch))
            except RuntimeError as error:
                diary.write("error", str(error))
            diary.write_state(model, optimizer)

    both(script, replays=20)


def test_an_optimizer_outside_of_the_step() -> None:
    """What the step does not step is the loop's business."""

    def script(diary: Diary) -> None:
        model = Gan()
        of_maker, of_judge = adamw(model.maker), adamw(model.judge)

        def step(real: Tensor) -> Tensor:
            of_judge.zero_grad()
            loss = told(model.judge, real, True) + told(model.judge, model.maker(torch.randn(8, 4)), False)
            loss.backward()
            of_judge.step()
            return loss

        step = manual(diary, step, model, of_judge)
        for real, _ in batches(STEPS):
            diary.write("loss", step(real))
            diary.write_state(model, of_judge)  # before they are added to
            of_maker.step()
            of_maker.zero_grad()
            diary.write_state(model, of_judge, of_maker)

    both(script, replays=35, plan="{F B O}")


@pytest.mark.parametrize(
    ("kind", "line"),
    [
        ("plainly", None),
        ("counts", "if p.grad is not None:"),
        ("every_other", "self.turn += 1"),
        ("unknown", "self.other.step()"),
    ],
)
def test_explain_looks_at_the_whole_step(kind: str, line: str | None) -> None:
    model = Net()
    optimizer = adamw(model)
    steps = Steps(model, optimizer, kind)
    before = copy.deepcopy(model.state_dict())
    options: Any = {"model": model, "optimizer": [optimizer], "manual_optimization": True}
    graphed = GraphedStep(steps, config=CONFIG, **options)
    for found in (explain(steps, batches(1)[0], **options), explain(graphed, batches(1)[0])):
        assert [p.where for p in found.obstacles] == ([] if line is None else [line_of(Steps, line)]), str(
            found
        )
    assert not optimizer.state and all(p.grad is None for p in model.parameters())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    graphed.close()


def test_what_manual_optimization_does_not_take() -> None:
    model = Net()
    optimizer = adamw(model)
    with pytest.raises(ValueError, match="needs the optimizers that step_fn steps"):
        GraphedStep(loss_of(model), model=model, manual_optimization=True, config=CONFIG)
    for extra in ({"max_grad_norm": 1.0}, {"scaler": torch.amp.GradScaler("cpu")}):
        with pytest.raises(ValueError, match="scales and clips by itself"):
            GraphedStep(
                loss_of(model),
                model=model,
                optimizer=optimizer,
                manual_optimization=True,
                config=CONFIG,
                **extra,
            )
    step = GraphedStep(
        loss_of(model), model=model, optimizer=optimizer, manual_optimization=True, config=CONFIG
    )
    with pytest.raises(RuntimeError, match="makes its own updates"):
        step.accumulate(batches(1)[0])
    step.close()


def test_a_function_that_forgets_the_option_is_told() -> None:
    model = Net()
    optimizer = adamw(model)
    step = GraphedStep(Steps(model, optimizer, "plainly"), model=model, optimizer=optimizer, config=CONFIG)
    with pytest.raises((PyGraphError, TypeError, RuntimeError)) as raised:
        for batch in batches(10):
            step(batch)
    assert "manual_optimization=True" in str(raised.value), str(raised.value)
    step.close()
