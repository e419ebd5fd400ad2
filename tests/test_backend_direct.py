"""Calls past AOTAutograd's runtime: what it would have done, they do as well, or leave to it."""

from __future__ import annotations

import contextlib
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from replays import regions_ran
from test_backend import (  # noqa: F401
    Net,
    accumulating,
    batches,
    compiled,
    hostile,
    regions,
    replays,
    same_as_plain,
    train,
    update,
)
from torch import nn
from torch.utils.checkpoint import checkpoint

from pygraph_train.regions import direct
from pygraph_train.regions import zeros as zeros_module


class Plain(nn.Module):
    """Nothing that a graph cannot express."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.last(F.dropout(F.gelu(self.first(x)), 0.3, self.training)))


@pytest.fixture(autouse=True)
def calls(hostile: Any, monkeypatch: pytest.MonkeyPatch) -> list[direct.Route]:  # noqa: F811
    """The routes of the calls that took the short way."""
    taken: list[direct.Route] = []
    apply = direct._apply

    def noted(route: direct.Route, *args: Any) -> Any:
        taken.append(route)
        return apply(route, *args)

    monkeypatch.setattr(direct, "_apply", noted)
    return taken


def kept(model: nn.Module, call: Any, opt: torch.optim.Optimizer) -> list[torch.Tensor]:
    """Outputs, losses and gradients of all steps."""
    values = []
    for x, y in batches(20):
        out = call(x)
        loss = F.cross_entropy(out, y)
        loss.backward()
        values += [out.detach(), loss.detach(), *(p.grad for p in model.parameters())]
        opt.step()
        opt.zero_grad()
    return values


@pytest.mark.parametrize(
    "options", [{}, {"phases": "forward"}, {"phases": "backward"}, {"indirection": "device"}]
)
@pytest.mark.parametrize("body", [kept, accumulating(24), lambda model, call, opt: train(call, opt, 20)])
def test_training_equals_plain_training(body: Any, options: dict[str, Any], calls: list[Any]) -> None:
    same_as_plain(body, Plain, **options, least=14)
    assert len(calls) >= 18 and len(set(map(id, calls))) == 1
    for phase in ("forward", "backward"):
        assert replays(phase) >= 15 or options.get("phases", phase) != phase


def test_it_can_be_switched_off(calls: list[Any]) -> None:
    same_as_plain(kept, Plain, direct=False, least=20)
    assert not calls and replays("forward") >= 15


class Several(nn.Module):
    """Some outputs need no gradient, one is often not used, an argument is a number that never changes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 3), nn.Linear(6, 3)
        self.second.bias.requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> Any:
        one, other = self.first(x).sin(), self.second(x)
        with torch.no_grad():
            shifted = one + self.unused
        return one, other, one.detach() * 2, other.argmax(-1), shifted


def test_several_outputs(calls: list[Any]) -> None:
    def body(model: nn.Module, call: Any, opt: torch.optim.Optimizer) -> list[torch.Tensor]:
        values = []
        for step, (x, y) in enumerate(batches(24)):
            one, other, twice, best, shifted = call(x)
            assert one.requires_grad and other.requires_grad
            assert not any(t.requires_grad for t in (twice, best, shifted))
            values += [twice, best, shifted]
            values.append(update(F.cross_entropy(one + (other if step % 3 else 0), y), opt))
            assert model.unused.grad is None
        return values

    same_as_plain(
        body, Several, without_graphs=True, least=35
    )  # unused outputs have gradients of zero when compiled
    assert len(calls) >= 20


