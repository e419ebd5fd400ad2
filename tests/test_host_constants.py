"""Constants that a step makes on the host, in graphs with a device that holds no values."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from training import differs

from pygraph_train.regions.inductor import compile_whole
from pygraph_train.step.program import plain_call
from pygraph_train.tracing import host_constants
from pygraph_train.tracing.host_constants import HostConstants, make_once
from pygraph_train.tracing.obstacles import on_host
from pygraph_train.tracing.trace import Trace

DEVICE = torch.device("meta")

WITH_UNUSED = torch.nn.functional.multi_head_attention_forward

Make = Callable[["Graph", fx.Node], fx.Node]


class Graph:
    """Builds a graph as Dynamo does, with a value for each node."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.x = self.graph.placeholder("x")
        self.x.meta["example_value"] = torch.zeros(4, 4, device=DEVICE)

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """A function, or a method by its name."""
        kind = "call_method" if isinstance(target, str) else "call_function"
        node = self.graph.create_node(kind, target, args, kwargs)
        values, named = fx.node.map_arg((args, kwargs), lambda read: read.meta["example_value"])
        function = getattr(values[0], target) if isinstance(target, str) else target
        node.meta["example_value"] = function(*(values[1:] if isinstance(target, str) else values), **named)
        return node

    def made_once(self, result: Any) -> tuple[fx.GraphModule, HostConstants]:
        """The graph that returns this, after the constants were made once."""
        self.graph.output((result,))
        module = fx.GraphModule(torch.nn.Module(), self.graph)
        return module, make_once(module, DEVICE)


def problems(module: fx.GraphModule, found: HostConstants) -> list[str]:
    return [problem.reason for problem in on_host(module, DEVICE, None, found.nodes)]


def scaled(build: Graph, x: fx.Node) -> fx.Node:
    scale = build.call(torch.sqrt, build.call(torch.tensor, 4, dtype=torch.float))
    return build.call(operator.truediv, x, scale)


def slopes(build: Graph, x: fx.Node) -> fx.Node:
    table = build.call("to", build.call(torch.tensor, [1.0, 0.5, 0.25, 0.125]), DEVICE)
    return build.call(operator.add, x, table)


def like_the_input(build: Graph, x: fx.Node) -> fx.Node:
    table = build.call("type_as", build.call(torch.full, (4,), -1e9), x)
    return build.call(operator.add, x, table)


def on_the_device(build: Graph, x: fx.Node) -> fx.Node:
    return build.call(operator.add, x, build.call(torch.tensor, [1.0, 2.0, 3.0, 4.0], device=DEVICE))


def new_of_the_input(build: Graph, x: fx.Node) -> fx.Node:
    return build.call(operator.add, x, build.call("new_tensor", x, [1.0, 2.0, 3.0, 4.0]))


def filled(build: Graph, x: fx.Node) -> fx.Node:
    table = build.call(torch.zeros, 4)
    build.call(operator.setitem, table, 1, 3.0)
    table = build.call(operator.iadd, table, 1)
    return build.call(operator.add, x, build.call("to", table, DEVICE))


def indexed(build: Graph, x: fx.Node) -> fx.Node:
    return build.call(operator.getitem, x, build.call(torch.tensor, [0, 1]))


def indexed_by_a_list(build: Graph, x: fx.Node) -> fx.Node:
    build.call(operator.setitem, x, (Ellipsis, [1, 0]), 0.5)
    return build.call(operator.getitem, x, [0, 3])


