"""What Inductor gets of a step that is compiled to be captured as a whole."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.compile_fx
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.parallel import DistributedDataParallel
from training import differs

from pygraph_train.parallel.replicas import Replicas
from pygraph_train.regions.inductor import _with_small_ends_together, compile_whole
from pygraph_train.tracing.trace import Trace
from tests.ranks import alone_in_a_group

FOREACH_COPY = torch.ops.aten._foreach_copy.default


class Layers(nn.Module):
    """Linear layers in half precision, cast by hand: AOTAutograd's cache takes no autocast."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.randn(8, 8) for _ in range(depth)])

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = (x.to(torch.bfloat16) @ weight.to(torch.bfloat16)).float().tanh()
        return x.square().mean()


def under_autocast(model: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return model(x).float().square().mean()


def linears() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(8, 8) for _ in range(4)))


@pytest.fixture
def batches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[int]]:
    """Casts run together in each graph that Inductor gets, with empty caches."""
    found: list[int] = []
    plain = torch._inductor.compile_fx.compile_fx_inner

    def compile_fx_inner(gm: torch.fx.GraphModule, inputs: Any, **kwargs: Any) -> Any:
        together = [node for node in gm.graph.nodes if node.target is FOREACH_COPY]
        found.append(sum(len(node.args[0]) for node in together))  # type: ignore[arg-type]
        return plain(gm, inputs, **kwargs)

    monkeypatch.setattr(torch._inductor.compile_fx, "compile_fx_inner", compile_fx_inner)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    torch._dynamo.reset()
    counters.clear()
    yield found
    torch._dynamo.reset()


def trained(call: Any, model: nn.Module, *args: Any) -> list[Tensor]:
    """The loss and the gradients."""
    model.zero_grad()
    loss = call(*args)
    loss.backward()
    return [loss.detach(), *(p.grad for p in model.parameters() if p.grad is not None)]


def compiled(model: nn.Module, fn: Any, *args: Any) -> tuple[list[Tensor], Trace]:
    torch._dynamo.reset()
    trace = Trace(torch.device("cpu"), compiler=compile_whole)
    return trained(lambda: trace(fn, args, {}), model), trace


@pytest.mark.slow
def test_casts_of_weights_and_of_their_gradients_run_together(batches: list[int]) -> None:
    model, x = linears(), torch.randn(4, 8)
    expected = trained(torch.compile(under_autocast), model, model, x)
    assert not batches
    found, trace = compiled(model, under_autocast, model, x)
    assert batches == [9, 4] and not trace.left and trace.problem is None
    assert differs(expected, found) is None


@pytest.mark.slow
@pytest.mark.usefixtures("batches")
def test_a_cache_has_an_entry_for_each_setting_of_the_switches_that_choose_kernels() -> None:
    model, x = Layers(2), torch.randn(8, 8)
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH, SDPBackend.FLASH_ATTENTION):
        with sdpa_kernel(backend):
            compiled(model, model, x)
    assert counters["aot_autograd"]["autograd_cache_saved"] == 2
    assert counters["aot_autograd"]["autograd_cache_hit"] == 1


@pytest.mark.slow
def test_caches_are_not_shared_with_those_who_compile_plainly(batches: list[int]) -> None:
    model, x = Layers(4), torch.randn(4, 8)
    plain = torch.compile(model)
    expected = trained(plain, model, x)
    assert counters["aot_autograd"]["autograd_cache_saved"] == 1
    found, _ = compiled(model, model, x)
    assert batches and all(batches), "what plain torch.compile made of it came from the cache"
    again, _ = compiled(model, model, x)
    assert counters["aot_autograd"]["autograd_cache_hit"] == 1
    assert differs(expected, found) is None and differs(expected, again) is None