class Solves(nn.Module):
    """Operators some of whose results, and inputs of the backward, are None."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 9), nn.Linear(9, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        square = self.first(x).view(-1, 3, 3)
        square = square @ square.mT + torch.eye(3)
        return self.last((torch.linalg.solve(square, square * 2) + torch.linalg.cholesky(square)).flatten(1))


def test_results_that_are_none(calls: list[Any]) -> None:
    least: Any = {"refused": "with_effects cannot be recorded by the CPU emulation"}
    if torch.__version__ < "2.13":  # has no such operator here
        least = {"least": 10}
    same_as_plain(lambda model, call, opt: train(call, opt, 12), Solves, **least)


def test_gradients_of_some_inputs_and_hooks(calls: list[Any]) -> None:
    def body(model: nn.Module, call: Any, opt: torch.optim.Optimizer) -> list[torch.Tensor]:
        seen: list[torch.Tensor] = []
        model.last.weight.register_hook(lambda g: seen.append(g.clone()) or g * 2)
        model.first.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
        for step, (x, y) in enumerate(batches(20)):
            x = x.requires_grad_(step % 2 == 0)
            loss = F.cross_entropy(call(x), y)
            if step % 4 == 0:
                seen += torch.autograd.grad(loss, [x, model.first.bias])
            elif step % 4 == 1:
                loss.backward(inputs=[model.last.weight])
                seen.append(model.last.weight.grad)
                opt.zero_grad()
            else:
                seen.append(update(loss, opt))
        return seen

    same_as_plain(
        body, Plain, without_graphs=True, least=20
    )  # hooks of a compiled function come in its own order
    assert len(calls) >= 12


def test_an_expanded_or_transposed_gradient_arrives_as_it_was_compiled_for(calls: list[Any]) -> None:
    def body(model: nn.Module, call: Any, opt: torch.optim.Optimizer) -> list[torch.Tensor]:
        values = []
        for step, (x, _) in enumerate(batches(20)):
            out = call(x)
            values.append(update(out.sum() if step % 2 else (out.t().contiguous().t() * x[:, :3]).sum(), opt))
        return values

    same_as_plain(body, Plain, least=30)
    assert len(calls) >= 18


def test_a_second_backward_is_refused_unless_the_graph_is_retained(calls: list[Any]) -> None:
    torch.manual_seed(0)
    model = Plain()
    with torch._functorch.config.patch(donated_buffer=False):
        call = compiled(model)
        for x, y in batches(8):
            loss = F.cross_entropy(call(x), y)
            loss.backward(retain_graph=True)
            first = [p.grad for p in model.parameters()]
            model.zero_grad()
            loss.backward()
            assert all(map(torch.equal, first, [p.grad for p in model.parameters()]))
            model.zero_grad()
            with pytest.raises(RuntimeError, match="backward through the graph a second time"):
                loss.backward()
    assert len(calls) >= 6
    regions_ran(1)


def test_parameters_changed_before_the_backward_are_noticed(calls: list[Any]) -> None:
    model = Plain()
    call = compiled(model)
    call(batches(1)[0][0]).sum().backward()  # compiles it
    for x, _ in batches(8):
        out = call(x).sum()
        with torch.no_grad():
            model.last.weight.mul_(1.5)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.backward()
    assert len(calls) >= 6
    regions_ran(1)


def test_a_second_derivative_is_refused(calls: list[Any]) -> None:
    model = Plain()
    with torch._functorch.config.patch(donated_buffer=False):
        call = compiled(model)
        for x, _ in batches(8):
            (slope,) = torch.autograd.grad(call(x).square().sum(), model.last.bias, create_graph=True)
            with pytest.raises(RuntimeError, match="does not currently support double backward"):
                slope.sum().backward()
    assert len(calls) >= 6
    regions_ran(1)


@pytest.mark.parametrize("replayed", [True, False])
def test_nothing_outlives_a_step_that_is_never_differentiated(replayed: bool, calls: list[Any]) -> None:
    model = Plain()
    call = compiled(model, warmup_runs=1 if replayed else 10**6)
    for x, y in batches(6):
        F.cross_entropy(call(x), y).backward()
    gc.collect()
    gc.disable()
    try:
        out = call(batches(1)[0][0])
        node, memory = weakref.ref(out.grad_fn), weakref.ref(out)
        del out
        assert node() is None and memory() is None
    finally:
        gc.enable()
    assert len(calls) >= 4
    if replayed:
        regions_ran(1)


def test_who_watches_what_is_saved_goes_the_long_way(calls: list[Any]) -> None:
    packed: list[torch.Size] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        packed.append(tensor.size())
        return tensor

    def body(model: nn.Module, call: Any, opt: torch.optim.Optimizer) -> list[torch.Tensor]:
        values = []
        for step, (x, y) in enumerate(batches(20)):
            if step % 2 and call is not model:
                with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
                    loss = F.cross_entropy(call(x), y)
            else:
                loss = F.cross_entropy(call(x), y)
            values.append(update(loss, opt))
        return values

    same_as_plain(body, Plain, least=30)
    assert 7 <= len(calls) <= 10 and len(packed) >= 20


def test_checkpointed_around_the_compiled_function(calls: list[Any]) -> None:
    def body(model: nn.Module, call: Any, opt: torch.optim.Optimizer) -> list[torch.Tensor]:
        return [
            update(F.cross_entropy(checkpoint(call, x, use_reentrant=False), y), opt) for x, y in batches(20)
        ]

    same_as_plain(body, Plain, least=45)


@pytest.mark.parametrize("around", [True, False])
def test_under_autocast(around: bool, calls: list[Any]) -> None:
    def body(model: nn.Module, call: Any, opt: torch.optim.Optimizer) -> list[torch.Tensor]:
        values = []
        for x, y in batches(20):
            with torch.autocast("cpu", torch.bfloat16):
                out = call(x)
                loss = F.cross_entropy(out, y)
                if around:
                    loss.backward()
            if not around:
                loss.backward()
            opt.step()
            opt.zero_grad()
            values += [out.detach(), loss.detach()]
        return values

    same_as_plain(body, Plain, without_graphs=True, least=30)
    assert len(calls) >= 18


class ReturnsAView(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> Any:
        out = self.first(x)
        return out, out[1:]


class WritesABuffer(ReturnsAView):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(6))

    def forward(self, x: torch.Tensor) -> Any:
        self.seen += x.sum(0)
        return self.first(x * self.seen), None


@pytest.mark.parametrize("kind", [ReturnsAView, WritesABuffer, Net])
def test_what_needs_the_runtime_goes_through_it(kind: Callable[[], nn.Module], calls: list[Any]) -> None:
    def body(model: nn.Module, call: Any, opt: torch.optim.Optimizer) -> list[torch.Tensor]:
        values = []
        for x, y in batches(16):
            out = call(x)
            values.append(update(F.cross_entropy(out[0] if isinstance(out, tuple) else out, y), opt))
        return values

    same_as_plain(body, kind, least=20)
    assert not calls and replays("forward") >= 10


def test_changing_shapes(calls: list[Any]) -> None:
    def body(model: nn.Module, call: Any, opt: torch.optim.Optimizer) -> list[torch.Tensor]:
        return [
            update(F.cross_entropy(call(x[: 5 - step % 3]), y[: 5 - step % 3]), opt)
            for step, (x, y) in enumerate(batches(24))
        ]

    same_as_plain(body, Plain, least=30)


def test_outputs_changed_in_place_before_the_backward(calls: list[Any]) -> None:
    class Viewed(Plain):
        def forward(self, x: torch.Tensor) -> Any:
            hidden = self.first(x)
            return self.last(hidden).view(3, 5), hidden.detach()

    def body(model: nn.Module, call: Any, opt: torch.optim.Optimizer) -> list[torch.Tensor]:
        values = []
        for x, _ in batches(24):
            out, hidden = call(x)
            out.mul_(2)
            values += [update(out.square().mean(), opt), out.detach(), hidden.add_(1)]
        return values

    same_as_plain(body, Viewed, without_graphs=True, warmup_runs=8, least=25)
    assert len(calls) >= 18 and replays("forward") >= 10


def test_a_retained_graph_with_donated_buffers_is_refused_as_aotautograd_does(calls: list[Any]) -> None:
    model = Plain()
    call = compiled(model)
    F.cross_entropy(call(batches(1)[0][0]), batches(1)[0][1]).backward()
    for x, y in batches(8):
        loss = F.cross_entropy(call(x), y)
        with pytest.raises(RuntimeError, match="non-empty donated buffers"):
            loss.backward(retain_graph=True)
    assert len(calls) >= 6
    regions_ran(1)


class Multiplies(nn.Module):
    """Its backward needs its input as it was."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.weight = nn.Linear(6, 6), nn.Parameter(torch.randn(6, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x.sin() * x @ self.weight) * self.first(x)


