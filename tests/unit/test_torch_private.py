"""What the private torch APIs are asked to do, where that can be seen without a GPU."""

from __future__ import annotations

import contextlib
import warnings
from typing import Any
from unittest import mock

import pytest
import torch
import torch._inductor.scheduler
import torch._inductor.sizevars
from torch._inductor.fx_passes import pad_mm

from pygraph_train.torch_private.cuda import accumulators_of_other_streams, begin_capture
from pygraph_train.torch_private.dynamo import raising_node
from pygraph_train.torch_private.hooks import hook_registrations, hooks_on_accumulation
from pygraph_train.torch_private.inductor import (
    kernels_for_all_sizes,
    small_ends,
    small_ends_together,
)

pytestmark = pytest.mark.quick


class GraphOnTheCpu:
    """Does what torch.cuda.CUDAGraph does when a capture begins."""

    def __init__(self) -> None:
        self.seed, self.other = torch.zeros(1, dtype=torch.int64), torch.zeros(3)
        self.begun: list[Any] = []

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
        self.seed.fill_(7)
        self.other.add_(1)
        self.begun.append((pool, capture_error_mode))


def test_a_capture_begins_without_writing_the_random_generators_state() -> None:
    graph: Any = GraphOnTheCpu()
    begin_capture(graph, (0, 1))
    assert graph.begun == [((0, 1), "thread_local")]
    assert graph.seed.item() == 0 and graph.other.tolist() == [1, 1, 1]
    graph.seed.fill_(7)  # and afterwards everything is as usual
    assert graph.seed.item() == 7


def test_looking_for_hooks_on_accumulation_leaves_no_trace() -> None:
    leaf = torch.zeros(2, requires_grad=True)
    node = torch.autograd.graph.get_gradient_edge(leaf).node
    assert hooks_on_accumulation(leaf) == []
    calls: list[int] = []
    handle = node.register_hook(lambda *_: calls.append(1))
    before = hook_registrations()
    for _ in range(2):
        assert len(hooks_on_accumulation(leaf)) == 1
    assert hook_registrations() == before
    handle.remove()
    assert hooks_on_accumulation(leaf) == []
    (leaf * 2).sum().backward()
    assert not calls and leaf.grad is not None


def test_the_warning_filter_goes_and_the_users_changes_stay() -> None:
    message = "The AccumulateGrad node's stream does not match the stream of the node"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with accumulators_of_other_streams():
            warnings.warn(message, stacklevel=1)
            warnings.filterwarnings("ignore", "set by the user")
        assert not caught
        warnings.warn(message, stacklevel=1)
        warnings.warn("set by the user", stacklevel=1)
    assert [str(w.message) for w in caught] == [message]


def _grouped(call: Any, *args: Any) -> list[list[set[str]]]:
    """Groups that `small_ends` makes of a function's kernels on the CPU, each kernel with what it writes.

    Inductor ends there: a C++ compiler would need seconds for kernels that nobody runs.
    """
    found: list[list[set[str]]] = []

    original = small_ends

    def grouping(scheduler: Any) -> list[Any]:
        groups = original(scheduler, "cpu")
        found.extend([set(node.get_buffer_names()) for node in group] for group in groups)
        returned = set(torch._inductor.virtualized.V.graph.get_output_names())
        assert all(names <= returned for group in found for names in group)
        raise RuntimeError("all groups are known")

    with (
        mock.patch("pygraph_train.torch_private.inductor.small_ends", grouping),
        torch._inductor.config.patch(force_disable_caches=True),
        small_ends_together(),
        pytest.raises(Exception, match="all groups are known"),
    ):
        torch.compile(call)(*args)
    torch._dynamo.reset()
    return found


def test_small_kernels_that_nothing_waits_for_are_grouped_by_size() -> None:
    def waves(small: list[torch.Tensor], other: torch.Tensor) -> list[torch.Tensor]:
        softmax = torch.mm(small[0], small[1]).softmax(1)  # the next product waits for it
        return [*(x.sin() for x in small), other.sin(), torch.mm(softmax, softmax)]

    groups = _grouped(waves, [torch.randn(16, 16) for _ in range(20)], torch.randn(8, 16))
    assert sorted(map(len, groups)) == [1, 4, 16]


def test_kernels_that_write_inputs_are_not_grouped() -> None:
    def waves(xs: list[torch.Tensor]) -> list[torch.Tensor]:
        for x in xs[:3]:
            x.sin_()
        return [x.cos() for x in xs[3:]]

    assert list(map(len, _grouped(waves, [torch.randn(16, 16) for _ in range(5)]))) == [2]


def test_large_kernels_are_not_grouped() -> None:
    def waves(xs: list[torch.Tensor]) -> list[torch.Tensor]:
        return [x.sin() for x in xs]

    assert _grouped(waves, [torch.randn(1024, 1024) for _ in range(3)]) == []


