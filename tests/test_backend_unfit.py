"""Functions that AOTAutograd makes other functions of: their results are in their places all the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from replays import regions_ran
from test_backend import compiled, hostile, regions  # noqa: F401
from torch import Tensor, nn
from training import Diary, Net, batches, both, line_of, sgd

import pygraph_train.backend as backend

pytestmark = pytest.mark.usefixtures("hostile")

Function = Callable[[Tensor, Tensor], Tensor]


class Spectral(nn.Module):
    """One buffer is written without gradients and returned, one parameter is written behind autograd's back."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6))
        self.table = nn.Embedding(5, 6, max_norm=1.0)
        self.last = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.layer(x) + self.table((x[:, 0] > 0).long()))


def several_results(model: nn.Module, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
    logits = model(batch[0])
    loss = nn.functional.cross_entropy(logits, batch[1])
    return {"loss": loss, "detached": loss.detach(), "sum": logits.sum(), "mean": logits.mean(0)}


def test_results_of_a_function_that_returns_what_it_writes() -> None:
    runs = []
    for wrap in (lambda f: f, compiled):
        torch.manual_seed(0)
        model, found = Spectral(), []
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        function = wrap(several_results)
        for batch in batches(12):
            results = function(model, batch)
            (results["loss"] + 0.1 * results["sum"] + results["mean"].square().sum()).backward()
            optimizer.step()
            found.append([x.detach().clone() for x in (*results.values(), *model.state_dict().values())])
            found.append([p.grad.clone() for p in model.parameters()])  # type: ignore[union-attr]
            optimizer.zero_grad()
        runs.append(found)
    for one, other in zip(*runs, strict=True):
        assert all(map(torch.equal, one, other))
    for phase in ("forward", "backward"):
        assert regions(phase)[0].replays >= 8, backend.report()


def test_steps_in_regions_that_return_what_they_write() -> None:
    def script(diary: Diary) -> None:
        model = Spectral()
        optimizer = sgd(model)

        def step_fn(batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
            return several_results(model, batch)

        step = diary.step(step_fn, model=model, optimizer=optimizer)
        for batch in batches(40):
            diary.write("results", step(batch))
            diary.write_state(model, optimizer)

    report = both(script, replays=70, fuse="off")
    assert {r.phase for r in report.regions() if r.replays >= 20} == {"forward", "backward"}, str(report)


def turned(p: Tensor, x: Tensor) -> Tensor:
    p.data = p.data.t()
    return (x @ p).sum()


def turned_afterwards(p: Tensor, x: Tensor) -> Tensor:
    result = (x @ p).sum()
    p.data = p.data.t()
    return result


def cut(p: Tensor, x: Tensor) -> Tensor:
    if p.shape[0] == 6:
        p.data = p.data[1:, 2:]
    return (x * p.sum()).sum()


def of_another_shape(p: Tensor, x: Tensor) -> Tensor:
    p.data = p.data.view(-1, p.shape[0])
    p.data = p.data.reshape(4, 9)
    return (p * 2).sum() + x.sum()


def changed_after(p: Tensor, x: Tensor) -> Tensor:
    p.data = p.data * 0.9
    p.data.add_(0.1)
    return (x @ p).sum()


def changed_within_itself(p: Tensor, x: Tensor) -> Tensor:
    p.data = p.data[:]
    p.data.mul_(0.9)
    return (x @ p).sum()


def turned_twice(p: Tensor, x: Tensor) -> Tensor:
    p.data = p.data.clone().t()
    result = (x @ p).square().sum()
    p.data = p.data.clone().t()
    return result + (x @ p).sum()


def the_old_one_changed(p: Tensor, x: Tensor) -> Tensor:
    old = p.data
    p.data = p.data * 0.9
    old.add_(1.0)
    return (x @ p).sum() + old.sum()


RESHAPED = "`.data = ...` gives an input another shape, other strides or another type"
REFUSED = "could not be compiled: "


def called(function: Function, wrap: Callable[[Function], Any], learns: bool) -> list[Any]:
    torch.manual_seed(0)
    p = nn.Parameter(torch.randn(6, 6), requires_grad=learns)
    call, found = wrap(function), []
    for x, _ in batches(8):
        result = call(p, x)
        if learns:
            p.grad = None
            result.backward()
        gradient = None if p.grad is None else p.grad.clone()
        found.append((result.detach().clone(), p.detach().clone(), p.stride(), gradient))
    return found


def assert_same(want: list[Any], found: list[Any]) -> None:
    assert len(want) == len(found)
    for (result, p, stride, gradient), other in zip(want, found, strict=True):
        assert torch.equal(result, other[0]) and torch.equal(p, other[1]) and stride == other[2]
        assert (gradient is None) == (other[3] is None)
        assert gradient is None or torch.equal(gradient, other[3])


@pytest.mark.parametrize("learns", [True, False])
@pytest.mark.parametrize(
    ("function", "why", "at"),
    [
        (turned, RESHAPED, 1),
        (turned_afterwards, RESHAPED, 2),
        (turned_twice, RESHAPED, 1),
        (changed_after, REFUSED, 1),
        (changed_within_itself, REFUSED, 1),
        (the_old_one_changed, REFUSED, 2),
    ],
)
def test_assigned_data_that_would_be_lost(function: Function, why: str, at: int, learns: bool) -> None:
    assert_same(called(function, lambda f: f, learns), called(function, compiled, learns))
    rows = backend.report().regions
    assert rows and not any(r.replays for r in rows), backend.report()
    for row in rows:
        assert why in row.reason, row
        assert f"{__file__}:{function.__code__.co_firstlineno + at}" in row.reason, row


@pytest.mark.parametrize("function", [cut, of_another_shape])
def test_assigned_data_of_another_shape(function: Function) -> None:
    assert_same(called(function, lambda f: f, False), called(function, compiled, False))
    assert any(RESHAPED in row.reason for row in backend.report().regions), backend.report()
    if function is cut:  # only its first call gives another shape
        regions_ran(1)


@pytest.mark.parametrize("dynamic", [None, True, False])
def test_assigned_data_that_grows(dynamic: bool | None) -> None:
    def step(seen: Tensor, x: Tensor) -> Tensor:
        result = (x * 2).sum() + seen.sum()
        seen.data = torch.cat([seen.data, result.detach()[None]])
        return result

    def wrap(function: Function) -> Any:
        torch.compiler.reset()
        backend.reset()
        return backend.compile(function, dynamic=dynamic, engine="emulated")

    runs = []
    for call in (step, wrap(step)):
        seen, x = torch.ones(4), torch.ones(2, 3, requires_grad=True)
        results = []
        for _ in range(7):
            result = call(seen, x)
            result.backward()
            results.append(result.detach())
        runs.append([torch.stack(results), seen, x.grad])
    assert all(map(torch.equal, *runs))
    rows = backend.report().regions
    line = line_of(step, "seen.data = ")
    assert rows and all(row.reason == f"{RESHAPED} ({line})" for row in rows), backend.report()


def in_steps(update: Callable[[nn.Parameter], None]) -> Any:
    """Steps whose function is traced in two parts: it reads a value on the host."""

    def script(diary: Diary) -> None:
        model = Net()
        teacher = nn.Parameter(torch.randn(6, 6), requires_grad=False)

        def step_fn(batch: tuple[Tensor, Tensor]) -> Tensor:
            update(teacher)
            loss = nn.functional.cross_entropy(model(batch[0] @ teacher), batch[1])
            return loss * (1.0 if loss.item() > 1e9 else 2.0)

        step = diary.step(step_fn, model=model, optimizer=sgd(model))
        for batch in batches(40):
            diary.write("loss", step(batch))
            diary.write("teacher", (teacher, teacher.stride()))

    return both(script, replays=60)


def _turn(p: nn.Parameter) -> None:
    p.data = p.data.t()


def _change_after(p: nn.Parameter) -> None:
    p.data = p.data * 0.9
    p.data.add_(0.1)


@pytest.mark.parametrize(("update", "line"), [(_turn, ".data.t()"), (_change_after, "data * 0.9")])
def test_steps_whose_assigned_data_would_be_lost(update: Any, line: str) -> None:
    report = in_steps(update)
    assert [row.decision for row in report.regions() if not row.replays], str(report)
    assert any(line_of(update, line) in row.reason for row in report.regions()), str(report)
