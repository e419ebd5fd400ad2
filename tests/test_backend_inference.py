"""Calls without gradients past AOTAutograd's runtime: what it would have done, they do as well, or leave to it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from replays import regions_ran
from test_backend import (  # noqa: F401
    batches,
    compiled,
    hostile,
    replays,
    same_as_plain,
    update,
)
from test_backend_direct import Plain
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from pygraph_train import backend
from pygraph_train.regions import direct_inference


@pytest.fixture(autouse=True)
def calls(hostile: Any, monkeypatch: pytest.MonkeyPatch) -> list[Any]:  # noqa: F811
    """The regions of the calls that took the short way."""
    taken: list[Any] = []
    call = direct_inference._call

    def noted(region: Any, args: Any) -> Any:
        taken.append(region)
        return call(region, args)

    monkeypatch.setattr(direct_inference, "_call", noted)
    return taken


def predicted(steps: int = 20) -> Callable[..., list[torch.Tensor]]:
    def body(model: nn.Module, call: Any, opt: torch.optim.Optimizer) -> list[torch.Tensor]:
        with torch.no_grad():
            return [call(x) for x, _ in batches(steps)]  # all of them alive at the end

    return body


@pytest.mark.quick
@pytest.mark.parametrize(
    "options", [{}, {"phases": "forward"}, {"phases": "backward"}, {"indirection": "device"}]
)
def test_predictions_equal_those_of_plain_calls(options: dict[str, Any], calls: list[Any]) -> None:
    graphs: Any = (
        {"refused": "phases='backward' is set"} if options.get("phases") == "backward" else {"least": 15}
    )
    same_as_plain(predicted(), Plain, **options, **graphs)
    assert len(calls) >= 18 and len(set(map(id, calls))) == 1


def test_it_can_be_switched_off(calls: list[Any]) -> None:
    same_as_plain(predicted(), Plain, direct=False, least=15)
    assert not calls


class Pieces(Plain):
    """Between graph breaks, pieces that no gradient flows through."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shifted = x * 2 + 1
        torch._dynamo.graph_break()
        mask = shifted > 0
        torch._dynamo.graph_break()
        with torch.no_grad():
            scale = self.first.weight.norm()
        torch._dynamo.graph_break()
        return super().forward(torch.where(mask, shifted, x) / scale)


def test_pieces_of_a_training_step(calls: list[Any]) -> None:
    def body(model: nn.Module, call: Any, opt: torch.optim.Optimizer) -> list[torch.Tensor]:
        values = []
        for x, y in batches(20):
            values.append(update(F.cross_entropy(call(x), y), opt))
            assert torch.is_grad_enabled()
        return values

    same_as_plain(body, Pieces, least=70)
    assert len(calls) >= 40 and len(set(map(id, calls))) >= 2
    assert replays("inference") >= 30 and replays("backward") >= 15


def test_results_are_the_callers_own(calls: list[Any]) -> None:
    class Several(Plain):
        def forward(self, x: torch.Tensor) -> Any:
            y = super().forward(x)
            return y, y.argmax(-1), x @ self.first.weight.t(), y.mean()

    def body(model: nn.Module, call: Any, opt: torch.optim.Optimizer) -> list[torch.Tensor]:
        values = []
        for x, _ in batches(20):
            with torch.no_grad():
                results = call(x)
            assert not any(t.requires_grad or t._is_view() for t in results)
            weight = torch.ones(3, requires_grad=True)
            (results[0].requires_grad_() * weight).sum().backward()
            values += [results[0].grad, weight.grad, results[2].mul_(2).t_(), *results]
        return values

    same_as_plain(body, Several, least=15)
    assert len(calls) >= 18


def _returns_its_input(model: Plain, x: torch.Tensor) -> Any:
    return x, x + 1


def _returns_a_view_of_its_input(model: Plain, x: torch.Tensor) -> Any:
    return x[1:], x + 1


def _returns_a_parameter(model: Plain, x: torch.Tensor) -> Any:
    return model.first.weight, model.first(x)


def _returns_views_of_one_result(model: Plain, x: torch.Tensor) -> Any:
    y = model.first(x)
    return y, y[1:], y.t()


def _returns_the_same_twice(model: Plain, x: torch.Tensor) -> Any:
    y = model.first(x)
    return y, y