def test_kernels_of_sizes_that_change_are_not_grouped() -> None:
    """Small ones of one batch are large ones of another, and what they read waits for the end of the group."""

    def waves(weights: list[torch.Tensor], xs: list[torch.Tensor]) -> list[torch.Tensor]:
        return [*(w.sin() for w in weights), *(x.cos() for x in xs)]

    weights, xs = ([torch.rand(rows, 16) for _ in range(3)] for rows in (16, 5))
    assert list(map(len, _grouped(waves, weights, xs))) == [3, 3]
    for x in xs:
        torch._dynamo.mark_dynamic(x, 0)
    assert list(map(len, _grouped(waves, weights, xs))) == [3]


@pytest.mark.parametrize(
    ("hint", "grouped"), [("DEFAULT", []), ("INNER", []), ("OUTER_TINY", [3]), ("OUTER", [3])]
)
def test_sums_that_may_be_rounded_in_another_way_are_not_grouped(
    hint: str, grouped: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def sums(xs: list[torch.Tensor]) -> list[torch.Tensor]:
        return [x.sum(0) for x in xs]

    from torch._inductor.codegen.simd_kernel_features import SIMDKernelFeatures
    from torch._inductor.runtime.hints import ReductionHint

    hints = staticmethod(lambda node: ReductionHint[hint])  # Inductor has them on a GPU only
    monkeypatch.setattr(SIMDKernelFeatures, "reduction_hint", hints)
    assert list(map(len, _grouped(sums, [torch.randn(16, 16) for _ in range(3)]))) == grouped


def test_grouping_ends_with_the_compile_and_leaves_a_users_own_setting() -> None:
    config, together = torch._inductor.config, torch._inductor.scheduler.ForeachKernelSchedulerNode
    before = together.group_nodes_for_combo_kernels, together.__dict__["group_algorithm_for_combo_kernels"]
    with pytest.raises(ZeroDivisionError), small_ends_together():
        assert config.combo_kernels
        assert together.group_algorithm_for_combo_kernels is small_ends
        raise ZeroDivisionError
    assert not config.combo_kernels
    with config.patch(combo_kernels=True), small_ends_together():
        assert together.group_algorithm_for_combo_kernels is not small_ends
    assert before == (
        together.group_nodes_for_combo_kernels,
        together.__dict__["group_algorithm_for_combo_kernels"],
    )


def test_the_operation_of_a_traced_graph_that_raised_is_found() -> None:
    def fails(x: torch.Tensor) -> torch.Tensor:
        raise ValueError("no")

    graph = torch.fx.Graph()
    x = graph.placeholder("x")
    graph.call_function(torch.neg, (x,))
    failing = graph.call_function(fails, (x,))
    graph.output((failing,))
    module = torch.fx.GraphModule(torch.nn.Module(), graph)
    with pytest.raises(ValueError, match="no") as raised:
        module(torch.zeros(2))
    node = raising_node(raised.value)
    assert node is not None and node.target is fails
    assert raising_node(ValueError("of nobody")) is None


def _changing_size(hint: int) -> torch.SymInt:
    """What a batch has so many of, and another one may have more or fewer of."""
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

    known, source = ShapeEnv(), ConstantSource("size")
    symbol = known.create_symbol(hint, source=source, dynamic_dim=DimDynamic.DYNAMIC)
    size = known.create_symintnode(symbol, hint=hint, source=source)
    assert isinstance(size, torch.SymInt)
    return size


@pytest.mark.parametrize("changed", [False, True])
def test_whether_sizes_are_aligned_decides_nothing(changed: bool) -> None:
    import sympy
    from torch._inductor.sizevars import SizeVarAllocator
    from torch.utils._sympy.functions import Mod

    size = _changing_size(80)
    asked = SizeVarAllocator(size.node.shape_env)

    def is_aligned(number: Any) -> bool:
        return asked.guard_or_false(sympy.Eq(Mod(number, 8), 0))

    with kernels_for_all_sizes() if changed else contextlib.nullcontext():
        assert is_aligned(64 * size.node.expr) and is_aligned(sympy.Integer(8))
        assert is_aligned(size.node.expr) is not changed
        assert asked.guard_or_false(sympy.Lt(size.node.expr, 100)), "other questions are asked"
    aligned = [guard for guard in size.node.shape_env.guards if guard.expr.has(Mod)]
    assert len(aligned) == (0 if changed else 1)


@pytest.mark.parametrize("changed", [False, True])
def test_whether_padding_a_product_pays_decides_for_no_other_size(
    changed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor.fx_passes import pad_mm

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    size = _changing_size(80)
    with kernels_for_all_sizes() if changed else contextlib.nullcontext():
        assert pad_mm.is_mm_compute_bound(8 * size, 768, 30, torch.bfloat16)
    assert bool(size.node.shape_env.guards) is not changed


def test_threads_that_compile_at_a_time_leave_inductor_as_it_was() -> None:
    """One begins before the other has ended, and ends first."""
    answers = torch._inductor.sizevars.SizeVarAllocator
    before = answers.guard_or_false, pad_mm.is_mm_compute_bound
    one, other = kernels_for_all_sizes(), kernels_for_all_sizes()
    one.__enter__()
    other.__enter__()
    one.__exit__(None, None, None)
    assert answers.guard_or_false is not before[0]  # the other one still compiles
    other.__exit__(None, None, None)
    assert (answers.guard_or_false, pad_mm.is_mm_compute_bound) == before
