"""What the host computes of a graph on a device. The device is "meta" here, so that no GPU is needed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule

from pygraph_train.core import passes
from pygraph_train.core.passes import HostPart, halves, prepared
from pygraph_train.torch_private.stock_dynamo import CompiledFunction

pytestmark = [pytest.mark.quick, pytest.mark.passes_without_graphs("graphs are split, and none is recorded")]


def graphs_of(fn: Callable[..., Any], *given: Any) -> list[GraphModule]:
    torch.compiler.reset()
    found: list[GraphModule] = []

    def keep(gm: GraphModule, examples: Any) -> Any:
        found.append(gm)
        return gm.forward

    torch.compile(fn, backend=keep, dynamic=False)(*given)
    return found


def operations(gm: GraphModule) -> list[str]:
    return [getattr(n.target, "__name__", str(n.target)) for n in gm.graph.nodes if n.op.startswith("call")]


def split(fn: Callable[..., Any], *given: Any) -> tuple[HostPart, Callable[..., Any]]:
    """The part of the host, and the whole of a function with one graph."""
    (gm,) = graphs_of(fn, *given)
    part = HostPart(gm)
    assert part.any
    return part, part.around(part.rest.forward)


ON_DEVICE = torch.zeros(4, 6, device="meta")


@pytest.mark.parametrize("around", [False, True])
def test_what_is_made_on_the_default_device_is_no_part_of_the_host(around: bool) -> None:
    """Dynamo of torch 2.11 takes it for a tensor of the host, and in a backend the default device is the CPU."""
    torch.compiler.reset()
    found: list[Any] = []

    def look(gm: GraphModule, examples: Any) -> Any:
        found.append((HostPart(gm).any, halves(gm), prepared(gm, "meta", eager=True)[1]))
        return gm.forward

    def noisy(x: Tensor) -> Tensor:
        return x + torch.rand(()) * 2

    if around:
        with torch.device("meta"):
            CompiledFunction(noisy, look)(ON_DEVICE)
    else:
        torch.set_default_device("meta")
        try:
            torch.compile(noisy, backend=look)(ON_DEVICE)
        finally:
            torch.set_default_device(None)
    assert found == [(False, None, None)]


def test_steps_of_noise_are_drawn_anew_and_sent() -> None:
    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        drawn = torch.randint(0, 1000, (4,), device="cpu")
        return x * drawn.to(x.device)[:, None], drawn

    part, whole = split(step, ON_DEVICE)
    assert operations(part.rest) == ["getitem", "mul"]
    torch.manual_seed(3)
    expected = [torch.randint(0, 1000, (4,)) for _ in range(3)]
    torch.manual_seed(3)
    for drawn in expected:
        scaled, found = whole(ON_DEVICE)
        assert torch.equal(found, drawn) and scaled.shape == (4, 6) and scaled.is_meta
    assert prepared(part.rest, "meta", eager=True)[1] is None


def test_a_layer_is_dropped_by_what_the_host_draws() -> None:
    """The graph ends where the host looks at the number; what is behind it is another one."""

    def step(x: Tensor) -> Tensor:
        x = x * 2
        return x * 3 if torch.rand([]) < 0.5 else x

    gm = graphs_of(step, ON_DEVICE)[0]
    part = HostPart(gm)
    assert operations(part.rest) == ["mul"]
    assert prepared(gm, "meta", eager=True)[1] == "it draws random numbers on the host"
    assert prepared(gm, "cpu", eager=True)[1] is None
    whole = part.around(part.rest.forward)
    torch.manual_seed(0)
    found = [[bool(t) for t in whole(ON_DEVICE) if t.device.type == "cpu"] for _ in range(8)]
    torch.manual_seed(0)
    assert found == [[bool(torch.rand([]) < 0.5)] for _ in range(8)]


def test_batches_are_sent_and_counted_on_the_host() -> None:
    seen = torch.zeros((), dtype=torch.int64)

    def step(x: Tensor, batch: Tensor, weights: Tensor) -> Tensor:
        seen.add_(1)
        return (x * weights + (batch * 2).to("meta")).sum() * torch.tensor(0.5)

    weights = torch.zeros(6, device="meta", requires_grad=True)
    part, _ = split(step, ON_DEVICE, torch.ones(4, 6), weights)
    assert "add_" not in operations(part.rest) and "to" not in operations(part.rest)
    devices = [n.meta["example_value"].device.type for n in part.rest.graph.find_nodes(op="placeholder")]
    assert devices == ["meta"] * 3
    (gm,) = graphs_of(step, ON_DEVICE, torch.ones(4, 6), weights)
    examples = HostPart(gm).examples([n.meta["example_value"] for n in gm.graph.find_nodes(op="placeholder")])
    assert [t.device.type for t in examples] == ["meta"] * 3
    assert "tensor" in operations(part.rest), "a number of the host stays where it is used"


def test_a_number_of_the_host_that_meets_the_device_is_handed_over_as_it_is() -> None:
    def step(x: Tensor) -> Tensor:
        return x * torch.rand(())

    part, _ = split(step, ON_DEVICE)
    (_, crossing) = part.rest.graph.find_nodes(op="placeholder")
    assert crossing.meta["example_value"].device.type == "cpu", "a region refuses such an input"


def test_nothing_is_split_where_the_host_computes_nothing() -> None:
    def step(x: Tensor) -> Tensor:
        return (x * torch.tensor(0.5) + torch.randn(6, device="meta")).sum()

    (gm,) = graphs_of(step, ON_DEVICE)
    assert not HostPart(gm).any and prepared(gm, "meta", eager=True)[1] is None


@pytest.fixture
def float64_is_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """So both parts can run on a CPU."""
    monkeypatch.setattr(
        passes, "is_on_host", lambda n: getattr(passes.value_of(n), "dtype", None) is torch.float64
    )


WEIGHTS = torch.linspace(-1, 1, 18).view(6, 3).requires_grad_()


@pytest.mark.usefixtures("float64_is_of_the_host")
def test_what_a_step_fetches_is_fetched_last() -> None:
    """It is what it was where the step fetches it, though the step writes there later."""

    def step(x: Tensor) -> tuple[Tensor, ...]:
        out = x @ WEIGHTS
        kept = out.detach().to(torch.float64)
        with torch.no_grad():
            right = (out.to(torch.float64) > 0).double().mean()
        out = torch.nn.functional.relu(out, inplace=True)
        return out.sum(), kept, right

    x = torch.linspace(-2, 2, 24).view(4, 6)
    (gm,) = graphs_of(step, x)
    expected = step(x)
    parts = halves(gm)
    assert parts is not None
    head = parts[0]
    assert "to" not in operations(head) and "mean" not in operations(head) and "relu" in operations(head)
    inputs = [n.meta["example_value"].shape for n in gm.graph.find_nodes(op="placeholder")]
    given = [x if shape == x.shape else WEIGHTS for shape in inputs]
    found = parts[1](*given, *parts[0](*given))
    assert all(map(torch.equal, found, expected)) and torch.is_grad_enabled()
    assert [t.requires_grad for t in found] == [t.requires_grad for t in expected] == [True, False, False]
    (gradient,) = torch.autograd.grad(found[0], WEIGHTS)
    assert torch.equal(gradient, torch.autograd.grad(expected[0], WEIGHTS)[0])


@pytest.mark.usefixtures("float64_is_of_the_host")
def test_what_is_fetched_and_sent_back_stays() -> None:
    def step(x: Tensor) -> Tensor:
        return (x @ WEIGHTS).to(torch.float64).float().sum()

    (gm,) = graphs_of(step, torch.ones(4, 6))
    assert halves(gm) is None