@pytest.mark.parametrize("warmup_runs", [1, 3])
def test_an_input_changed_before_the_backward_is_noticed(warmup_runs: int, calls: list[Any]) -> None:
    call = compiled(Multiplies(), warmup_runs=warmup_runs)
    for x, _ in batches(6):
        call(x).sum().backward()
    pending = [(x, call(x).sum()) for x, _ in batches(6)]  # some of them cannot come from the graph
    for x, out in reversed(pending):
        x.mul_(3)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.backward()
    assert len(calls) >= 6
    regions_ran(1)


def _hidden(model: Plain, x: torch.Tensor) -> torch.Tensor:
    return model.last(model.first(x)).exp()


@pytest.mark.parametrize("options", [{}, {"direct": False}, {"phases": "forward"}, {"phases": "backward"}])
@pytest.mark.parametrize("size", [5, 40_000])
@pytest.mark.parametrize("edit", [lambda out: out.mul_(2), lambda out: out.detach().mul_(2)])
def test_an_output_that_is_saved_and_changed_is_noticed(
    edit: Any, size: int, options: dict[str, Any]
) -> None:
    class Squashed(nn.Sequential):
        def __init__(self) -> None:
            super().__init__(nn.Linear(6, 8), nn.Tanh())

    def body(model: nn.Module, call: Any, opt: torch.optim.Optimizer) -> list[torch.Tensor]:
        values = []
        for step, (x, _) in enumerate(batches(24, size)):
            out = call(x)
            values.append(out.detach().clone())
            kept = out
            if step % 4 == 3:
                edit(out)
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    out.sum().backward()
            else:
                values.append(update(out.square().mean(), opt))
                kept.detach().mul_(2)  # after its backward it may be
        return values

    same_as_plain(body, Squashed, **options, least=13)
    assert replays(options.get("phases", "forward")) >= 10