def _writes_its_input(model: Plain, x: torch.Tensor) -> Any:
    return x.mul_(2), model.first(x)


def _writes_a_parameter(model: Plain, x: torch.Tensor) -> Any:
    model.first.bias += x.mean()
    return (model.first(x),)


def _resizes_its_input(model: Plain, x: torch.Tensor) -> Any:
    x.t_()
    return (x + 1,)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("forward", "short"),
    [
        (_returns_its_input, True),  # Dynamo returns that itself
        (_returns_a_parameter, True),
        (_returns_the_same_twice, True),
        (_returns_views_of_one_result, True),  # no version is to be shared without gradients
        (_resizes_its_input, True),  # Dynamo leaves that to Python
        (_returns_a_view_of_its_input, False),
        (_writes_its_input, False),
        (_writes_a_parameter, False),
    ],
)
def test_what_the_runtime_puts_right_it_puts_right(forward: Any, short: bool, calls: list[Any]) -> None:
    class Model(Plain):
        def forward(self, x: torch.Tensor) -> Any:
            return forward(self, x)

    def body(model: nn.Module, call: Any, opt: torch.optim.Optimizer) -> list[torch.Tensor]:
        values = []
        for x, _ in batches(20):
            x = x.clone()
            versions = [t._version for t in (x, *model.parameters())]
            with torch.no_grad():
                results = call(x)
            now = [t._version for t in (x, *model.parameters())]
            same = [r is t for r in results for t in (x, *model.parameters(), *results)]
            shared = [
                r.untyped_storage()._cdata == t.untyped_storage()._cdata
                for r in results
                for t in (x, *model.parameters(), *results)
            ]
            told = [a > b for a, b in zip(now, versions, strict=True)] + same + shared
            values += [torch.tensor(told), x, *(r.clone() for r in results)]
            for r in results:
                if not any(r is p for p in model.parameters()):
                    r.detach().mul_(1.5)  # whoever shares its memory sees it
            values += [x.clone(), *(r.clone() for r in results)]
        return values

    same_as_plain(body, Model, least=10)
    assert len(calls) >= 18 if short else not calls


def test_a_function_that_changes_the_grad_mode_goes_the_long_way(calls: list[Any]) -> None:
    class Stops(Plain):
        def forward(self, x: torch.Tensor) -> Any:
            y = x.sin() * 2
            torch.set_grad_enabled(False)
            return y

    model = Stops()
    call = compiled(model)
    for x, _ in batches(6):
        try:
            assert torch.equal(call(x), x.sin() * 2)
            assert not torch.is_grad_enabled()
        finally:
            torch.set_grad_enabled(True)
    assert not calls
    regions_ran(1)


def test_arguments_that_need_a_gradient_and_results_that_have_none(calls: list[Any]) -> None:
    """The kernels run without gradients, as the function was compiled, and the caller's mode stays."""
    modes: list[bool] = []

    class Counts(Plain):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (self.first(x) > 0).sum(0)

    model = Counts()
    call = compiled(model, warmup_runs=10**6)
    inner = direct_inference._call

    def noted(region: Any, args: Any) -> Any:
        compiled_kernels = region._compiled

        def kernels(inputs: list[Any]) -> Any:
            modes.append(torch.is_grad_enabled())
            return compiled_kernels(inputs)

        region._compiled = kernels
        try:
            return inner(region, args)
        finally:
            region._compiled = compiled_kernels

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(direct_inference, "_call", noted)
        for x, _ in batches(6):
            assert torch.equal(call(x), model(x)) and torch.is_grad_enabled()
            assert not call(x).requires_grad
        region = calls[-1]

        def fails(inputs: list[Any]) -> Any:
            raise ValueError("planted")

        patch.setattr(region, "_compiled", fails)
        patch.setattr(direct_inference, "_call", inner)
        with pytest.raises(ValueError, match="planted"):
            call(batches(1)[0][0])
        assert torch.is_grad_enabled()
    assert len(modes) >= 10 and not any(modes)
    assert torch.equal(call(x), model(x))


