"""Batches whose tensors share memory: with each other, or with what the step reads and writes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training import Diary, adamw, both

from pygraph_train.step.graphed import _mover

FORMS = pytest.mark.parametrize("verify", ["sample", "off"])


class Model(nn.Module):
    """Layers around a batch norm, whose statistics each forward writes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.second(torch.tanh(self.norm(self.first(x))))
        return result


Make = Callable[[int, Tensor, Model], tuple[tuple[Any, ...], dict[str, Any]]]


def weighted(model: Model, a: Tensor, b: Tensor) -> Tensor:
    return (model(a) * b[:, :3]).square().mean()


def in_a_dict(model: Model, a: Tensor, batch: dict[str, Tensor]) -> Tensor:
    return weighted(model, a, batch["b"]) + batch["c"].mean() * model.second.bias.sum()


def asks(model: Model, a: Tensor, b: Tensor) -> Tensor:
    return model(a).square().mean() * (2.0 if a is b else 3.0)


def reads_first(model: Model, a: Tensor, b: Tensor) -> Tensor:
    return model(a).square().mean()


def reads_last(model: Model, a: Tensor, b: Tensor) -> Tensor:
    return model(b).square().mean()


def train(make: Make, fn: Callable[..., Tensor] = weighted, *, steps: int = 60, **expected: Any) -> Any:
    def script(diary: Diary) -> None:
        model = Model()
        optimizer = adamw(model)
        step = diary.step(lambda *a, **k: fn(model, *a, **k), model=model, optimizer=optimizer)
        generator = torch.Generator().manual_seed(1)
        for index in range(steps):
            args, kwargs = make(index, torch.randn(12, 6, generator=generator), model)
            diary.write("loss", step(*args, **kwargs))
            diary.write_state(model, optimizer)

    return both(script, **expected)


