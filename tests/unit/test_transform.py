"""What the code transformation of regions promises; the graphs are those of real modules."""

from __future__ import annotations

import inspect
import itertools
from typing import Any

import fake_device
import numpy as np
import pytest
import torch
from fake_device import device, example_inputs, fake_tensors, graphs_of, on_fake_device
from torch import fx, nn
from torch._inductor.lowering import lowerings

from pygraph_train.regions.passes import batch, items, relocate
from pygraph_train.regions.passes.draft import Draft
from pygraph_train.regions.transform import Transformed, transform

pytestmark = pytest.mark.quick

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _keep_constants_readable(monkeypatch: pytest.MonkeyPatch) -> None:
    """A constant cannot be copied to a device that does not exist."""
    monkeypatch.setattr(relocate, "on_device", lambda constant, _: constant)


def transformed(gm: fx.GraphModule, **options: Any) -> Transformed:
    """Transform a graph, and check what holds for every transformation."""
    before = gm.print_readable(print_output=False)
    result = transform(gm, example_inputs(gm), device(), **options)
    assert gm.print_readable(print_output=False) == before, "the caller's graph was modified"
    _check_same_interface(gm, result)
    _check_metas(result.gm)
    _check_same_values(gm, result.gm)
    return result


def _check_same_interface(gm: fx.GraphModule, result: Transformed) -> None:
    names = [node.name for node in gm.graph.nodes if node.op == "placeholder"]
    assert [node.name for node in result.gm.graph.nodes if node.op == "placeholder"] == names
    before, after = gm.graph.output_node(), result.gm.graph.output_node()
    assert len(before.args[0]) == len(after.args[0])
    assert before.meta == after.meta
    given = example_inputs(result.gm)
    assert len(result.example_inputs) == len(given)
    assert all(a is b for a, b in zip(result.example_inputs, given, strict=True))
    for i in result.staged:
        assert example_inputs(gm)[i].device == CPU and given[i].device == device()
    for i, (old, new) in enumerate(zip(before.args[0], after.args[0], strict=True)):
        if isinstance(old, fx.Node) and isinstance(old.meta["val"], torch.Tensor):
            moved = old.meta["val"].device != new.meta["val"].device
            handed_over = old.name in result.handed_over
            assert moved == (i in result.late or i in result.passthrough or handed_over)


def _check_metas(gm: fx.GraphModule) -> None:
    """Every meta says what running the graph on fake tensors gives."""
    gm.graph.lint()
    interpreter = _Recorder(gm)
    with example_mode(gm):
        interpreter.run(*example_inputs(gm))


class _Recorder(fx.Interpreter):
    def run_node(self, n: fx.Node) -> Any:
        if n.op != "call_function" or "unbacked_bindings" in n.meta:
            return n.meta.get("val")
        new, old = super().run_node(n), n.meta.get("val")
        if isinstance(old, torch.Tensor):
            assert (new.device, new.dtype, new.shape) == (old.device, old.dtype, old.shape), n
            assert new.stride() == old.stride(), n
        return old


def example_mode(gm: fx.GraphModule) -> Any:
    return next(value.fake_mode for value in example_inputs(gm) if isinstance(value, torch.Tensor))


def _check_same_values(before: fx.GraphModule, after: fx.GraphModule) -> None:
    """Both graphs, with the CPU in place of every device, give the same bits."""
    draws = any("random" in str(node.target) or "rand" in str(node.target) for node in before.graph.nodes)
    if draws or any("unbacked_bindings" in node.meta for node in after.graph.nodes):
        return
    # aten has other kernels for an exponent that is a number; Inductor has one
    powers = any("pow" in str(node.target) for node in before.graph.nodes)
    rtol = 1e-6 if powers else 0.0
    for seed in (0, 1):
        inputs = fake_device.random_inputs(before, seed)
        old = fake_device.run_on_cpu(before, inputs)
        new = fake_device.run_on_cpu(after, inputs)
        for a, b in zip(old, new, strict=True):
            if isinstance(a, torch.Tensor):
                assert (a.dtype, a.stride()) == (b.dtype, b.stride())
                torch.testing.assert_close(b, a, rtol=rtol, atol=0, equal_nan=True)
            else:
                assert a == b


def line_of(function: Any, text: str) -> str:
    """`file:line` of the first line of a function's source that contains the text."""
    lines, first = inspect.getsourcelines(function)
    return f"{__file__}:{first + next(i for i, line in enumerate(lines) if text in line)}"


