"""Functions of torch and methods of tensors that somebody has replaced by others, which call the original."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from replays import regions_ran
from torch import Tensor, nn
from torch.nn import functional
from training import Diary, Net, adamw, batches, both

import pygraph_train.backend as backend
from pygraph_train.torch_private.patched_functions import call_originals


def larger(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def replacement(*args: Any, **kwargs: Any) -> Tensor:
        return original(*args, **kwargs) * 1.5

    return replacement


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layers(x)
        return out


def train(make: Callable[[], nn.Module]) -> None:
    """Train with whole steps, and compare with plain training."""

    def script(diary: Diary) -> None:
        model = make()
        optimizer = adamw(model)
        step = diary.step(
            lambda x, y: functional.cross_entropy(model(x), y), model=model, optimizer=optimizer
        )
        for x, y in batches(30):
            diary.write("loss", step(x, y))
        diary.write_state(model, optimizer)

    both(script, replays=10)


@pytest.mark.parametrize("name", ["relu", "dropout", "cross_entropy"])
def test_a_replacement_is_applied_once(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Whole steps of the emulated engine are not replayed: its modes see the replacement, and a comparison says so."""
    monkeypatch.setattr(functional, name, larger(getattr(functional, name)))

    train(Classifier)


@pytest.mark.parametrize("engine", ["emulated", "off"])
def test_a_region_applies_a_replacement_once(monkeypatch: pytest.MonkeyPatch, engine: str) -> None:
    monkeypatch.setattr(functional, "relu", larger(functional.relu))
    torch._dynamo.reset()
    backend.reset()
    model = Classifier().eval()
    compiled = backend.compile(model, engine=engine, compile=False)
    for x, _ in batches(8):
        assert torch.equal(compiled(x), model(x))
    if engine == "emulated":
        regions_ran(3)


class Calls(nn.Module):
    """Calls a method of its input, whose origin Dynamo knows, and of a tensor that it computes.

    Args:
        call: calls the method of a tensor.
    """

    def __init__(self, call: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.call = call
        self.layer = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x).sin() * self.call(x).mean() + self.call(self.layer(x)).mean()
        return out


def _doubled(x: Tensor) -> Tensor:
    return x.to(torch.float64)


def _written(x: Tensor) -> Tensor:
    x = x.clone()
    x[0] = x[1]
    return x


def read_larger(original: Any) -> property:
    return property(lambda tensor: original.__get__(tensor) * 1.5)


def larger_doubles(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Only tensors that become doubles: all of PyTorch moves tensors by `to`."""

    def replacement(tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        moved = original(tensor, *args, **kwargs)
        return moved * 1.5 if args == (torch.float64,) else moved

    return replacement


def larger_by_help(original: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def help_it(tensor: Tensor) -> Tensor:
        return original(tensor) * 1.5

    return lambda tensor: help_it(tensor)


class Larger:
    """A replacement that is no function."""

    def __init__(self, original: Callable[..., Tensor]) -> None:
        self.original = original

    def __get__(self, tensor: Tensor, kind: Any = None) -> Any:
        return functools.partial(self, tensor)

    def __call__(self, tensor: Tensor) -> Tensor:
        return self.original(tensor) * 1.5


def larger_parts(original: Callable[..., Any]) -> Callable[..., Any]:
    return lambda tensor, *args: [part * 1.5 for part in original(tensor, *args)]


def larger_writes(original: Callable[..., None]) -> Callable[..., None]:
    return lambda tensor, place, value: original(tensor, place, value * 1.5)


@pytest.mark.parametrize("name", ["sum", "relu"])
def test_a_replaced_method_is_applied_once(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Whole steps of the emulated engine are not replayed, as above, and parts of them are."""
    monkeypatch.setattr(Tensor, name, larger(getattr(Tensor, name)))

    train(lambda: Calls(lambda x: x.sum(1) + x.relu()[:, 0]))


METHODS: dict[str, tuple[str, Callable[[Any], Any], Callable[[Tensor], Tensor]]] = {
    "relu": ("relu", larger, lambda x: x.relu()),
    "relu with help": ("relu", larger_by_help, lambda x: x.relu()),
    "relu, twice": ("relu", lambda original: larger_by_help(larger(original)), lambda x: x.relu()),
    "relu without gradients": (
        "relu",
        lambda original: torch.no_grad()(larger(original)),
        lambda x: x.relu(),
    ),
    "relu under autocast": (
        "relu",
        lambda original: torch.autocast("cpu", enabled=False)(larger(original)),
        lambda x: x.relu(),
    ),
    "relu, wrapped": (
        "relu",
        lambda original: functools.wraps(functional.relu)(larger(original)),
        lambda x: x.relu(),
    ),
    "relu that is not compiled": (
        "relu",
        lambda original: torch.compiler.disable(larger(original)),
        lambda x: x.relu(),
    ),
    "relu of an object": ("relu", Larger, lambda x: x.relu()),
    "relu of torch": ("relu", larger, torch.relu),
    "sum": ("sum", larger, lambda x: x.sum(1)),
    "to": ("to", larger_doubles, _doubled),
    "view": ("view", larger, lambda x: x.view(-1)),
    "in place": ("mul_", larger, lambda x: x.clone().mul_(2.0)),
    "written in Python": ("norm", larger, lambda x: x.norm()),
    "parts": ("split", larger_parts, lambda x: x.split(4)[0]),
    "+": ("__add__", larger, lambda x: x + 1),
    "1 -": ("__rsub__", larger, lambda x: 1 - x),
    "[0]": ("__getitem__", larger, lambda x: x[0]),
    "[0] = x": ("__setitem__", larger_writes, _written),
    "property": ("T", read_larger, lambda x: x.T),
}
"""Names, replacements and calls of methods."""


@pytest.mark.parametrize("engine", ["emulated", "off"])
@pytest.mark.parametrize("method", METHODS)
def test_a_region_applies_a_replaced_method_once(
    monkeypatch: pytest.MonkeyPatch, method: str, engine: str
) -> None:
    name, replacement, call = METHODS[method]
    torch._dynamo.reset()
    backend.reset()
    model = Calls(call)
    compiled = backend.compile(model, engine=engine, compile=False)
    monkeypatch.setattr(Tensor, name, replacement(inspect.getattr_static(Tensor, name)))
    outputs = [(compiled(x), model(x)) for x, _ in batches(8)]
    monkeypatch.undo()
    for found, expected in outputs:
        assert torch.equal(found, expected)
    if engine == "emulated":
        regions_ran(3)


def test_graphs_of_functions_that_nobody_replaced_stay_as_they_are() -> None:
    graphs = []

    def look(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
        before = [node.target for node in graph.graph.nodes]
        graphs.append(call_originals(graph) or before != [node.target for node in graph.graph.nodes])
        return graph.forward

    torch._dynamo.reset()
    model = Net()
    x, y = batches(1)[0]

    def loss() -> Tensor:
        z = functional.gelu(torch.einsum("ab,bc->ac", model(x), torch.eye(3)).softmax(1).norm() + model(x))
        return functional.cross_entropy(functional.max_pool1d(z[None], 2)[0].sum(1, keepdim=True) + z, y)

    torch.compile(loss, backend=look)().backward()
    assert graphs == [False]