ONE_TENSOR: dict[str, tuple[Callable[..., Tensor], Make, int]] = {
    "twice": (weighted, lambda i, t, m: ((t, t), {}), 1),
    "twice, later once": (weighted, lambda i, t, m: ((t, t if i < 30 else t.flip(0)), {}), 2),
    "once, later twice": (weighted, lambda i, t, m: ((t, t if i >= 30 else t.flip(0)), {}), 2),
    "by turns": (weighted, lambda i, t, m: ((t, t if i % 2 else t.flip(0)), {}), 2),
    "by position and in a dict": (in_a_dict, lambda i, t, m: ((t, {"b": t, "c": t}), {}), 1),
    "by position and by name": (weighted, lambda i, t, m: ((t,), {"b": t}), 1),
    "in a dict by turns": (in_a_dict, lambda i, t, m: ((t, {"b": t, "c": t if i % 3 else t * 2}), {}), 2),
    "the first one is read": (reads_first, lambda i, t, m: ((t, t), {}), 1),
    "the last one is read": (reads_last, lambda i, t, m: ((t, t), {}), 1),
    "the step asks": (asks, lambda i, t, m: ((t, t if i // 10 % 2 else t.clone()), {}), 2),
}


@pytest.mark.notices("the last tensor of a batch is not copied")
@FORMS
@pytest.mark.slow_after(10)
@pytest.mark.parametrize("case", ONE_TENSOR)
def test_one_tensor_that_comes_several_times(case, verify):
    fn, make, captures = ONE_TENSOR[case]
    train(make, fn, replays=56 if captures == 1 else 45, plan="{F} {B} {O}", verify=verify)


VIEWS: dict[str, Make] = {
    "the same elements": lambda i, t, m: ((t, t.view_as(t) if i % 2 else t.flip(0)), {}),
    "elements in common": lambda i, t, m: ((t[:8], t[4:] if i % 2 else t[4:].clone()), {}),
    "only a storage in common": lambda i, t, m: ((t[:6], t[6:] if i % 2 else t[6:].clone()), {}),
    "words and the next ones": lambda i, t, m: ((t[:-1], t[1:]), {}),
}


@FORMS
@pytest.mark.slow_after(4)
@pytest.mark.parametrize("case", VIEWS)
def test_views_of_one_tensor_need_one_graph(case, verify):
    """Nothing writes a batch, so copies that lie apart have the same values."""
    train(VIEWS[case], replays=56, plan="{F} {B} {O}", verify=verify)


EXPANDED: dict[str, tuple[Make, int]] = {
    "rows": (lambda i, t, m: ((t, t[:1].expand(12, 6)), {}), 1),
    "columns": (lambda i, t, m: ((t, t[:, 2:3].expand(12, 6)), {}), 1),
    "one number": (lambda i, t, m: ((t, t[3, 3].expand(12, 6)), {}), 1),
    "a tensor and its expansion": (lambda i, t, m: ((t[:1].expand(12, 6), t[:1].expand(12, 6)), {}), 1),
    "one expansion twice": (lambda i, t, m: ((x := t[:1].expand(12, 6), x), {}), 1),
    "the first one only": (lambda i, t, m: ((t, t[:1].expand(12, 6) if i < 3 else t.flip(0)), {}), 1),
    "by turns": (lambda i, t, m: ((t, t[:1].expand(12, 6) if i % 2 else t.flip(0)), {}), 2),
}


@FORMS
@pytest.mark.slow_after(7)
@pytest.mark.parametrize("case", EXPANDED)
def test_expanded_tensors_are_copied_as_they_are(case, verify):
    make, _ = EXPANDED[case]
    train(make, replays=45, plan="{F} {B} {O}", verify=verify)


@pytest.mark.passes_without_graphs("nothing is captured")
def test_one_tensor_is_moved_once():
    a, b = torch.ones(3), torch.zeros(3)
    move = _mover(torch.device("meta"))
    moved = [move(leaf) for leaf in (a, b, a, "text")]
    assert moved[0] is moved[2] and moved[0] is not moved[1] and moved[3] == "text"
    assert moved[0].device.type == "meta"


def as_a_view(model: Any) -> None:
    model.b = model.a.view(6)


def in_the_memory(model: Any) -> None:
    model.b.set_(model.a)


def as_data(model: Any) -> None:
    model.b.data = model.a.data


@pytest.mark.parametrize("share", [as_a_view, in_the_memory, as_data])
@pytest.mark.parametrize("back", [False, True])
def test_buffers_that_share_memory_after_some_steps_with_one_that_a_region_changes(
    share: Callable[[Any], None], back: bool
) -> None:
    def script(diary: Diary) -> None:
        model = Model()
        model.register_buffer("a", torch.zeros(6))
        model.register_buffer("b", torch.ones(6))
        optimizer = adamw(model)

        def step_fn(x: Tensor) -> Tensor:
            model.a.add_(x.mean(0))
            x = x + model.b
            torch._dynamo.graph_break()
            return model(x).square().mean()

        step = diary.step(step_fn, model=model, optimizer=optimizer)
        for number in range(30):
            if number == 15:
                share(model)
            if back and number == 22:
                model.b = torch.ones(6)
            diary.write("loss", step(torch.randn(8, 6)))
            diary.write_state(model, optimizer)

    both(script, replays=39, compile=False)


@pytest.mark.parametrize("first", [False, True])
def test_a_batch_whose_tensors_share_memory_in_some_steps_where_a_region_changes_one(
    first: bool,
) -> None:
    def script(diary: Diary) -> None:
        model = Model()
        optimizer = adamw(model)

        def step_fn(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
            y.add_(1).remainder_(3)
            torch._dynamo.graph_break()
            return nn.functional.cross_entropy(model(x), z)

        def deciding(x: Tensor, y: Tensor, z: Tensor) -> Tensor:
            found = z.clone()
            y.add_(1).remainder_(3)
            if z.sum() > 8:
                return nn.functional.cross_entropy(model(x), found)
            return nn.functional.cross_entropy(model(x) * 0.5, y)

        steps = [diary.step(fn, model=model, optimizer=optimizer) for fn in (step_fn, deciding)]
        for number in range(60):
            x, y = torch.randn(8, 6), torch.randint(0, 3, (8,))
            z = y.view(8) if (number >= 30) != first else y.clone()
            diary.write("loss", steps[number % 2](x, y, z))
            diary.write("batch", [x, y, z])
            diary.write_state(model, optimizer)

    both(script, replays=30, compile=False)