@pytest.mark.slow
def test_a_compilation_that_fails_with_kernels_together_is_done_without(
    batches: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing() -> Any:
        raise AssertionError("no such tiling")

    model, x = linears(), torch.randn(4, 8)
    expected = trained(torch.compile(under_autocast), model, model, x)
    monkeypatch.setattr("pygraph_train.regions.inductor.small_ends_together", failing)
    found, trace = compiled(model, under_autocast, model, x)
    told = "small kernels were not put together, which failed: AssertionError: no such tiling"
    assert trace.left == [told, told]  # forward and backward
    assert differs(expected, found) is None


def test_a_failure_with_kernels_together_is_told_and_the_graph_compiled_as_it_was() -> None:
    tried: list[bool] = []

    def compile_kernels(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
        tried.append(torch._inductor.config.combo_kernels)
        assert len(gm.graph.nodes) == nodes
        if tried[-1]:
            gm.graph.erase_node(gm.graph.output_node())  # Inductor changes the graph that it gets
            raise AssertionError("no such tiling")
        return lambda args: gm(*args)

    gm, x, left = torch.fx.symbolic_trace(nn.Tanh()), torch.randn(3), []
    nodes = len(gm.graph.nodes)
    compiled = _with_small_ends_together(compile_kernels, gm, [x], left)
    assert torch.equal(compiled([x]), x.tanh()) and tried == [True, False]
    assert left == ["small kernels were not put together, which failed: AssertionError: no such tiling"]


def test_a_head_that_is_only_returned_gets_no_gradient(batches: list[int]) -> None:
    torch.manual_seed(0)
    model, x = nn.ModuleList(nn.Linear(8, 8) for _ in range(3)), torch.randn(4, 8)

    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = model[0](x).tanh()
        return model[1](hidden).square().mean(), model[2](hidden)

    for _ in range(2):  # the second one could come from the caches
        torch._dynamo.reset()
        trace = Trace(torch.device("cpu"), compiler=compile_whole)
        model.zero_grad()
        trace(step, (x,), {})[0].backward()
        assert [p.grad is None for p in model.parameters()] == [False] * 4 + [True] * 2


class Deep(nn.Module):
    """Layers under autocast, and the statistics of BatchNorm, which it writes."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))
        self.norm = nn.BatchNorm1d(64)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            for layer in self.layers:
                x = layer(x).relu()
        return self.norm(x.float()).square().mean()


def in_buckets(model: nn.Module, compiler: Any) -> Trace:
    """A trace that is compiled in pieces, whose buckets have nearly two layers each."""
    wrapper = DistributedDataParallel(model, bucket_cap_mb=0.03)
    return Trace(torch.device("cpu"), compiler=Replicas(wrapper).in_pieces(compiler))


@pytest.mark.slow
def test_gradients_of_a_bucket_are_there_before_the_backward_ends(batches: list[int]) -> None:
    torch.manual_seed(0)
    plain, x = Deep(), torch.randn(8, 64)
    model = copy.deepcopy(plain)
    expected, _ = compiled(plain, plain, x)
    assert len(batches) == 2, "one forward and one backward"
    batches.clear()
    with alone_in_a_group():
        trace = in_buckets(model, compile_whole)
        found = trained(lambda: trace(model, (x,), {}), model)
        assert trace.problem is None and not trace.left
        assert len(batches) >= 6, "a forward and a backward for each piece"
        ready: list[int] = []  # parameters, in the order of their gradients
        for i, parameter in enumerate(model.parameters()):
            parameter.register_post_accumulate_grad_hook(lambda _, i=i: ready.append(i))  # type: ignore[misc]
        again = trained(lambda: trace(model, (x,), {}), model)
    assert ready.index(10) < len(ready) // 2 < ready.index(0), "the last layer's gradient comes first"
    assert model.norm.num_batches_tracked == 2
    for gradients in (found, again):
        for one, other in zip(expected, gradients, strict=True):
            torch.testing.assert_close(one, other, rtol=2e-2, atol=1e-3)  # kernels are put together otherwise


@pytest.mark.slow
def test_a_step_that_cannot_be_compiled_in_pieces_is_compiled_as_one(batches: list[int]) -> None:
    calls: list[int] = []

    def second_fails(gm: torch.fx.GraphModule, inputs: list[Any], left: list[str]) -> Any:
        calls.append(len(gm.graph.nodes))
        if len(calls) == 2:
            raise RuntimeError("this piece is too odd")
        return compile_whole(gm, inputs, left)

    torch.manual_seed(0)
    plain, x = Deep(), torch.randn(8, 64)
    model = copy.deepcopy(plain)
    expected, _ = compiled(plain, plain, x)
    with alone_in_a_group():
        trace = in_buckets(model, second_fails)
        found = trained(lambda: trace(model, (x,), {}), model)
    assert trace.problem is None and len(calls) == 3
    why = "gradients are exchanged after the backward: it could not be compiled in pieces"
    assert trace.left == [f"{why}: this piece is too odd"]
    assert differs(expected, found) is None