@pytest.mark.parametrize(
    "forward",
    [
        lambda model, x: (_hidden(model, x).sin(), model.last.weight.detach()),
        lambda model, x: (_hidden(model, x).sin() * x[:, :3].exp(), x.detach()),
        lambda model, x: (lambda h: (h.sin(), h.detach()))(_hidden(model, x)),
    ],
    ids=["parameter", "input", "result"],
)
@pytest.mark.parametrize("warmup_runs", [1, 10**6])
def test_a_detached_output_shares_its_version(forward: Any, warmup_runs: int, calls: list[Any]) -> None:
    class Detaching(Plain):
        def forward(self, x: torch.Tensor) -> Any:
            return forward(self, x)

    model = Detaching()
    call = compiled(model, warmup_runs=warmup_runs)
    for x, _ in batches(4):
        call(x)[0].sum().backward()
    for x, _ in batches(6):
        weight = model.first.weight
        (expected,) = torch.autograd.grad(model(x)[0].sum(), weight)
        out, detached = call(x)
        with torch.no_grad():
            detached.mul_(2)
        if warmup_runs == 1:
            # what a graph saves may be a copy, which nobody has changed
            with contextlib.suppress(RuntimeError):
                (gradient,) = torch.autograd.grad(out.sum(), weight)
                torch.testing.assert_close(gradient, expected)
            continue
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            out.sum().backward()
    if warmup_runs == 1:
        regions_ran(1)


@pytest.mark.parametrize("warmup_runs", [1, 10**6])
def test_a_saved_view_of_an_output_is_freed_with_it(warmup_runs: int, calls: list[Any]) -> None:
    class Shared(Multiplies):
        def forward(self, x: torch.Tensor) -> Any:
            h = self.first(x).sin()
            return h @ self.weight, h

    call = compiled(Shared(), warmup_runs=warmup_runs)
    inputs = [torch.stack([x, x]) for x, _ in batches(5)]  # the product saves a view of its 3-D operand
    for x in inputs:
        sum(t.sum() for t in call(x)).backward()
    gc.collect()
    gc.disable()
    try:
        out, h = call(inputs[0])
        left = [weakref.ref(t) for t in (out, h, out.grad_fn)]
        del out, h
        assert [t() for t in left] == [None, None, None]
    finally:
        gc.enable()
    assert len(calls) >= 4
    if warmup_runs == 1:
        regions_ran(1)