@pytest.mark.parametrize(
    ("make", "values"),
    [
        (scaled, 0),
        (slopes, 1),
        (like_the_input, 1),
        (on_the_device, 1),
        (new_of_the_input, 1),
        (filled, 1),
        (indexed, 1),
        (indexed_by_a_list, 2),
    ],
)
def test_a_constant_is_copied_when_the_step_is_traced(make: Make, values: int) -> None:
    build = Graph()
    module, found = build.made_once(make(build, build.x))
    assert len(found.told) == len(list(module.buffers())) == values
    assert not problems(module, found)
    copies = [
        node
        for node in module.graph.nodes
        if any(read in found.nodes for read in node.all_input_nodes)
        and isinstance(node.meta.get("example_value"), Tensor)
        and node.meta["example_value"].device == DEVICE
    ]
    assert [node.target for node in copies] == ([operator.truediv] if make is scaled else [])
    result: Any = module(build.x.meta["example_value"])[0]
    assert result.device == DEVICE and result.shape[-1] == 4


def test_sizes_that_torch_computes_of_numbers_stay_on_the_host() -> None:
    """As Longformer and LED count chunks: an operation of the device reads such a size where it is."""
    build = Graph()
    count = build.call(torch.div, 16, 2, rounding_mode="trunc")
    rows = build.call(operator.sub, count, 6)
    module, found = build.made_once(build.call("view", build.x, rows, 8))
    assert {count, rows} <= found.nodes and not found.told and not problems(module, found)
    assert module(build.x.meta["example_value"])[0].shape == (2, 8)


def test_a_tensor_without_elements_stays_on_the_host() -> None:
    """As WavLM gives one to its attention in the place of weights that are not used."""
    build = Graph()
    nothing = build.call(torch.empty, [0])
    kept = build.graph.call_function(WITH_UNUSED, (build.x, nothing))
    kept.meta["example_value"] = build.x.meta["example_value"]
    module, found = build.made_once(kept)
    assert nothing in found.nodes and not found.told and not problems(module, found)


def drawn(build: Graph, x: fx.Node) -> fx.Node:
    return build.call(operator.add, x, build.call("to", build.call(torch.rand, 4), DEVICE))


def drawn_in_place(build: Graph, x: fx.Node) -> fx.Node:
    table = build.call(torch.zeros, 4)
    build.call("uniform_", table)
    return build.call(operator.add, x, build.call("to", table, DEVICE))


def whatever_lies_there(build: Graph, x: fx.Node) -> fx.Node:
    return build.call(operator.add, x, build.call("to", build.call(torch.empty, 4), DEVICE))


def large(build: Graph, x: fx.Node) -> fx.Node:
    table = build.call("to", build.call(torch.zeros, 5 << 20), DEVICE)
    return build.call(operator.add, x, build.call("sum", table))


def of_somebody_else(build: Graph, x: fx.Node) -> fx.Node:
    def counted(table: Tensor) -> Tensor:
        return table + 1

    table = build.call(counted, build.call(torch.zeros, 4))
    return build.call(operator.add, x, build.call("to", table, DEVICE))


def of_the_generator(build: Graph, x: fx.Node) -> fx.Node:
    state = build.call(torch.get_rng_state)
    return build.call(operator.add, x, build.call("sum", build.call("to", state, DEVICE)))


@pytest.mark.parametrize(
    "make", [drawn, drawn_in_place, whatever_lies_there, large, of_somebody_else, of_the_generator]
)
def test_what_is_no_constant_stays(make: Make) -> None:
    state = torch.get_rng_state()
    build = Graph()
    torch.set_rng_state(state)
    result = make(build, build.x)
    state = torch.get_rng_state()
    module, found = build.made_once(result)
    assert not found.told and not list(module.buffers())
    assert torch.equal(torch.get_rng_state(), state), "looking draws nothing"
    if make is not large:
        assert "makes a tensor on cpu inside the step" in problems(module, found)[0]


def test_lists_that_are_no_indices_of_integers_stay() -> None:
    build = Graph()
    mask = build.graph.call_function(operator.getitem, (build.x, [True, False, True, True]))
    mask.meta["example_value"] = build.x.meta["example_value"][:3]
    build.call(operator.getitem, build.x, ([], slice(None)))
    module, found = build.made_once(build.call(operator.getitem, build.call(torch.zeros, 4), [0]))
    assert not found.told and not list(module.buffers())