def where(result: Transformed, by: str) -> set[str | None]:
    return {change.where for change in result.changes if change.by == by}


def cpu_nodes(gm: fx.GraphModule) -> list[str]:
    return [
        node.name
        for node in gm.graph.nodes
        if isinstance(node.meta.get("val"), torch.Tensor) and node.meta["val"].device == CPU
    ]


def there(*size: int, **options: Any) -> torch.Tensor:
    return torch.empty(size, device=device(), **options)


def one_graph(call: Any, *args: Any, **dynamo: Any) -> fx.GraphModule:
    with fake_tensors():
        graphs = graphs_of(call, *(make() for make in args), **dynamo)
    assert len(graphs) == 1
    return graphs[0]


def both_graphs(module: nn.Module, *args: Any) -> list[fx.GraphModule]:
    with fake_tensors():
        graphs = graphs_of(on_fake_device(module), *(make() for make in args))
    assert len(graphs) == 2
    return graphs


def x4(**options: Any) -> Any:
    return lambda: there(4, **options)


def cpu4(**options: Any) -> Any:
    return lambda: torch.empty(4, **options)


# --- CPU scalars ------------------------------------------------------------------------------------


class Attention(nn.Module):
    """As in the speech transformer: the temperature is a NumPy scalar."""

    def __init__(self, weights: nn.Module) -> None:
        super().__init__()
        self.weights = weights
        self.query, self.key = nn.Linear(8, 8), nn.Linear(8, 8)
        self.temperature = np.power(8, 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = torch.bmm(self.query(x), self.key(x).transpose(1, 2))
        scores = scores / self.temperature
        return self.weights(scores).sum()


def test_numpy_scalar_is_read_from_the_device_in_forward_and_backward() -> None:
    for gm in both_graphs(Attention(nn.Sigmoid()), lambda: there(2, 4, 8)):
        result = transformed(gm)
        scalars = [i for i, t in enumerate(example_inputs(gm)) if t.device == CPU]
        assert result.staged == tuple(scalars)
        assert len(scalars) == 1
        assert result.left == ()
        assert where(result, "cpu_scalars") == {line_of(Attention, "scores / self.temperature")}
        assert cpu_nodes(result.gm) == []


def test_scalar_saved_for_backward_is_passed_through_as_the_callers_own_tensor() -> None:
    forward, _ = both_graphs(Attention(nn.Sigmoid()), lambda: there(2, 4, 8))
    result = transformed(forward)
    (staged,) = result.staged
    (output,) = result.passthrough
    assert result.passthrough[output] == staged
    assert result.late == ()


def test_scalar_that_inductors_softmax_computes_with_moves_too() -> None:
    forward, backward = both_graphs(Attention(nn.Softmax(-1)), lambda: there(2, 4, 8))
    result = transformed(forward, hand_over=True)
    assert len(result.handed_over) == 1  # the scalar's sign
    for each in (result, transformed(backward, arriving=result.handed_over)):
        assert cpu_nodes(each.gm) == []
        assert each.late == () and each.left == ()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64])