def test_a_function_that_changes_the_grad_mode_goes_the_long_way(calls: list[Any]) -> None:
    class Stops(Multiplies):
        def forward(self, x: torch.Tensor) -> Any:
            y = x @ self.weight
            z = y.sin()
            torch.set_grad_enabled(False)
            return z, y

    model = Stops()
    call = compiled(model)
    for x, _ in batches(6):
        try:
            out, _ = call(x)
            assert not torch.is_grad_enabled()
        finally:
            torch.set_grad_enabled(True)
        out.sum().backward()
    assert not calls
    regions_ran(1)


def test_compiled_autograd_around_the_backward_alone(calls: list[Any]) -> None:
    from torch._dynamo import compiled_autograd

    model = Plain()
    call = compiled(model)
    for step, (x, _) in enumerate(batches(8)):
        total = call(x).sum()  # saves nothing itself
        if step % 2 == 0:
            total.backward()
            continue
        with compiled_autograd._enable(lambda graph: graph):
            total.backward()
        with pytest.raises(RuntimeError, match="second time"):
            total.backward()
    assert len(calls) >= 6
    regions_ran(1)


class WithLogits(Plain):
    """As models of transformers return it: a loss, and logits that nobody differentiates."""

    def forward(self, x: torch.Tensor) -> Any:
        logits = super().forward(x)
        return logits.square().mean(), logits


@pytest.mark.parametrize("options", [{}, {"indirection": "device"}, {"phases": "backward"}])
def test_gradients_that_are_not_there_are_made_once(
    options: dict[str, Any], calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zeros_module, "LARGE", 1)

    def body(model: nn.Module, call: Any, opt: torch.optim.Optimizer) -> list[torch.Tensor]:
        values = []
        for step, (x, _) in enumerate(batches(24)):
            loss, logits = call(x)
            needed = step in (12, 13)  # now and then the other one is differentiated
            values += [update(loss + logits.sum() if needed else loss, opt), logits.detach()]
        return values

    same_as_plain(body, WithLogits, warmup_runs=4, **options, least=14)
    assert len(calls) >= 22 and replays("backward") >= 16
    (backward,) = regions("backward")
    if options.get("phases") != "backward":
        assert backward.copied_bytes <= 4, backward  # the gradient of the loss


class WithCache(Plain):
    """As a decoder returns it: besides the loss, logits, and keys and values of every layer."""

    def forward(self, x: torch.Tensor) -> Any:
        logits = super().forward(x)
        return logits.square().mean(), logits, logits[:, 1:] * 2, logits.t().double() + 1


def test_gradients_that_are_not_there_share_their_memory(
    calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zeros_module, "LARGE", 1)
    made: list[torch.Tensor] = []
    shared = direct.Zeros._shared

    def recorded(zeros: direct.Zeros, tangent: Any) -> torch.Tensor:
        made.append(shared(zeros, tangent))
        return made[-1]

    monkeypatch.setattr(direct.Zeros, "_shared", recorded)

    def body(model: nn.Module, call: Any, opt: torch.optim.Optimizer) -> list[torch.Tensor]:
        values = []
        for step, (x, _) in enumerate(batches(24)):
            loss, logits, keys, cached = call(x)
            loss = loss + cached.float().sum() if step in (12, 13) else loss
            values += [update(loss, opt), logits.detach(), keys.detach(), cached.detach()]
        return values

    same_as_plain(body, WithCache, warmup_runs=4, least=30)
    assert replays("backward") >= 16
    assert len(made) == 3 and not any(zeros.any() for zeros in made)
    memory = {zeros.untyped_storage().data_ptr(): zeros.untyped_storage().nbytes() for zeros in made}
    assert len(memory) <= 2 and max(memory.values()) == max(zeros.nbytes for zeros in made)
    assert {tuple(zeros.shape) for zeros in made} == {(5, 3), (5, 2), (3, 5)}


class Adds(Plain):
    """The gradient of `bias` is that of the second output."""

    def forward(self, x: torch.Tensor, bias: torch.Tensor) -> Any:
        return super().forward(x), bias + 1


