"""Functions of torch that the library calls in the place of the user's loop, and that somebody has replaced."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training import Diary, Net, adamw, batches, both

OWNERS: dict[str, tuple[Any, str]] = {
    "backward of tensors": (Tensor, "backward"),
    "backward of autograd": (torch.autograd, "backward"),
    "zero_grad of optimizers": (torch.optim.Optimizer, "zero_grad"),
    "zero_grad of one optimizer": (None, "zero_grad"),
    "clipping": (torch.nn.utils, "clip_grad_norm_"),
}


KINDS: dict[str, Callable[..., Any]] = {
    "plain": lambda original: lambda counted: counted,
    "wrapped": functools.wraps,
    "without gradients": lambda original: torch.no_grad(),
    "not compiled": lambda original: torch.compiler.disable,
}


def counting(original: Callable[..., Any], calls: list[int], kind: str) -> Callable[..., Any]:
    def counted(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return original(*args, **kwargs)

    made: Callable[..., Any] = KINDS[kind](original)(counted)
    return made


@pytest.mark.parametrize("name", OWNERS)
@pytest.mark.parametrize("manual", [False, True])
@pytest.mark.parametrize(
    ("first", "last", "kind"),
    [*((0, 45, kind) for kind in ("plain", "wrapped")), *((15, 30, kind) for kind in KINDS)],
)
@pytest.mark.quick
def test_a_replaced_function_is_called_in_each_step(
    name: str, first: int, last: int, manual: bool, kind: str
) -> None:
    if manual and name in ("clipping", "zero_grad of one optimizer", "zero_grad of optimizers"):
        pytest.skip("the step's own function calls it")

    def script(diary: Diary) -> None:
        model, calls = Net(), list[int]()
        optimizer = adamw(model)
        owner, attribute = OWNERS[name]
        owner = optimizer if owner is None else owner
        original = getattr(owner, attribute)

        def loss(x: Tensor, y: Tensor) -> Tensor:
            return nn.functional.cross_entropy(model(x), y)

        def by_hand(x: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad()
            found = loss(x, y)
            found.backward()
            optimizer.step()
            return found.detach()

        options = {"manual_optimization": True} if manual else {"max_grad_norm": 0.1}
        step = diary.step(by_hand if manual else loss, model=model, optimizer=optimizer, **options)
        try:
            for index, (x, y) in enumerate(batches(45)):
                if index == first:
                    setattr(owner, attribute, counting(original, calls, kind))
                if index == last:
                    setattr(owner, attribute, original)
                diary.write("loss", step(x, y))
                diary.write("calls", len(calls))
        finally:
            setattr(owner, attribute, original)
            if owner is optimizer:
                del optimizer.zero_grad
        diary.write_state(model, optimizer)

    if first == 0 and "zero_grad" not in name:  # which steps with regions call
        report = both(script, never="the function is called on every step")
    else:
        report = both(script, replays=10)
    assert any(" is counted (" in f.reason for f in report.fallbacks), str(report)


def test_a_zero_grad_of_the_optimizers_own_class_is_called_in_each_step() -> None:
    def script(diary: Diary) -> None:
        calls: list[bool] = []

        class Own(torch.optim.AdamW):
            def zero_grad(self, set_to_none: bool = True) -> None:
                calls.append(True)
                super().zero_grad(set_to_none)

        model = Net()
        optimizer = Own(model.parameters(), lr=0.01, fused=True)

        def loss(x: Tensor, y: Tensor) -> Tensor:
            return nn.functional.cross_entropy(model(x), y)

        step = diary.step(loss, model=model, optimizer=optimizer)
        for x, y in batches(20):
            diary.write("loss", step(x, y))
            diary.write("calls", len(calls))
        diary.write_state(model, optimizer)

    report = both(script, replays=10)  # of regions
    assert any("zero_grad of Own is zero_grad (" in row.reason for row in report.fallbacks), str(report)


@pytest.mark.parametrize("set_grad_none", [True, False])
def test_fused_optimizers_have_a_zero_grad_that_does_as_torch(set_grad_none: bool) -> None:
    class Fused(torch.optim.Optimizer):
        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 0.1})
            self.set_grad_none = set_grad_none

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for p in self.param_groups[0]["params"]:
                p.add_(p.grad, alpha=-0.1)

        def zero_grad(self) -> None:
            """Replaced below."""

    module: dict[str, Any] = {"__name__": "apex.optimizers.fused_adam"}
    exec(
        "def zero_grad(self):\n"
        "    for p in self.param_groups[0]['params']:\n"
        "        if self.set_grad_none or p.grad is None:\n"
        "            p.grad = None\n"
        "        else:\n"
        "            p.grad.zero_()\n",
        module,
    )
    Fused.zero_grad = module["zero_grad"]  # type: ignore[method-assign]

    def script(diary: Diary) -> None:
        model = Net()
        optimizer = Fused(model.parameters())

        def loss(x: Tensor, y: Tensor) -> Tensor:
            return nn.functional.cross_entropy(model(x), y)

        step = diary.step(loss, model=model, optimizer=optimizer)
        for x, y in batches(20):
            diary.write("loss", step(x, y))
        diary.write_state(model)

    report = both(script, replays=10)
    assert any("zero_grad of Fused" in row.reason for row in report.fallbacks) is not set_grad_none, str(
        report
    )


@pytest.mark.parametrize("several", [False, True])
def test_gradients_become_what_the_own_zero_grad_makes_of_them_by_default(several: bool) -> None:
    """The second head is left out in the middle: with gradients of zero its momentum moves it on."""

    class Own(torch.optim.SGD):
        def zero_grad(self, set_to_none: bool = False) -> None:
            super().zero_grad(set_to_none)

    def script(diary: Diary) -> None:
        heads = nn.ModuleList(nn.Linear(6, 3) for _ in range(2))
        groups = [[heads[0]], [heads[1]]] if several else [[*heads]]
        optimizers: Any = [
            Own([p for head in group for p in head.parameters()], lr=0.1, momentum=0.9, fused=True)
            for group in groups
        ]
        both_heads = [True]

        def loss(x: Tensor, y: Tensor) -> Tensor:
            out = heads[0](x) + heads[1](x) if both_heads[0] else heads[0](x)
            return nn.functional.cross_entropy(out, y)

        step = diary.step(loss, model=heads, optimizer=optimizers if several else optimizers[0])
        for index, (x, y) in enumerate(batches(30)):
            both_heads[0] = not 10 <= index < 20
            diary.write("loss", step(x, y))
        diary.write_state(heads, *optimizers)

    both(script, replays=1)


class CountingScaler(torch.amp.GradScaler):
    """Notes how often it was asked to update its scale."""

    def __init__(self, calls: list[int]) -> None:
        super().__init__("cpu", init_scale=64.0)
        self.calls = calls

    def update(self, new_scale: Any = None) -> None:
        self.calls.append(1)
        super().update(new_scale)


@pytest.mark.parametrize("name", ["scale", "step", "update", "_unscale_grads_", "of its class"])
def test_a_replaced_method_of_the_scaler_is_called_in_each_step(name: str) -> None:
    def script(diary: Diary) -> None:
        model, calls = Net(), list[int]()
        optimizer = adamw(model)
        by_class = name == "of its class"
        scaler = CountingScaler(calls) if by_class else torch.amp.GradScaler("cpu", init_scale=64.0)

        def loss(x: Tensor, y: Tensor) -> Tensor:
            return nn.functional.cross_entropy(model(x), y)

        step = diary.step(loss, model=model, optimizer=optimizer, scaler=scaler, max_grad_norm=0.1)
        for index, (x, y) in enumerate(batches(30)):
            if index == 15 and not by_class:
                setattr(scaler, name, counting(getattr(scaler, name), calls, "plain"))
            diary.write("loss", step(x, y))
            diary.write("calls", len(calls))
        diary.write("scale", scaler.get_scale())
        diary.write_state(model, optimizer)

    if name == "of its class":
        report = both(script, never="of the GradScaler is update")
    else:
        report = both(script, replays=10)
    called = "update" if name == "of its class" else name
    assert any(f"{called} of the GradScaler is" in row.reason for row in report.fallbacks), str(report)


def test_a_zero_grad_of_the_model_empties_what_the_optimizer_does_not_have() -> None:
    def script(diary: Diary) -> None:
        model, scale = Net(), nn.Parameter(torch.ones(3))
        optimizer = adamw(model)
        model.scale = scale
        optimizer.zero_grad = model.zero_grad  # type: ignore[method-assign]

        def loss(x: Tensor, y: Tensor) -> Tensor:
            return nn.functional.cross_entropy(model(x) * scale, y)

        step = diary.step(loss, model=model, optimizer=optimizer)
        for x, y in batches(20):
            diary.write("loss", step(x, y))
            diary.write("gradient", scale.grad)
        diary.write_state(model, optimizer)

    report = both(script, replays=10)  # of regions
    assert any("zero_grad of AdamW is zero_grad (" in row.reason for row in report.fallbacks), str(report)