def test_a_constant_that_others_write_to_stays() -> None:
    def foreach(build: Graph, other: fx.Node) -> None:
        build.graph.call_function(torch._foreach_add_, ([other], [build.x]))

    def a_slice(build: Graph, other: fx.Node) -> None:
        build.graph.call_function(operator.setitem, (other, slice(1), build.x))

    def an_output(build: Graph, other: fx.Node) -> None:
        build.graph.call_function(torch.add, (build.x, 1), {"out": other})

    for write in (foreach, a_slice, an_output):
        build = Graph()
        table = build.call("to", build.call(torch.zeros, 4), DEVICE)
        write(build, build.call(torch.ones, 4))
        module, found = build.made_once(build.call(operator.add, build.x, table))
        assert not found.told and "makes a tensor on cpu" in problems(module, found)[0]


def test_a_constant_that_is_returned_is_no_constant() -> None:
    build = Graph()
    table = build.call(torch.zeros, 4)
    module, found = build.made_once([build.x, table])
    assert "zeros makes a tensor on cpu inside the step" in problems(module, found)[0]


def test_nothing_changes_on_a_cpu() -> None:
    build = Graph()
    build.graph.output((slopes(build, build.x),))
    module = fx.GraphModule(torch.nn.Module(), build.graph)
    code = module.code
    assert make_once(module, torch.device("cpu")) == HostConstants() and module.code == code


class Tables(nn.Module):
    """Makes constants on the host in each step, in the ways that models do."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(32, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x) / torch.sqrt(torch.tensor(x.shape[-1], dtype=torch.float))
        x = x + torch.tensor([2.0**-i for i in range(8)]).to(x) + torch.arange(8).to(x.device)
        table = torch.zeros(8)
        table[1] = 3.0
        table += 1
        x = x * table.to(x.device) + x.new_tensor([float(i) for i in range(8)])
        written = torch.full((8,), -0.5).type_as(x)
        written += x.detach().mean()
        x = x + written + torch.linspace(0, 1, 8).to(x)
        x = torch.where(x > 0, x, torch.tensor(0.125)) * torch.tensor(2.0, device=x.device)
        x = x[:, torch.tensor([1, 0, 3, 2, 5, 4, 7, 6])] + x[..., [-2]] + x[[0, 1]].mean()
        return self.last(x)  # type: ignore[no-any-return]


@pytest.fixture
def as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies to the CPU count as copies to a device."""

    def is_copied(constants: Any, node: fx.Node, example: Tensor) -> bool:
        return node.target in (torch.tensor, "to", "type_as")

    monkeypatch.setattr(host_constants, "_ON_HOST", ())
    monkeypatch.setattr(host_constants._Constants, "_is_copied", is_copied)


@pytest.mark.usefixtures("as_on_a_device")
@pytest.mark.parametrize("kernels", ["eager", pytest.param("compiled", marks=pytest.mark.slow)])
def test_a_traced_step_computes_the_same_with_constants_that_are_made_once(kernels: str) -> None:
    torch.manual_seed(0)
    model = Tables()
    batches = [torch.randn(16, 32) for _ in range(4)]

    def fn(x: Tensor) -> Tensor:
        return model(x).square().mean()  # type: ignore[no-any-return]

    def trained(call: Any) -> list[Tensor]:
        found = []
        for x in batches:
            model.zero_grad()
            loss = call(fn, (x,), {})
            loss.backward()
            found += [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        return found

    trace = Trace(torch.device("cpu"), compiler=compile_whole if kernels == "compiled" else None)
    found = trained(trace)
    assert trace.problem is None and not trace.left
    assert len(trace.made_once) >= 7 and all("test_host_constants.py:" in told for told in trace.made_once)
    expected = trained(plain_call)
    if kernels == "eager":
        assert differs(expected, found) is None
    else:
        for one, other in zip(expected, found, strict=True):
            torch.testing.assert_close(one, other)
