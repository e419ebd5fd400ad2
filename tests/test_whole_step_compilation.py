"""What Inductor gets of a step that is compiled to be captured as a whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.compile_fx
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn.attention import SDPBackend, sdpa_kernel
from training import differs

from pygraph_train.regions.inductor import _with_small_ends_together, compile_whole
from pygraph_train.tracing.trace import Trace

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