@pytest.mark.parametrize("scalar", [torch.float64, torch.float32, torch.int64])
@pytest.mark.parametrize("dims", [0, 1])
def test_scalar_promotes_as_it_did_on_the_cpu(dtype: torch.dtype, scalar: torch.dtype, dims: int) -> None:
    def call(x: torch.Tensor, s: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return x / s, x + s, x * s, torch.where(x > s, x, s)

    gm = one_graph(call, lambda: there(*[4] * dims, dtype=dtype), lambda: torch.empty((), dtype=scalar))
    result = transformed(gm)
    if gm.graph.output_node().args[0][0].meta["val"].device == device():
        assert result.left == ()


def scalar_constants(x: torch.Tensor) -> torch.Tensor:
    x = x + torch.tensor(3.0)
    return x * torch.full((), 0.1, dtype=torch.float64)


def test_scalar_constants_are_built_on_the_device() -> None:
    result = transformed(one_graph(scalar_constants, x4()))
    assert cpu_nodes(result.gm) == []
    assert where(result, "cpu_scalars") == {
        line_of(scalar_constants, "tensor(3.0)"),
        line_of(scalar_constants, "torch.full"),
    }


def test_scalar_that_the_graph_writes_to_is_left() -> None:
    def count(x: torch.Tensor, steps: torch.Tensor) -> torch.Tensor:
        steps.add_(1)
        return x * steps

    gm = one_graph(count, x4(), lambda: torch.zeros(()))
    result = transformed(gm)
    assert result.gm is gm
    assert result.staged == ()
    assert any("writes to" in left.why for left in result.left)
    assert {left.where for left in result.left} >= {line_of(count, "steps.add_")}


# --- index and mask tensors -------------------------------------------------------------------------


class Interaction(nn.Module):
    """As in DLRM: the pairs of features are taken with indices that are made on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.bottom, self.top = nn.Linear(8, 8), nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = self.bottom(x)
        pairs = torch.bmm(features, features.transpose(1, 2))
        rows, columns = torch.tril_indices(4, 4, offset=-1)
        return self.top(pairs[:, rows, columns]).sum()


def test_tril_indices_are_built_on_the_device() -> None:
    forward, backward = both_graphs(Interaction(), lambda: there(2, 4, 8))
    result = transformed(forward, hand_over=True)
    assert cpu_nodes(result.gm) == []
    assert result.left == () and result.staged == ()
    assert where(result, "cpu_tensors") == {line_of(Interaction, "tril_indices")}
    result = transformed(backward, arriving=result.handed_over)
    assert cpu_nodes(result.gm) == []
    assert result.left == ()


def test_indices_saved_for_backward_are_handed_over_on_the_device() -> None:
    forward, backward = both_graphs(Interaction(), lambda: there(2, 4, 8))
    result = transformed(forward, hand_over=True)
    saved = {node.name for node in backward.graph.nodes if node.name in cpu_nodes(backward)}
    assert set(result.handed_over) == saved != set()
    assert result.late == ()
    arrived = transformed(backward, arriving=result.handed_over)
    assert arrived.staged == ()


def test_indices_saved_for_backward_are_late_and_staged_where_nobody_hands_them_over() -> None:
    forward, backward = both_graphs(Interaction(), lambda: there(2, 4, 8))
    result = transformed(forward)
    assert len(result.late) == 2 and result.handed_over == ()
    result = transformed(backward)
    assert len(result.staged) == 2
    assert result.left == ()


def test_input_that_arrives_on_the_device_is_copied_back_for_what_must_run_on_the_cpu() -> None:
    def call(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x + y.exp().to(x.device)

    gm = one_graph(call, x4(), cpu4())
    (name,) = (
        node.name for node in gm.graph.nodes if node.op == "placeholder" and node.name in cpu_nodes(gm)
    )
    result = transformed(gm, arriving={name})
    assert result.staged == ()
    assert [v.device for v in result.example_inputs] == [device(), device()]
    assert {left.op for left in result.left} >= {"aten.exp"}


def masks(x: torch.Tensor) -> torch.Tensor:
    causal = torch.triu(torch.ones(4, 4), diagonal=1).bool()
    x = x.masked_fill(causal.to(x.device), -1e9)
    weights = torch.tensor([1.0, 0.0, 2.0, 1.0])
    x = x * weights.to(x.device)
    return x + torch.eye(4).to(x.device, torch.float64)


def test_masks_are_built_on_the_device() -> None:
    result = transformed(one_graph(masks, lambda: there(2, 4, 4)))
    assert cpu_nodes(result.gm) == []
    assert result.left == ()
    lines = {line_of(masks, text) for text in ("torch.triu", "torch.tensor", "torch.eye")}
    assert where(result, "cpu_tensors") == lines


class Positions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(10, 8), nn.Embedding(16, 8)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(ids.shape[1]).unsqueeze(0).expand_as(ids)
        return (self.token(ids) + self.position(positions.to(ids.device))).sum()


@pytest.mark.parametrize("dynamic", [False, True])
def test_position_ids_are_built_on_the_device(dynamic: bool) -> None:
    with fake_tensors():
        ids = there(2, 4, dtype=torch.int64)
        if dynamic:
            torch._dynamo.mark_dynamic(ids, 1, min=2, max=16)
        forward, _ = graphs_of(on_fake_device(Positions()), ids)
    result = transform(forward, example_inputs(forward), device()) if dynamic else transformed(forward)
    assert cpu_nodes(result.gm) == []
    assert result.left == ()
    assert where(result, "cpu_tensors") == {line_of(Positions, "torch.arange")}


def test_constructor_shared_with_cpu_work_that_stays_is_built_twice() -> None:
    def call(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ramp = torch.full((4,), 2.0)
        return x + ramp.to(x.device), torch.cos(ramp)

    result = transformed(one_graph(call, x4()))
    assert {left.op for left in result.left} == {"aten.full", "aten.cos"}
    assert where(result, "cpu_tensors") == {line_of(call, "torch.full")}


@pytest.mark.parametrize("draw", ["rand", "randn", "bernoulli", "randperm"])
def test_random_numbers_are_still_drawn_from_the_cpus_generator(draw: str) -> None:
    def call(x: torch.Tensor) -> torch.Tensor:
        drawn = {
            "rand": lambda: torch.rand(4),
            "randn": lambda: torch.randn(4),
            "bernoulli": lambda: torch.bernoulli(torch.full((4,), 0.5)),
            "randperm": lambda: torch.randperm(4),
        }[draw]()
        return x + drawn.to(x.device)

    gm = one_graph(call, x4())
    result = transformed(gm)
    assert result.gm is gm
    assert any("random generator" in left.why for left in result.left)
    assert any(left.why.startswith("copies") for left in result.left)


def test_functions_that_round_differently_on_the_device_stay_on_the_cpu() -> None:
    def call(x: torch.Tensor) -> torch.Tensor:
        angles = torch.arange(4) / 10
        return x * torch.sin(angles).to(x.device)

    gm = one_graph(call, x4())
    result = transformed(gm)
    assert result.gm is gm
    (sin,) = (left for left in result.left if left.op == "aten.sin")
    assert "rounds differently" in sin.why
    assert sin.where == line_of(call, "torch.sin")


def test_boolean_index_is_left() -> None:
    def call(x: torch.Tensor) -> torch.Tensor:
        return x[torch.tensor([True, False, True, True])]

    gm = one_graph(call, x4(), capture_dynamic_output_shape_ops=True)
    result = transformed(gm)
    assert any("depends on data" in left.why for left in result.left)


# --- CPU inputs -------------------------------------------------------------------------------------


def copies(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    x = x + a.to(x.device, non_blocking=True)
    return x + b.to(x.device, torch.float32)


def test_cpu_inputs_are_staged_and_their_copies_disappear() -> None:
    gm = one_graph(copies, x4(), cpu4(), cpu4(dtype=torch.int64))
    result = transformed(gm)
    assert len(result.staged) == 2
    assert not [n for n in result.gm.graph.nodes if n.target is torch.ops.prims.device_put.default]
    lines = {line_of(copies, text) for text in ("a.to", "b.to")}
    assert where(result, "cpu_inputs") == lines
    assert result.left == ()


def test_cpu_input_that_is_also_read_on_the_cpu_is_left() -> None:
    def call(x: torch.Tensor, a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x + a.to(x.device), torch.exp(a)

    gm = one_graph(call, x4(), cpu4())
    result = transformed(gm)
    assert result.gm is gm
    assert result.example_inputs is not None and result.staged == ()
    (copy,) = (left for left in result.left if left.why.startswith("copies"))
    assert "aten.exp" in copy.why
    assert copy.where == line_of(call, "a.to")


def test_cpu_input_that_is_mutated_is_left() -> None:
    def call(x: torch.Tensor, a: torch.Tensor) -> torch.Tensor:
        y = x + a.to(x.device)
        a.add_(1)
        return y

    gm = one_graph(call, x4(), cpu4())
    result = transformed(gm)
    assert result.gm is gm
    assert result.staged == ()


def test_cpu_work_on_an_input_moves_with_it() -> None:
    def call(x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        shifted = ids[1:] + 1
        return x[shifted.to(x.device)]

    result = transformed(one_graph(call, x4(), cpu4(dtype=torch.int64)))
    assert len(result.staged) == 1
    assert result.left == ()


def test_large_table_on_the_cpu_is_not_copied_to_the_device() -> None:
    def call(x: torch.Tensor, table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        return x + nn.functional.embedding(ids, table).to(x.device)

    gm = one_graph(call, x4(), lambda: torch.empty(1 << 20, 4), cpu4(dtype=torch.int64))
    result = transformed(gm)
    assert result.gm is gm
    assert any("large input (16 MiB)" in left.why for left in result.left)


def test_staged_copy_that_is_returned_is_a_tensor_of_its_own() -> None:
    def call(x: torch.Tensor, a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        there = a.to(x.device)
        return x + there, there.view(2, 2)

    result = transformed(one_graph(call, x4(), cpu4()))
    assert len(result.staged) == 1
    base = result.gm.graph.output_node().args[0][1]
    while base.target is torch.ops.aten.view.default:
        base = base.args[0]
    assert base.op == "call_function"  # the next run overwrites the staging buffer


def test_cpu_input_that_is_only_returned_stays() -> None:
    def call(x: torch.Tensor, a: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x * a.shape[0], a.view(2, 2)

    gm = one_graph(call, x4(), cpu4())
    result = transformed(gm)
    assert 0 not in result.late
    assert result.passthrough == {}


# --- CPU outputs ------------------------------------------------------------------------------------


class Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        loss = self.layer(x).square().mean()
        return loss.cpu()


def test_loss_on_the_cpu_is_copied_after_the_region() -> None:
    forward, backward = both_graphs(Loss(), lambda: there(4, 8))
    result = transformed(forward)
    assert result.late == (0,)
    assert where(result, "cpu_outputs") == {line_of(Loss, "loss.cpu")}
    assert result.left == ()
    result = transformed(backward)
    assert len(result.staged) == 1  # the gradient of the loss
    assert result.late == () and result.left == ()


def test_output_computed_on_the_cpu_from_device_results_moves_where_it_is_exact() -> None:
    def call(x: torch.Tensor) -> torch.Tensor:
        return x.sum().cpu() * 2

    result = transformed(one_graph(call, x4()))
    assert result.late == (0,)
    assert result.left == ()


def test_output_computed_on_the_cpu_is_left_where_it_is_not_exact() -> None:
    def call(x: torch.Tensor) -> torch.Tensor:
        return torch.exp(x.cpu())

    gm = one_graph(call, x4())
    result = transformed(gm)
    assert result.gm is gm
    assert [left.op for left in result.left] == ["aten._to_copy", "aten.exp"]
    assert {left.where for left in result.left} == {line_of(call, "torch.exp")}


def test_strided_result_is_returned_as_densely_as_before() -> None:
    def call(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = x * 2
        return y[:, 0].cpu(), y.t().cpu()

    result = transformed(one_graph(call, lambda: there(4, 3)))
    assert result.late == (0, 1)
    assert result.left == ()


def test_round_trip_through_the_cpu_disappears() -> None:
    def call(x: torch.Tensor) -> torch.Tensor:
        return (x.cpu() + 1).to(x.device) * 2

    result = transformed(one_graph(call, x4()))
    assert result.late == () and result.left == ()
    assert cpu_nodes(result.gm) == []


def test_input_returned_on_the_cpu_before_it_is_mutated_keeps_its_old_value() -> None:
    def call(x: torch.Tensor) -> torch.Tensor:
        before = x.cpu()
        x.add_(1)
        return before

    result = transformed(one_graph(call, x4()))
    (late,) = result.late
    assert result.gm.graph.output_node().args[0][late].op == "call_function"


# --- .item() ----------------------------------------------------------------------------------------

ITEMS = {"capture_scalar_outputs": True}


def tempered(x: torch.Tensor, t: torch.Tensor) -> tuple[torch.Tensor, ...]:
    k = t.item()
    filled = torch.full((3,), k, device=x.device)
    return (
        filled,
        x.masked_fill(x > 0, k),
        x.clamp(max=k),
        torch.where(x > 1, x, k),
        x / k,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32])
@pytest.mark.parametrize("scalar", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(), (4,)])
def test_item_in_device_arithmetic_is_kept_on_the_device(
    dtype: torch.dtype, scalar: torch.dtype, shape: tuple[int, ...]
) -> None:
    gm = one_graph(tempered, lambda: there(*shape, dtype=dtype), lambda: there(dtype=scalar), **ITEMS)
    result = transformed(gm)
    assert result.left == ()
    assert not [n for n in result.gm.graph.nodes if n.target in items.ITEM_OPS]
    assert where(result, "items") == {line_of(tempered, "t.item()")}


POWER = "torch 2.11 does not trace a power whose exponent comes from .item()"


@pytest.mark.skipif(torch.__version__ < "2.13", reason=POWER)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64])
@pytest.mark.parametrize("scalar", [torch.float32, torch.int64])
def test_item_as_an_exponent_or_divisor_is_kept_on_the_device(
    dtype: torch.dtype, scalar: torch.dtype
) -> None:
    def call(x: torch.Tensor, t: torch.Tensor) -> tuple[torch.Tensor, ...]:
        k = t.item() + 1
        return torch.pow(x, k), torch.remainder(x, k), torch.div(x, k, rounding_mode="floor"), x >= k

    gm = one_graph(call, x4(dtype=dtype), lambda: there(dtype=scalar), **ITEMS)
    assert transformed(gm).left == ()


def test_item_that_half_precision_may_round_is_left() -> None:
    def call(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return torch.remainder(x, t.item())

    gm = one_graph(call, x4(dtype=torch.bfloat16), lambda: there(), **ITEMS)
    result = transformed(gm)
    assert result.gm is gm
    assert ["rounded" in left.why for left in result.left] == [True]


@pytest.mark.skipif(torch.__version__ < "2.13", reason=POWER)
def test_arithmetic_between_numbers_is_done_as_python_does_it() -> None:
    def call(x: torch.Tensor, t: torch.Tensor) -> tuple[torch.Tensor, ...]:
        k = t.item()
        return x**k, x + (k * 3 - 1), torch.pow(x, 1 - k / 7), torch.remainder(x, -k)

    for dtype in (torch.int64, torch.float32):
        gm = one_graph(call, x4(), lambda dtype=dtype: there(1, dtype=dtype), **ITEMS)
        result = transformed(gm)
        assert result.left == ()


@pytest.mark.skipif(torch.__version__ < "2.13", reason=POWER)
def test_item_of_a_cpu_tensor_is_staged() -> None:
    def call(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return torch.pow(x, t.item())

    result = transformed(one_graph(call, x4(), lambda: torch.empty(()), **ITEMS))
    assert len(result.staged) == 1
    assert result.left == ()


def test_item_used_as_a_size_is_left() -> None:
    def call(x: torch.Tensor, t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        k = t.item()
        return x[:k], x * k

    gm = one_graph(call, x4(), lambda: there(dtype=torch.int64), **ITEMS)
    result = transformed(gm)
    assert result.gm is gm
    (left,) = result.left
    assert left.where == line_of(call, "t.item()")
    assert line_of(call, "x[:k]") in left.why


def test_item_that_is_returned_is_left() -> None:
    def call(x: torch.Tensor, t: torch.Tensor) -> tuple[torch.Tensor, int]:
        k = t.item()
        return x * k, k

    gm = one_graph(call, x4(), lambda: there(dtype=torch.int64), **ITEMS)
    result = transformed(gm)
    assert result.gm is gm
    assert [left.op for left in result.left] == ["aten._local_scalar_dense"]


def test_item_that_is_asserted_on_is_left() -> None:
    def call(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        k = t.item()
        torch._check(k > 3)
        return x * k

    gm = one_graph(call, x4(), lambda: there(dtype=torch.int64), **ITEMS)
    result = transformed(gm)
    assert result.gm is gm
    assert result.left


# --- the rest ---------------------------------------------------------------------------------------


def test_operators_that_wait_for_the_device_are_left_with_their_lines() -> None:
    def call(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        a = x.nonzero()
        b = torch.masked_select(x, x > 0)
        return a, b, torch.unique(x), x[x > 0]

    gm = one_graph(call, x4(), capture_dynamic_output_shape_ops=True)
    result = transformed(gm)
    assert result.gm is gm
    assert len(result.left) == 4
    assert [left.where for left in result.left][:2] == [line_of(call, "nonzero"), line_of(call, "masked_s")]


def test_graph_without_blockers_comes_back_as_it_is() -> None:
    gm = one_graph(lambda x: x.relu() * 2, x4())
    given = example_inputs(gm)
    result = transform(gm, given, device())
    assert result == Transformed(gm, given)


def test_graph_on_the_cpu_is_not_touched() -> None:
    gm = one_graph(lambda x: x + torch.tensor(2.0), cpu4())
    result = transform(gm, example_inputs(gm), device())
    assert result.gm is gm
    assert result.left == ()


@pytest.mark.skipif(torch.__version__ < "2.13", reason=POWER)
def test_pass_that_raises_is_undone_and_the_others_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    def call(x: torch.Tensor, t: torch.Tensor) -> torch.Tensor:
        return torch.pow(x, t.item()) + torch.tensor(2.0)

    gm = one_graph(call, x4(), lambda: there(), **ITEMS)
    monkeypatch.setattr(items, "_binary", lambda *_: 1 / 0)
    result = transformed(gm)
    assert {change.by for change in result.changes} == {"cpu_scalars"}
    assert {left.op for left in result.left} == {"pass items", "aten._local_scalar_dense"}
    assert "ZeroDivisionError" in result.left[0].why


def test_node_whose_meta_would_change_is_excluded_and_the_others_move(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def call(x: torch.Tensor) -> torch.Tensor:
        x = x + torch.arange(4).to(x.device)
        return x * torch.tril(torch.ones(4, 4)).to(x.device)

    gm = one_graph(call, x4())
    evaluate = Draft.evaluate

    def different(draft: Draft, node: fx.Node) -> Any:
        value = evaluate(draft, node)
        is_mask = node.target is torch.ops.aten.le.Scalar
        return value.to(torch.int8) if is_mask and value.device == device() else value

    monkeypatch.setattr(Draft, "evaluate", different)
    result = transform(gm, example_inputs(gm), device())
    assert where(result, "cpu_tensors") == {line_of(call, "torch.arange")}
    assert any("was tried" in left.why for left in result.left)


def test_inductor_knows_every_operator_that_passes_insert() -> None:
    gms = [
        one_graph(tempered, x4(), lambda: there(), **ITEMS),
        one_graph(copies, x4(), cpu4(), cpu4(dtype=torch.int64)),
        one_graph(masks, lambda: there(2, 4, 4)),
        *both_graphs(Layers(4, 8, 6), half5),
        *both_graphs(Norms(), lambda: there(5, 4)),
    ]
    for gm in gms:
        result = transformed(gm)
        inserted = {n.target for n in result.gm.graph.nodes} - {n.target for n in gm.graph.nodes}
        assert not [op for op in inserted if isinstance(op, torch._ops.OpOverload) and op not in lowerings]


# --- small operations run together ------------------------------------------------------------------


class Layers(nn.Sequential):
    """As under autocast: a cast for every weight and bias, and one for every weight's gradient."""

    def __init__(self, *widths: int) -> None:
        super().__init__(*(nn.Linear(a, b) for a, b in itertools.pairwise(widths)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self:
            low = (layer.weight.to(torch.bfloat16), layer.bias.to(torch.bfloat16))
            x = nn.functional.linear(x, *low).relu()
        return x.float().sum()


class Norms(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*(nn.BatchNorm1d(4) for _ in range(3)))


def half5() -> torch.Tensor:
    return there(5, 4, dtype=torch.bfloat16)


FOREACH_COPY = torch.ops.aten._foreach_copy.default


def batches(gm: fx.GraphModule, op: Any = FOREACH_COPY) -> list[int]:
    """How many operations each launch stands for."""
    return [len(node.args[0]) for node in gm.graph.nodes if node.target is op]


def casts(gm: fx.GraphModule) -> list[fx.Node]:
    return [n for n in gm.graph.nodes if n.target is torch.ops.prims.convert_element_type.default]


def test_weights_are_cast_together_and_so_are_their_gradients() -> None:
    forward, backward = both_graphs(Layers(4, 8, 6, 4), half5)
    result = transformed(forward)
    assert batches(result.gm) == [6]
    assert [change.what for change in result.changes] == ["6 casts of inputs run in 1 launch"]
    assert len(casts(result.gm)) == len(casts(forward)) - 6
    result = transformed(backward)
    assert batches(result.gm) == [3]
    assert [change.what for change in result.changes] == ["3 casts of results run in 1 launch"]
    assert result.left == ()


def test_batches_are_limited_in_bytes_and_in_number(monkeypatch: pytest.MonkeyPatch) -> None:
    forward, backward = both_graphs(Layers(4, 8, 6, 4, 4, 4), half5)
    monkeypatch.setattr(batch, "MANY", 4)
    assert batches(transformed(forward).gm) == [4, 4, 2]
    monkeypatch.setattr(batch, "MANY", 64)
    # weights of 32, 48, 24, 16 and 16 numbers of two bytes; gradients come last layer first
    monkeypatch.setattr(batch, "LARGE", 2 * (16 + 16 + 24))
    assert batches(transformed(backward).gm) == [3]
    monkeypatch.setattr(batch, "LARGE", 2 * (48 + 32))
    assert batches(transformed(backward).gm) == [3, 2]
    monkeypatch.setattr(batch, "LARGE", 1)
    assert transformed(backward).gm is backward


def test_views_of_a_gradient_that_is_cast_later_follow_it() -> None:
    class Flat(nn.Module):
        """As in XLNet: what is cast is looked at in another shape before it is returned."""

        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList(torch.randn(24) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for weight in self.weights:
                x = torch.mm(x, weight.view(3, 8).t().to(torch.bfloat16).t()).relu()[:, :3]
            return x.float().sum()

    _forward, backward = both_graphs(Flat(), lambda: there(5, 3, dtype=torch.bfloat16))
    result = transformed(backward)
    assert sum(batches(result.gm)) == 3
    assert any(node.op == "call_function" and node.target.is_view for node in _after(result.gm, FOREACH_COPY))


def _after(gm: fx.GraphModule, op: Any) -> list[fx.Node]:
    nodes = list(gm.graph.nodes)
    last = max(i for i, node in enumerate(nodes) if node.target is op)
    return [node for node in nodes[last:] if isinstance(node.target, torch._ops.OpOverload)]


def test_a_cast_that_a_fused_kernel_may_make_is_left_to_it() -> None:
    class Shared(nn.Module):
        """The cast weights are also read by kernels that Inductor writes."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for weight in (self.first, self.second):
                low = weight.to(torch.bfloat16)
                x = torch.mm(x, low) + low.sin()
            return x.float().sum()

    forward, _ = both_graphs(Shared(), lambda: there(4, 4, dtype=torch.bfloat16))
    assert len(casts(forward)) > 1
    assert transformed(forward).gm is forward


def test_a_bias_that_is_added_after_the_product_is_cast_there() -> None:
    def call(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        for bias in (a, b):
            x = torch.addmm(bias.to(x.dtype), x, x)
        return x

    wide = one_graph(call, *[lambda: there(4, 4)] + [lambda: there(4, dtype=torch.bfloat16)] * 2)
    assert len(casts(wide)) == 2 and transformed(wide).gm is wide
    half = one_graph(call, *[lambda: there(4, 4, dtype=torch.bfloat16)] + [x4()] * 2)
    assert batches(transformed(half).gm) == [2]


def test_a_bias_of_a_convolution_is_cast_where_it_is_added() -> None:
    class Convolutions(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Conv1d(4, 4, 3) for _ in range(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                low = (layer.weight.to(torch.bfloat16), layer.bias.to(torch.bfloat16))  # type: ignore[union-attr]
                x = nn.functional.conv1d(x, *low)
            return x.float().sum()

    forward, _ = both_graphs(Convolutions(), lambda: there(2, 4, 9, dtype=torch.bfloat16))
    result = transformed(forward)
    assert batches(result.gm) == [2]
    (together,) = [node for node in result.gm.graph.nodes if node.target is FOREACH_COPY]
    assert all(source.meta["val"].dim() == 3 for source in together.args[1])


def test_nothing_is_cast_together_with_a_size_that_is_not_known() -> None:
    def call(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return torch.mm(x.to(torch.bfloat16), y.to(torch.bfloat16)).sum()

    def inputs() -> list[Any]:
        return [lambda: there(6, 6), lambda: there(6, 6)]

    assert batches(transformed(one_graph(call, *inputs())).gm) == [2]
    symbolic = one_graph(call, *inputs(), assume_static_by_default=False)
    assert len(casts(symbolic)) == 2
    assert transform(symbolic, example_inputs(symbolic), device()).gm is symbolic


def test_nothing_is_cast_together_where_products_may_cast_on_the_way() -> None:
    forward, _ = both_graphs(Layers(4, 8, 6), half5)
    with torch._inductor.config.patch(max_autotune=True):
        assert transformed(forward).gm is forward
    assert batches(transformed(forward).gm) == [4]


def test_counters_of_norms_are_one_launch() -> None:
    forward, _ = both_graphs(Norms(), lambda: there(5, 4))
    result = transformed(forward)
    assert batches(result.gm, torch.ops.aten._foreach_add.Scalar) == [3]
    assert "3 counters run in 1 launch" in [change.what for change in result.changes]
    counters = [n for n in forward.graph.nodes if n.op == "placeholder" and n.meta["val"].dim() == 0]
    copies = [n for n in result.gm.graph.nodes if n.target is torch.ops.aten.copy_.default]
    assert {n.name for n in counters} <= {copy.args[0].name for copy in copies}