def test_arguments_that_need_a_gradient_later(calls: list[Any]) -> None:
    class Scales(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (x.sin() * 2).sum(0)

    def body(model: nn.Module, call: Any, opt: torch.optim.Optimizer) -> list[torch.Tensor]:
        values = []
        for step, (x, _) in enumerate(batches(30)):
            needed = step % 3 == 2
            out = call(x.requires_grad_(needed))
            assert out.requires_grad is needed
            if needed:
                out.sum().backward()
                values.append(x.grad)
                with torch.no_grad():
                    again = call(x)
                assert not again.requires_grad
                values.append(again)
            values.append(out.detach())
        return values

    class Parameters(Scales):
        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.Parameter(torch.ones(1))

    same_as_plain(body, Parameters, least=20)
    assert len(calls) >= 20


def test_under_autocast(calls: list[Any]) -> None:
    def body(model: nn.Module, call: Any, opt: torch.optim.Optimizer) -> list[torch.Tensor]:
        values = []
        for step, (x, _) in enumerate(batches(30)):
            with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=step % 3 > 0):
                values.append(call(x))
                assert torch.is_autocast_enabled("cpu") is (step % 3 > 0)
        return values

    class Exact(Plain):
        """A part of it is not cast, wherever it is called."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", enabled=False):
                exact = self.first(x)
            return self.last(exact) * exact.sum()

    for kind in (Plain, Exact):
        calls.clear()
        same_as_plain(body, kind, without_graphs=True, least=20)
        assert len(calls) >= 24


def test_in_inference_mode(calls: list[Any]) -> None:
    def body(model: nn.Module, call: Any, opt: torch.optim.Optimizer) -> list[torch.Tensor]:
        values = []
        for step, (x, _) in enumerate(batches(30)):
            inside = step % 3 > 0
            with torch.inference_mode(inside), torch.no_grad():
                out = call(x.clone())  # made here
                if call is model:
                    assert out.is_inference() is inside
                values.append(out)
        with torch.no_grad():
            return [v.clone() for v in values]

    same_as_plain(body, Plain, least=20)
    assert len(calls) >= 10


def test_changing_shapes_compile_as_often(calls: list[Any]) -> None:
    """Pieces tell those that come after them which sizes change."""

    def body(model: nn.Module, call: Any, opt: torch.optim.Optimizer) -> list[torch.Tensor]:
        with torch.no_grad():
            return [call(x) for size in (5, 7, 5, 9, 7, 5, 9) for x, _ in batches(4, size)]

    counts = []
    for direct in (False, True):
        assert not calls
        counted = torch._dynamo.utils.counters["stats"]
        counted.clear()
        same_as_plain(body, Pieces, direct=direct, least=40)
        counts.append(counted["unique_graphs"])
    assert counts[0] == counts[1] <= 10 and len(calls) >= 60


def test_sizes_that_change_are_marked_as_the_runtime_marks_them() -> None:
    def scale(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, x * 2])

    marks = []
    for direct in (True, False):
        torch.compiler.reset()
        call = torch.compile(
            scale, backend=backend.pygraph, dynamic=True, options={"direct": direct, "engine": "emulated"}
        )
        outs = [call(x) for x, _ in batches(8)]
        marks.append({k: v for k, v in vars(outs[-1]).items() if k.startswith("_dynamo")})
    assert marks[0] == marks[1] and any(marks[0].values())


def test_a_subclass_goes_the_long_way(calls: list[Any]) -> None:
    def scale(x: torch.Tensor) -> torch.Tensor:
        return x * 2 + 1

    call = compiled(scale)
    for x, _ in batches(6):
        out = call(TwoTensor(x, x + 1))
        assert type(out) is TwoTensor
        assert torch.equal(out.a, x * 2 + 1) and torch.equal(out.b, (x + 1) * 2 + 1)
    assert not calls
    for x, _ in batches(6):
        assert torch.equal(call(x), x * 2 + 1)
    assert len(calls) >= 4
    regions_ran(1)


def test_under_transforms(calls: list[Any]) -> None:
    def scale(x: torch.Tensor) -> torch.Tensor:
        return x.sin() * 2

    call = compiled(scale)
    for x, _ in batches(8):
        assert torch.equal(call(x), scale(x))
    for x, _ in batches(4):
        found = torch.func.vmap(call)(x)
        assert torch.equal(found, torch.func.vmap(scale)(x))
        value, slope = torch.func.jvp(call, (x,), (x.cos(),))
        assert all(map(torch.equal, (value, slope), torch.func.jvp(scale, (x,), (x.cos(),))))
    assert len(calls) >= 6
    regions_ran(1)
