"""Backwards that keep their autograd graph come from graphs as well, and leave alone what the forward saved."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from backend_training import Square
from replays import regions_ran
from test_backend import (  # noqa: F401
    Broken,
    Handed,
    Net,
    batches,
    compiled,
    hostile,
    regions,
    replays,
    same_as_plain,
    train,
    update,
)
from test_backend_direct import Plain
from torch import nn

import pygraph_train.backend as backend
from pygraph_train.regions import inductor
from pygraph_train.regions import pair as pair_module
from pygraph_train.regions.measurements import Cost, Measurements


@pytest.fixture(autouse=True)
def kept(hostile: Any) -> Iterator[None]:  # noqa: F811
    """torch refuses `retain_graph=True` where backwards may write to what was saved, and names this setting."""
    with torch._functorch.config.patch(donated_buffer=False):
        yield


def twice(model: nn.Module, call: Any, opt: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Two backwards of one loss, whose gradients add up."""
    values = []
    for x, y in batches(16, 6):
        loss = F.cross_entropy(call(x), y)
        loss.backward(retain_graph=True)
        values += [p.grad.clone() for p in model.parameters()]
        values.append(update(loss, opt))
    return values


def two_losses(model: nn.Module, call: Any, opt: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Two losses of one forward; the gradients of the first are alive, and looked at, when the second has run."""
    values = []
    for x, y in batches(16):
        out = call(x)
        first = torch.autograd.grad(F.cross_entropy(out, y), list(model.parameters()), retain_graph=True)
        values.append(update(out.square().mean(), opt))
        values += [g.clone() for g in first]
        del first
    return values


def often(model: nn.Module, call: Any, opt: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Of one forward the gradients of each class, all of them alive."""
    values = []
    for x, y in batches(16):
        out = call(x)
        found = [
            torch.autograd.grad(out[:, k].sum(), list(model.parameters()), retain_graph=True)
            for k in range(3)
        ]
        values += [g.clone() for row in found for g in row]
        values.append(update(F.cross_entropy(out, y), opt))
        del found
    return values


def differentiated(model: nn.Module, call: Any, opt: torch.optim.Optimizer) -> list[torch.Tensor]:
    """A gradient with `create_graph=True`, as losses with a penalty ask for it."""
    values = []
    for x, y in batches(16):
        mixed = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(call(mixed).sum(), mixed, create_graph=True)
        values += [slope.detach().clone(), update(F.cross_entropy(call(x), y) + slope.detach().norm(), opt)]
        del slope
    return values


def by_turns(model: nn.Module, call: Any, opt: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Every other step has one backward."""
    values = []
    for step, (x, y) in enumerate(batches(24)):
        loss = F.cross_entropy(call(x), y)
        if step % 2:
            loss.backward(retain_graph=True)
        values.append(update(loss, opt))
    return values


def all_kept(model: nn.Module, call: Any, opt: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The very objects that the backwards return are kept for good."""
    values = []
    for x, y in batches(40):
        out = call(x)
        values += torch.autograd.grad(F.cross_entropy(out, y), list(model.parameters()), retain_graph=True)
        values.append(update(out.square().mean(), opt))
    return values


def late(model: nn.Module, call: Any, opt: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The last backward of a forward comes when that of the next step has run."""
    values, before = [], None
    for x, y in batches(16):
        loss = F.cross_entropy(call(x), y)
        values += torch.autograd.grad(loss, list(model.parameters()), retain_graph=True)
        if before is not None:
            values += torch.autograd.grad(before, list(model.parameters()))
        before = loss
    return values


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("kind", [Net, Broken, Handed, Plain])
@pytest.mark.parametrize(
    ("body", "least"),
    [(twice, 26), (two_losses, 26), (often, 50), (by_turns, 30), (late, 18), (all_kept, 60)],
)
def test_what_was_saved_is_there_for_the_next_backward(
    body: Callable[..., list[torch.Tensor]], least: int, kind: type[nn.Module], direct: bool
) -> None:
    same_as_plain(body, kind, direct=direct, least=least)
    assert replays("backward") >= least, backend.report()


def test_gradients_that_could_be_differentiated() -> None:
    same_as_plain(differentiated, Plain, least=50)
    assert all(row.replays >= 13 and row.captures <= 2 for row in backend.report().regions)


def test_gradients_come_to_lie_where_nothing_is_needed_any_more(hostile: Any) -> None:  # noqa: F811
    same_as_plain(twice, Square, least=40)
    assert hostile.engine.reused


@pytest.mark.parametrize(("graph", "decision"), [(1.0, "graph"), (9.0, "plain")])
@pytest.mark.parametrize("body", [twice, differentiated])
def test_it_is_measured_and_decided_upon(
    body: Callable[..., list[torch.Tensor]], graph: float, decision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inductor, "Pair", lambda *_: pair_module.Pair("copy", True))
    seconds = {"plain": 4.0, "graph": graph}
    monkeypatch.setattr(
        Measurements,
        "cost",
        lambda self, way: Cost(seconds[way], seconds[way]) if len(self._costs[way]) >= self.samples else None,
    )
    same_as_plain(body, Plain, least=4)
    assert [row.decision for row in backend.report().regions] == [decision] * (2 if body is twice else 4)


def test_a_single_retained_backward_costs_no_graph() -> None:
    def body(model: nn.Module, call: Any, opt: torch.optim.Optimizer) -> list[torch.Tensor]:
        values = train(call, opt, 8)
        x, y = batches(1)[0]
        loss = F.cross_entropy(call(x), y)
        loss.backward(retain_graph=True)
        return [*values, update(loss, opt), *train(call, opt, 8)]

    same_as_plain(body, least=30)
    assert [r.captures for r in backend.report().regions] == [1, 1]


def test_a_second_derivative_is_refused_as_without_graphs() -> None:
    model = Plain()
    call = compiled(model)
    for x, _ in batches(8):
        (slope,) = torch.autograd.grad(call(x).square().sum(), model.last.bias, create_graph=True)
        with pytest.raises(RuntimeError, match="does not currently support double backward"):
            slope.sum().backward()
        del slope
    regions_ran(8)
    assert replays("backward") >= 4


def in_some_steps(model: nn.Module, call: Any, opt: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Batches of three sizes take turns, and every other step has two backwards."""
    values = []
    for step, pair in enumerate(zip(batches(120, 5), batches(120, 7), batches(120, 9), strict=True)):
        x, y = pair[step % 3]
        loss = F.cross_entropy(call(x), y)
        if step % 2 == 0:
            loss.backward(retain_graph=True)
        values.append(update(loss, opt))
    return values


@pytest.mark.parametrize("kind", [Net, Plain])
def test_graphs_of_other_shapes_stay_when_those_of_one_make_room_for_such_backwards(
    kind: type[nn.Module],
) -> None:
    same_as_plain(in_some_steps, kind, least=250)
    (forward,) = [row for row in regions("forward") if row.captures]
    (backward,) = [row for row in regions("backward") if row.captures]
    assert forward.captures <= 6 and backward.captures <= 9, backend.report()
    assert forward.replays >= 110 and backward.replays >= 150, backend.report()