def test_a_gradient_that_is_handed_on_is_the_callers_own(
    calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(zeros_module, "LARGE", 1)

    model = Adds()
    call = compiled(model)
    for x, _ in batches(12):
        bias = torch.zeros(3, requires_grad=True)
        out, _ = call(x, bias)
        (gradient,) = torch.autograd.grad(out.sum(), bias, materialize_grads=True)
        assert torch.equal(gradient, torch.zeros(3))
        gradient.add_(1)  # and nobody else's zeros
    assert len(calls) >= 10
    regions_ran(1)


def test_zeros_that_a_later_graph_hands_on_are_the_callers_own(
    calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first run with them copies them, and shows nothing."""
    monkeypatch.setattr(zeros_module, "LARGE", 1)

    model = Adds()
    call = compiled(model)
    for step, (x, _) in enumerate(batches(24)):
        bias = torch.zeros(3, requires_grad=True)
        out, shifted = call(x, bias)
        total = out.sum() + (shifted.sum() if step < 6 else 0)
        gradient, _ = torch.autograd.grad(total, [bias, model.first.weight], materialize_grads=True)
        assert torch.equal(gradient, torch.full((3,), float(step < 6))), step
        gradient.add_(1)
        if step in (8, 9, 10, 11):
            model.last.weight.data = model.last.weight.data.clone()  # captured again
    regions_ran(1)


class Heads(nn.Module):
    """Of which a step differentiates some. `moved` goes through a derivative that is zero everywhere."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.body, self.norm = nn.Linear(6, 8), nn.BatchNorm1d(8) if "norm" in kind else nn.Identity()
        self.heads = nn.ModuleList(nn.Linear(8, 3) for _ in range(3))
        self.moved = nn.Parameter(torch.rand(3))

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.norm(self.body(x).sin())
        if self.kind == "with a graph break":
            torch._dynamo.graph_break()
        one, other, third = (head(hidden) for head in self.heads)
        if self.kind == "with views":
            both = torch.stack([one, other])
            return both[0], both[1], third + self.moved.floor(), hidden
        return one, other, third + self.moved.floor(), hidden


@pytest.mark.parametrize("options", [{}, {"direct": False}, {"phases": "forward"}])
@pytest.mark.parametrize("kind", ["plain", "with a norm", "with views", "with a graph break"])
def test_gradients_that_are_not_there_stay_none(kind: str, options: dict[str, Any]) -> None:
    results = []
    for wrap in (lambda m: m, lambda m: compiled(m, **options)):
        torch.manual_seed(0)
        model = Heads(kind)
        call = wrap(model)
        opt = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
        values: list[Any] = []
        for step, (x, y) in enumerate(batches(24)):
            outputs = call(x)
            chosen = ((0,), (1,), (2,), (0, 2), (3,))[step % 5]
            opt.zero_grad()
            sum(F.cross_entropy(outputs[i][:, :3], y) for i in chosen).backward()
            values.append([None if p.grad is None else p.grad.clone() for p in model.parameters()])
            opt.step()
            values.append([p.detach().clone() for p in model.parameters()])
        results.append(values)
    for one, other in zip(*results, strict=True):
        assert [x is None for x in one] == [x is None for x in other]
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True) if a is not None)
    assert replays("forward") >= 15
    assert replays("backward") >= 15 or options.get("phases") == "forward"


def test_what_nothing_depends_on_is_told_as_without_a_graph() -> None:
    model = Heads("plain")
    call = compiled(model)
    for x, _ in batches(8):
        with pytest.raises(RuntimeError, match="appears to not have been used in the graph"):
            torch.autograd.grad(call(x)[0].sum(), [model.heads[1].weight])
        (found,) = torch.autograd.grad(call(x)[0].sum(), [model.heads[1].weight], allow_unused=True)
        assert found is None
    regions_ran(1)


def test_zeros_made_in_somebody_elses_capture_serve_nobody_else(
    hostile: Any,  # noqa: F811
    calls: list[Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(zeros_module, "LARGE", 1)
    model = WithLogits().eval()
    call = compiled(model, warmup_runs=10**6)
    parameters = list(model.parameters())
    data = [x for x, _ in batches(8)]
    for x in data[:2]:
        torch.autograd.grad(call(x)[0], parameters)
    loss = call(data[2])[0]
    graph, _ = hostile.engine.capture(lambda: torch.autograd.grad(loss, parameters))
    for x in data[3:]:
        found = torch.autograd.grad(call(x)[0], parameters)
        torch.testing.assert_close(found, torch.autograd.grad(model(x)[0], parameters))
    graph.close()
    assert len(calls) >= 5
