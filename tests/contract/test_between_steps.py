"""What the user does between two steps is noticed before the next one, also where a replayed step reads little."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from .compare import Run, same_as_plain
from .models import adamw, batches, loss_of

STEPS, AT = 26, 18

Act = Callable[[nn.Module, torch.optim.Optimizer], Any]


def _first(model: nn.Module) -> nn.Parameter:
    return next(model.parameters())


def _state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    state: dict[str, Tensor] = optimizer.state[_first(model)]
    return state


def _moves(tensor: Any) -> None:
    tensor.data = tensor.data.clone() * 1.5


def _doubles(parameter: Tensor) -> None:
    assert parameter.grad is not None
    parameter.grad.mul_(2)


def _loads(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.load_state_dict(optimizer.state_dict())


def _sets_gradient(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    _first(model).grad = torch.ones_like(_first(model))


def _adds_group(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    last = optimizer.param_groups[0]["params"].pop()
    optimizer.add_param_group({"params": [last], "lr": 0.5})


ACTS: dict[str, Act] = {
    "a parameter gets other memory": lambda model, _: _moves(_first(model)),
    "a gradient is set": _sets_gradient,
    "state gets other memory": lambda model, optimizer: _moves(_state(model, optimizer)["exp_avg"]),
    "state is another tensor": lambda model, optimizer: _state(model, optimizer).update(
        exp_avg=_state(model, optimizer)["exp_avg"] * 2
    ),
    "state is loaded": _loads,
    "a parameter gets a hook": lambda model, _: _first(model).register_hook(lambda gradient: 3 * gradient),
    "a gradient is looked at": lambda model, _: _first(model).register_post_accumulate_grad_hook(_doubles),
    "a parameter is frozen": lambda model, _: _first(model).requires_grad_(False),
    "another learning rate": lambda _, optimizer: optimizer.param_groups[0].update(lr=0.3),
    "another decay": lambda _, optimizer: optimizer.param_groups[0].update(weight_decay=0.3),
    "another group": _adds_group,
    "a parameter is left out": lambda _, optimizer: optimizer.state.pop(
        optimizer.param_groups[0]["params"].pop()
    ),
}


@pytest.mark.parametrize("act", ACTS)
@same_as_plain(replays=10, updates=8)
def test_it_is_noticed(run: Run, act: str) -> None:
    model = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 3))
    optimizer = adamw(model)
    step = run.step(loss_of(model), model=model, optimizer=optimizer)
    for number, batch in enumerate(batches(STEPS)):
        if number == AT:
            ACTS[act](model, optimizer)
        step(batch)
