"""A model keeps activations in an object that it returns, as language models keep keys and values in a cache."""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from training import Net

accelerate = pytest.importorskip("accelerate")

from accelerate_training import Numbers, Script, both, fresh, run  # noqa: E402, F401

from pygraph_train import PyGraph, PyGraphError  # noqa: E402


class Layer:
    """Of a cache."""

    def __init__(self) -> None:
        self.keys: Tensor | None = None


class Cache:
    """What is kept of each layer."""

    def __init__(self) -> None:
        self.layers = [Layer()]
        self.filled: dict[int, bool] = {}


class Caching(Net):
    """Makes its cache in another part of its forward than the one that fills it: the print is in no graph."""

    def forward(self, x: Tensor) -> Any:
        cache = self.cache()
        print("a layer", file=io.StringIO())
        hidden = torch.tanh(self.first(x))
        cache.layers[0].keys, cache.filled[0] = hidden, True
        return {"logits": self.second(hidden), "cache": cache}

    def cache(self) -> Any:
        return Cache()


class Kept(Caching):
    """Has one cache for all calls, and returns none."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.filled = [Layer()], dict[int, bool]()

    def cache(self) -> Any:
        return self

    def forward(self, x: Tensor) -> Any:
        return {"logits": super().forward(x)["logits"]}


Look = Callable[[Script, int, Tensor, Any], None]


def training(make: Callable[[], nn.Module], look: Look = lambda *_: None) -> Callable[[Script], None]:
    def script(script: Script) -> None:
        model: Any = make()
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        model, optimizer, loader = script.accelerator.prepare(
            model, optimizer, DataLoader(Numbers(), batch_size=8)
        )
        for number, batch in enumerate(loader):
            result = model(batch["x"])
            loss = nn.functional.cross_entropy(result["logits"], batch["y"])
            look(script, number, loss, result)
            script.accelerator.backward(loss)
            optimizer.step()
            script.write_state(model, optimizer)
            optimizer.zero_grad()

    return script


def test_activations_in_a_cache_are_no_obstacle() -> None:
    def look(script: Script, number: int, loss: Tensor, result: Any) -> None:
        script.write("keys", result["cache"].layers[0].keys)

    report = both(training(Caching, look), replays=60, plan="{F} {B} {O}")
    assert not report.fallbacks, report


def test_a_loss_may_be_computed_from_a_cache() -> None:
    def script(script: Script) -> None:
        model: Any = Caching()
        optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        model, optimizer, loader = script.accelerator.prepare(
            model, optimizer, DataLoader(Numbers(), batch_size=8)
        )
        for batch in loader:
            result = model(batch["x"])
            loss = nn.functional.cross_entropy(result["logits"], batch["y"])
            loss = loss + result["cache"].layers[0].keys.square().mean()
            script.accelerator.backward(loss)
            optimizer.step()
            script.write_state(model, optimizer)
            optimizer.zero_grad()

    both(script, replays=60, plan="{F} {B} {O}")


def asks(script: Script, number: int, loss: Tensor, result: Any) -> None:
    keys = result["cache"].layers[0].keys
    script.write("gradient", torch.autograd.grad(loss, keys, retain_graph=True)[0])


def asks_late(script: Script, number: int, loss: Tensor, result: Any) -> None:
    if number >= 10:
        result["cache"].layers[0].keys.retain_grad()


def test_whoever_asks_for_the_gradient_of_a_cache_gets_it() -> None:
    report = both(training(Caching, asks), replays=8)  # of the optimizer
    (row,) = report.fallbacks
    assert "the gradient of an activation that it returns is asked for" in row.reason, row
    assert not report.regions()


def test_whoever_asks_later_is_told() -> None:
    plugin = PyGraph(engine="emulated", warmup_steps=2)
    with pytest.raises(PyGraphError, match="the gradient of an activation that Caching returns is asked for"):
        run(training(Caching, asks_late), plugin)
    assert any(region.replays for region in plugin.report().regions())


def test_activations_that_outlive_the_call_stay_eager() -> None:
    """Nobody knows who asks for the gradient of what a model keeps."""
    report = both(training(Kept), replays=8)  # of the optimizer
    assert any("it stores an activation" in row.reason for row in report.fallbacks), report
