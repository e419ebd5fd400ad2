"""What runs without a graph costs the host no more than under plain `torch.compile`: counted in calls, not in time."""

from __future__ import annotations

import gc
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from replays import regions_ran
from torch import Tensor, nn

import pygraph_train.backend as backend
from pygraph_train.graphs.emulated import EmulatedEngine
from pygraph_train.regions import inductor
from pygraph_train.regions.arena import Arena
from pygraph_train.regions.region import Region

OPTIONS = {"engine": "emulated", "warmup_runs": 1}


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    torch.compiler.reset()
    backend.reset()
    yield
    torch.compiler.reset()


class Recurrent(nn.Module):
    """Dynamo leaves it to Python."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.GRU(6, 6, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.recurrent(x)[0]
        return found


class Broken(nn.Module):
    """Its graph breaks inside of a block with autocast."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = Recurrent(), nn.Linear(6, 3)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.body(x)).flatten(0, 1), y.flatten())

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.loss(x, y)


def losses_of(call: Callable[..., Tensor], model: nn.Module, steps: int) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    draws = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(steps):
        x = torch.randn(2, 5, 6, generator=draws)
        optimizer.zero_grad()
        loss = call(x, torch.randint(0, 3, (2, 5), generator=draws))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_what_computes_nothing_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    compile_with_aten = inductor.compile_with_aten

    def noted(gm: torch.fx.GraphModule, *args: Any) -> Any:
        compiled.append(gm.code)
        return compile_with_aten(gm, *args)

    monkeypatch.setattr(inductor, "compile_with_aten", noted)
    torch.manual_seed(0)
    plain, model = Broken(), Broken()
    model.load_state_dict(plain.state_dict())
    function = torch.compile(model.forward, backend="pygraph", options=OPTIONS)
    assert losses_of(function, model, 12) == losses_of(plain, plain, 12)
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    regions_ran(20)
    idle = [row for row in backend.report().regions if row.reason == "it computes nothing"]
    assert len(idle) == 2  # before the break, and after the block
    assert compiled and all("cross_entropy" in code or "linear" in code for code in compiled)


def calls_of(run: Callable[[], object]) -> int:
    """How many functions, in Python and in C, a call makes in this thread, without those of the garbage collector."""
    count = 0

    def counted(frame: Any, event: str, arg: Any) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    run()
    gc.disable()  # hypothesis has a function called at each collection
    sys.setprofile(counted)
    try:
        run()
    finally:
        sys.setprofile(None)
        gc.enable()
    return count


LINEAR, NORMED = nn.Linear(6, 3), nn.BatchNorm1d(3)


def of_a_loss(x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(LINEAR(x), y)


def of_statistics(x: Tensor, y: Tensor) -> Tensor:
    """It changes buffers: its calls go through AOTAutograd's runtime."""
    return F.cross_entropy(NORMED(LINEAR(x)), y)


def without_gradients(x: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        return F.cross_entropy(LINEAR(x), y)


@pytest.mark.parametrize("retained", [False, True])
@pytest.mark.parametrize(
    ("function", "more"),
    [
        (of_a_loss, -60),
        # to see which gradients are not there, and what shares memory; what Inductor had in its cache has one call less
        (of_statistics, 23),
        (without_gradients, 1),
    ],
)
def test_a_region_without_a_graph_is_called_as_directly_as_inductor_calls_it(
    function: Callable[..., Tensor], more: int, retained: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena = Arena(EmulatedEngine())
    monkeypatch.setattr(inductor, "_arena", lambda options, device: arena)
    make = inductor.Region

    def refused(*args: Any) -> Region:
        region = make(*args)
        region.give_up("it is of no use")
        return region

    monkeypatch.setattr(inductor, "Region", refused)
    x, y = torch.randn(4, 6), torch.tensor([0, 1, 2, 1])
    counts = {}
    for name in ("inductor", "pygraph"):
        own = types.FunctionType(function.__code__.replace(), function.__globals__)
        call = torch.compile(own, backend=name)

        def step(call: Any = call) -> None:
            loss = call(x, y)
            if loss.requires_grad:
                loss.backward(retain_graph=retained)

        with torch._functorch.config.patch(donated_buffer=not retained):
            for _ in range(8):
                step()
            counts[name] = calls_of(step)
    assert all(row.plain_runs == 10 and not row.captures for row in backend.report().regions)
    assert counts["pygraph"] <= counts["inductor"] + more
