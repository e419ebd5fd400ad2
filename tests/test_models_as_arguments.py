"""A step may take its model as an argument: `step(model, batch)`. It is what it would be in a closure."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from training import Diary, both

from pygraph_train import explain


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.2), nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


def loss_of(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(model(x), y)


def adamw(*models: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([p for model in models for p in model.parameters()], lr=1e-2, fused=True)


def batch() -> tuple[Tensor, Tensor]:
    return torch.randn(5, 6), torch.randint(0, 3, (5,))


def _positional(model: Model) -> Any:
    return lambda m, x, y: loss_of(m, x, y), lambda x, y: ((model, x, y), {})


def _by_name(model: Model) -> Any:
    return lambda x, *, net, y: loss_of(net, x, y), lambda x, y: ((x,), {"net": model, "y": y})


def _in_a_dict(model: Model) -> Any:
    return lambda b: loss_of(b["model"], *b["pair"]), lambda x, y: (({"model": model, "pair": (x, y)},), {})


def _twice(model: Model) -> Any:
    return lambda a, b, x, y: loss_of(a, x, y) + loss_of(b, x + 1, y), lambda x, y: ((model, model, x, y), {})


@pytest.mark.quick
@pytest.mark.parametrize("way", [_positional, _by_name, _in_a_dict, _twice])
def test_a_model_among_the_arguments_is_replayed(way: Any) -> None:
    def script(diary: Diary) -> None:
        model = Model()
        fn, call = way(model)
        step = diary.step(fn, model=model, optimizer=adamw(model))
        for _ in range(30):
            args, kwargs = call(*batch())
            diary.write("loss", step(*args, **kwargs))
        diary.write_state(model)

    both(script, replays=20, plan="{F B O}")


def test_two_models_that_take_turns_are_told_apart() -> None:
    def script(diary: Diary) -> None:
        models = nn.ModuleList([Model(), Model()])
        optimizer = adamw(*models)
        step = diary.step(lambda m, x, y: loss_of(m, x, y), model=models, optimizer=optimizer)
        for index in range(60):
            diary.write("loss", step(models[index % 2], *batch()))
            diary.write_state(models)

    both(script, replays=20)


def test_a_model_that_is_exchanged_is_noticed() -> None:
    def script(diary: Diary) -> None:
        model, teacher, other = Model(), Model().requires_grad_(False), Model().requires_grad_(False)

        def fn(m: nn.Module, t: nn.Module, x: Tensor, y: Tensor) -> Tensor:
            return loss_of(m, x, y) + F.mse_loss(m(x), t(x))

        step = diary.step(fn, model=model, optimizer=adamw(model))
        for index in range(60):
            teacher = other if index == 30 else teacher
            diary.write("loss", step(model, teacher, *batch()))
            if index == 15:  # the teacher's statistics are its own
                diary.write("statistics", teacher.layers[1].running_mean)
        diary.write_state(model)

    both(script, replays=20)


def test_a_model_that_changes_between_steps_is_noticed() -> None:
    def script(diary: Diary) -> None:
        model = Model()
        step = diary.step(lambda m, x, y: loss_of(m, x, y), model=model, optimizer=adamw(model))
        for index in range(80):
            if index == 20:
                model.eval()
            if index == 40:
                model.train()
            if index == 50:
                model.layers[0].requires_grad_(False)
            if index == 65:
                with torch.no_grad():
                    model.layers[3].weight.data = torch.randn(3, 8)
            diary.write("loss", step(model, *batch()))
        diary.write_state(model)

    both(script, replays=30)


@pytest.mark.passes_without_graphs("nothing is trained")
def test_explain_has_nothing_against_a_model_among_the_arguments() -> None:
    told = str(explain(loss_of, Model(), *batch()))
    assert "is a tensor inside an object" not in told, told
