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


def graphs_of(fn: Callable[..., Any], *given: Any, dynamic: bool = False) -> list[GraphModule]:
    torch.compiler.reset()
    found: list[GraphModule] = []

    def keep(gm: GraphModule, examples: Any) -> Any:
        found.append(gm)
        return gm.forward

    torch.compile(fn, backend=keep, dynamic=dynamic)(*given)
    return found


def operations(gm: GraphModule) -> list[str]:
    return [getattr(n.target, "__name__", str(n.target)) for n in gm.graph.nodes if n.op.startswith("call")]


def values_of(gm: GraphModule) -> list[Any]:
    """What stands for its inputs."""
    return [n.meta["example_value"] for n in gm.graph.find_nodes(op="placeholder")]


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


@pytest.fixture
def int32_is_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that it may be an index. Dynamo hands numbers over as float64."""

    def on_host(node: Any) -> bool:
        kinds = {t.dtype for t in passes._tensors(node)}
        return bool(kinds) and kinds <= {torch.int32, torch.float64}

    monkeypatch.setattr(passes, "is_on_host", on_host)


def equal_and_free_of(names: set[str], fn: Callable[..., Any], *given: Any) -> HostPart:
    """What the device computes has none of these operations, and the whole computes what the function does."""
    expected = fn(*(g.clone() if isinstance(g, Tensor) else g for g in given))
    (gm,) = graphs_of(fn, *given)
    inputs = [given[i] for i, _ in enumerate(gm.graph.find_nodes(op="placeholder"))]
    part = HostPart(gm)
    found = part.around(part.rest.forward)(*inputs) if part.any else gm(*inputs)
    assert torch.equal(found[0], expected), fn
    assert not names & set(operations(part.rest if part.any else gm)), fn
    return part


@pytest.mark.usefixtures("int32_is_of_the_host")
def test_what_the_host_writes_in_place_is_sent_with_what_it_wrote() -> None:
    def filled(x: Tensor) -> Tensor:
        rows = torch.zeros(4, dtype=torch.int32)
        rows[0] = 3
        rows[1:] += 1
        return x[rows.to(torch.int64)].sum()

    def read_by_both(x: Tensor) -> Tensor:
        rows = torch.zeros(4, dtype=torch.int32)
        before = rows * 2
        rows[0] = 3
        return x[rows.to(torch.int64)].sum() * rows[0] - before.to(torch.float32).sum()

    def by_out(x: Tensor) -> Tensor:
        rows = torch.zeros(3, dtype=torch.int32)
        torch.add(torch.ones(3, dtype=torch.int32), 1, out=rows)
        return x[rows.to(torch.int64)].sum()

    def of_the_device(x: Tensor) -> Tensor:
        rows = torch.zeros(4, dtype=torch.int32)
        rows[0] = (x.sum() > 0).int().to(torch.int64)
        return x[rows.to(torch.int64)].sum()

    x = torch.linspace(-1, 2, 24).view(4, 6)
    for fn in (filled, by_out):
        assert equal_and_free_of({"to"}, fn, x).any
    for fn in (read_by_both, of_the_device):
        assert not equal_and_free_of(set(), fn, x).any, "the host is not alone with it"


def test_indices_and_values_of_the_host_are_sent() -> None:
    def grid(x: Tensor) -> Tensor:
        a, b = torch.meshgrid(*2 * [torch.arange(2, dtype=torch.int32)], indexing="ij")
        rows = torch.stack([a, b]).flatten(1).sum(0, dtype=torch.int32)
        y = x.clone()
        y[rows] = 0.5
        y[0:1] = torch.arange(6, dtype=torch.int32)
        y[1].copy_(torch.arange(6, dtype=torch.int32))
        return y[rows, 2].sum() + x[..., rows].square().sum() + (torch.arange(6).type_as(x) * x).sum()

    part, _ = split(grid, ON_DEVICE)
    assert not {"to", "type_as"} & set(operations(part.rest))
    inputs = [n.meta["example_value"] for n in part.rest.graph.find_nodes(op="placeholder")]
    assert len(inputs) == 7 and all(t.is_meta for t in inputs)


@pytest.mark.usefixtures("int32_is_of_the_host")
def test_lists_that_are_indices_are_sent() -> None:
    def lists(x: Tensor) -> Tensor:
        y = x.clone()
        y[:, [0, 2]] = 0.5
        return y[[1, 3]].sum() + x[..., [-2]].square().sum() + x[1:, [0]].sum()

    x = torch.linspace(-1, 2, 24).view(4, 6)
    part = equal_and_free_of({"tensor"}, lists, x)
    setitem = next(n for n in part.rest.graph.nodes if n.name == "setitem")
    assert setitem.args[2].target is torch.full, "torch would make the number on the host"
    assert part.any and not any(isinstance(a, list) for n in part.rest.graph.nodes for a in n.args)


def test_constants_are_sent_once() -> None:
    def constant(x: Tensor) -> Tensor:
        rows = torch.arange(4) // 2
        return x[rows].sum()

    def written(x: Tensor) -> Tensor:
        rows = torch.arange(4).to(x.device)
        return x[rows.add_(1) % 4].sum()

    def returned(x: Tensor) -> tuple[Tensor, Tensor]:
        rows = torch.arange(4).to(x.device)
        return x[rows].sum(), rows[1:]

    def drawn(x: Tensor) -> Tensor:
        return x[torch.randint(0, 4, (4,))].sum()

    def given(x: Tensor, rows: Tensor) -> Tensor:
        return x[rows].sum()

    for fn, stays in ((constant, True), (written, False), (returned, False), (drawn, False), (given, False)):
        inputs = (ON_DEVICE, torch.arange(4))[: 2 if fn is given else 1]
        part, _ = split(fn, *inputs)
        seen: list[Any] = []
        whole = part.around(
            lambda *inputs, rest=part.rest, seen=seen: seen.append(inputs[-1]) or rest(*inputs)
        )
        for _ in range(2):
            whole(*inputs)
        assert (seen[0] is seen[1]) == stays, fn


@pytest.mark.usefixtures("int32_is_of_the_host")
def test_numbers_are_filled_in_where_they_are_used() -> None:
    def numbers(x: Tensor) -> Tensor:
        x = torch.where(x > 0, torch.tensor(0.25, device=x.device), x) * x.new_tensor(2)
        return (x + torch.as_tensor(True) + torch.tensor(data=3).float()).sum()

    def lists(x: Tensor) -> Tensor:
        weights = torch.tensor([1.0, 2.0, 0.5, 1.0, 1.0, 1.0], device=x.device)
        return ((x * weights).sum() + x.new_tensor([0.1, 0.2])).sum()

    x = torch.linspace(-1, 2, 24).view(4, 6)

    def changing(x: Tensor, number: float) -> Tensor:
        x = x.clone()
        x[[0, 2]] = number + 1
        return (x * torch.tensor(number, device=x.device)).sum()

    assert not equal_and_free_of({"tensor", "as_tensor", "new_tensor"}, numbers, x).any
    with torch._dynamo.config.patch(specialize_float=False):
        (gm,) = graphs_of(changing, x, 0.5, dynamic=True)
    part = HostPart(gm)
    assert not {"tensor", "full"} & set(operations(part.rest)), "a recording would hold the number"
    for number in (0.25, 0.75):
        by_kind = {torch.float64: torch.tensor(number, dtype=torch.float64), torch.float32: x}
        given = [by_kind[v.dtype] if isinstance(v, Tensor) else int(v) for v in values_of(gm)]
        assert torch.equal(part.around(part.rest.forward)(*given)[0], changing(x, number))
    assert equal_and_free_of({"tensor", "new_tensor"}, lists, x).any


def test_what_the_host_returns_is_made_anew() -> None:
    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        return x.sum(), torch.arange(3) + 1

    part, whole = split(step, ON_DEVICE)
    made = [whole(ON_DEVICE)[1] for _ in range(2)]
    assert made[0].tolist() == [1, 2, 3] and made[0] is not made[1] and "add" not in operations(part.rest)


@pytest.mark.usefixtures("float64_is_of_the_host")
def test_what_is_written_to_the_host_is_read_after_that() -> None:
    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        out = x @ WEIGHTS
        told = torch.zeros(2, dtype=torch.float64)
        told[0] = out.detach().sum().to(torch.float64)
        return out.sum(), told.sum()

    x = torch.linspace(-2, 2, 24).view(4, 6)
    (gm,) = graphs_of(step, x)
    parts = halves(gm)
    assert parts is not None
    inputs = [n.meta["example_value"].shape for n in gm.graph.find_nodes(op="placeholder")]
    given = [x if shape == x.shape else WEIGHTS for shape in inputs]
    assert all(map(torch.equal, parts[1](*given, *parts[0](*given)), step(x)))
    assert "zeros" not in operations(parts[0])


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
