"""Several optimizers in a plain loop: a `GraphedStep` for each, or one that makes the others' steps inside."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from training import CONFIG, Diary, adamw, batches, both

from pygraph_train import GraphedStep


def maker() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 6))


def judge() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.LeakyReLU(0.2), nn.Linear(8, 1))


def all_replayed(diary: Any, least: int, plan: str = "{F} {B} {O}") -> None:
    """Each of the steps of a graphed run ended with this plan and so many replays."""
    for step in diary.steps if diary.graphed else ():
        report = step.report()
        assert report.running_plan == plan and report.steps_replayed >= least, str(report)


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("relativistic", [True, False])
def test_a_gan_with_a_step_for_each_of_both(every: int, relativistic: bool) -> None:
    """The judge makes `every` steps for each of the maker, whose backward leaves gradients in the judge."""

    def script(diary: Diary) -> None:
        make, judges = maker(), judge()
        of_make, of_judge = adamw(make, lr=1e-3), adamw(judges, lr=1e-3)

        def judged(real: Tensor, noise: Tensor) -> Tensor:
            made = judges(make(noise).detach())
            return functional.softplus(made).mean() + functional.softplus(-judges(real)).mean()

        def made(real: Tensor, noise: Tensor) -> Tensor:
            score = judges(make(noise))
            return functional.softplus(judges(real) - score if relativistic else -score).mean()

        judge_step = diary.step(judged, model=judges, optimizer=of_judge, max_grad_norm=1.0)
        make_step = diary.step(made, model=make, optimizer=of_make)
        for index, (real, _) in enumerate(batches(40 * every)):
            noise = torch.randn(8, 4)
            diary.write("loss of the judge", judge_step(real, noise))
            if index % every == every - 1:
                diary.write("loss of the maker", make_step(real, noise))
            diary.write_state(make, of_make)
            diary.write_state(judges, of_judge)
        all_replayed(diary, 30)

    both(script, replays=30, plan="{F} {B} {O}")


def test_an_actor_two_critics_and_a_temperature() -> None:
    """As in soft actor-critic, with targets that follow between the steps."""

    def script(diary: Diary) -> None:
        actor, critics = nn.Linear(6, 4), nn.ModuleList([nn.Linear(8, 1), nn.Linear(8, 1)])
        targets = copy.deepcopy(critics).requires_grad_(False)
        temperature = nn.ParameterList([torch.zeros(1)])
        optimizers = [adamw(part) for part in (critics, actor, temperature)]

        def act(seen: Tensor) -> tuple[Tensor, Tensor]:
            mean, spread = actor(seen).chunk(2, dim=-1)
            noise = torch.randn_like(mean)
            likelihood = (-0.5 * noise.square() - spread).sum(-1, keepdim=True)
            return torch.tanh(mean + spread.clamp(-5, 2).exp() * noise), likelihood

        def value(parts: nn.ModuleList, seen: Tensor, action: Tensor) -> list[Tensor]:
            return [part(torch.cat([seen, action], dim=-1)) for part in parts]

        def criticised(seen: Tensor, action: Tensor, reward: Tensor, later: Tensor) -> Tensor:
            with torch.no_grad():
                following, likelihood = act(later)
                best = torch.min(*value(targets, later, following)) - temperature[0].exp() * likelihood
            one, two = value(critics, seen, action)
            expected = reward + 0.99 * best
            return functional.mse_loss(one, expected) + functional.mse_loss(two, expected)

        def acted(seen: Tensor) -> dict[str, Tensor]:
            action, likelihood = act(seen)
            worst = torch.min(*value(critics, seen, action))
            loss = (temperature[0].exp().detach() * likelihood - worst).mean()
            return {"loss": loss, "likelihood": likelihood.detach()}

        def warmed(likelihood: Tensor) -> Tensor:
            return -(temperature[0] * (likelihood + 2)).mean()

        critic_step = diary.step(criticised, model=critics, optimizer=optimizers[0])
        actor_step = diary.step(acted, model=actor, optimizer=optimizers[1])
        temperature_step = diary.step(warmed, model=temperature, optimizer=optimizers[2])
        for seen, _ in batches(40):
            diary.write("critics", critic_step(seen, torch.randn(8, 2), torch.randn(8, 1), seen.flip(0)))
            found = actor_step(seen)
            diary.write("actor", found)
            diary.write("temperature", temperature_step(found["likelihood"]))
            with torch.no_grad():
                for target, critic in zip(targets.parameters(), critics.parameters(), strict=True):
                    target.lerp_(critic, 0.005)
            diary.write_state(nn.ModuleList([actor, critics, temperature, targets]), *optimizers)
        all_replayed(diary, 30)

    both(script, replays=30, plan="{F} {B} {O}")


def parts_and_optimizers() -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    first = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 6))
    second = judge()
    model = nn.Sequential(first, second)
    sgd = torch.optim.SGD(second.parameters(), lr=0.1, momentum=0.9, fused=True)
    return model, [adamw(first, lr=1e-2), sgd]


@pytest.mark.parametrize("options", [{}, {"max_grad_norm": 0.1}], ids=str)
@pytest.mark.parametrize("every", [1, 3])
def test_one_step_of_several_optimizers(options: dict[str, Any], every: int) -> None:
    def script(diary: Diary) -> None:
        model, optimizers = parts_and_optimizers()
        schedules = [torch.optim.lr_scheduler.ExponentialLR(o, 0.95) for o in optimizers]
        step = diary.step(
            lambda x, y: functional.cross_entropy(model[0](x), y) + model(x).square().mean(),
            model=model,
            optimizer=optimizers,
            **options,
        )
        for index, (x, y) in enumerate(batches(40 * every)):
            if index % every < every - 1:
                diary.write("loss", step.accumulate(x, y))
                continue
            diary.write("loss", step(x, y))
            for schedule in schedules:
                schedule.step()
            diary.write_state(model, *optimizers)

    both(script, replays=30, plan="{F} {B} {O}")


@pytest.mark.parametrize("change", ["betas", "momentum", "state", "loaded", "frozen", "hook"])
def test_what_changes_of_one_of_several_optimizers(change: str) -> None:
    def script(diary: Diary) -> None:
        model, (first, second) = parts_and_optimizers()
        step = diary.step(lambda x, y: model(x).square().mean(), model=model, optimizer=[first, second])
        saved = copy.deepcopy(second.state_dict())
        for index, (x, y) in enumerate(batches(60)):
            if index == 30 and change == "betas":
                first.param_groups[0]["betas"] = (0.5, 0.9)
            elif index == 30 and change == "momentum":
                second.param_groups[0]["momentum"] = 0.5
            elif index == 30 and change == "state":
                first.state.clear()
            elif index == 30 and change == "loaded":
                second.load_state_dict(saved)
            elif index == 30 and change == "frozen":
                model[1][0].requires_grad_(False)
            elif index == 30 and change == "hook":
                second.register_step_pre_hook(lambda optimizer, args, kwargs: halve(model[1]))
            diary.write("loss", step(x, y))
            diary.write_state(model, first, second)

    both(script, replays=20)


def halve(module: nn.Module) -> None:
    for p in module.parameters():
        if p.grad is not None:
            p.grad.mul_(0.5)


def test_what_is_no_list_of_optimizers_is_refused_in_one_sentence() -> None:
    model = judge()

    def made(given: Any, **options: Any) -> None:
        GraphedStep(lambda x: model(x).mean(), model=model, optimizer=given, config=CONFIG, **options)

    for given in (model, [model], []):
        with pytest.raises(TypeError, match="steps an optimizer, or a list of optimizers"):
            made(given)
    with pytest.raises(ValueError, match="two of the optimizers hold the same parameter"):
        made([adamw(model), adamw(model)])
    with pytest.raises(ValueError, match="a GradScaler steps one optimizer"):
        made([adamw(model), adamw(maker())], scaler=torch.amp.GradScaler("cpu"))
