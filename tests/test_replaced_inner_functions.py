"""Functions inside of torch that optimizers, clipping and the GradScaler call, and that somebody has replaced."""

from __future__ import annotations

import contextlib
import functools
from types import FunctionType
from typing import Any
from unittest import mock

import pytest
import torch
from test_replaced_calls_of_the_loop import counting
from torch import Tensor, nn
from torch.nn.utils import clip_grad
from torch.optim import sgd
from training import Diary, Net, batches, both

from pygraph_train import explain
from pygraph_train.torch_private import inner_functions
from pygraph_train.torch_private.inner_functions import (
    inside_of_clipping,
    inside_of_scalers,
    inside_of_steps,
)

OWNERS: dict[str, tuple[Any, str]] = {
    "functional": (sgd, "sgd"),
    "for its kernels": (sgd, "_fused_sgd"),
    "kernel": (torch, "_fused_sgd_"),
    "of the class": (torch.optim.SGD, "_init_group"),
    "of the optimizer": (None, "_init_group"),
    "norm": (clip_grad, "_get_total_norm"),
    "norm of torch": (torch, "_foreach_norm"),
    "clipping": (clip_grad, "_clip_grads_with_norm_"),
}


@pytest.mark.parametrize("manual", [False, True])
@pytest.mark.parametrize(("first", "last"), [(0, 45), (15, 30)])
@pytest.mark.parametrize("name", OWNERS)
@pytest.mark.quick
def test_a_replaced_function_is_called_in_each_step(name: str, first: int, last: int, manual: bool) -> None:
    clips = "norm" in name or name == "clipping"

    def script(diary: Diary) -> None:
        model, calls = Net(), list[int]()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, fused=True)
        owner, attribute = OWNERS[name]
        owner = optimizer if owner is None else owner
        original = getattr(owner, attribute)

        def loss(x: Tensor, y: Tensor) -> Tensor:
            return nn.functional.cross_entropy(model(x), y)

        def by_hand(x: Tensor, y: Tensor) -> Tensor:
            optimizer.zero_grad()
            found = loss(x, y)
            found.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            optimizer.step()
            return found.detach()

        options = {"manual_optimization": True} if manual else {"max_grad_norm": 0.1}
        step = diary.step(by_hand if manual else loss, model=model, optimizer=optimizer, **options)
        with contextlib.ExitStack() as patch:
            for index, (x, y) in enumerate(batches(45)):
                if index == first:
                    patch.enter_context(
                        mock.patch.object(owner, attribute, counting(original, calls, "wrapped"))
                    )
                if index == last:
                    patch.close()
                diary.write("loss", step(x, y))
                diary.write("calls", len(calls))
        diary.write_state(model, optimizer)

    if first == 0 and (manual or clips):
        report = both(script, never="the function is called on every step")
    else:
        report = both(script, replays=10)
    assert any("counted (" in row.reason or "was replaced" in row.reason for row in report.fallbacks), str(
        report
    )


@pytest.mark.parametrize("name", ["_amp_foreach_non_finite_check_and_unscale_", "_amp_update_scale_"])
def test_a_replaced_function_of_the_scaler_is_called_in_each_step(name: str) -> None:

    def script(diary: Diary) -> None:
        model, calls = Net(), list[int]()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)

        def loss(x: Tensor, y: Tensor) -> Tensor:
            return nn.functional.cross_entropy(model(x), y)

        step = diary.step(loss, model=model, optimizer=optimizer, scaler=scaler)
        with contextlib.ExitStack() as patch:
            for index, (x, y) in enumerate(batches(45)):
                if index == 15:
                    counted = counting(getattr(torch, name), calls, "wrapped")
                    patch.enter_context(mock.patch.object(torch, name, counted))
                if index == 30:
                    patch.close()
                diary.write("loss", step(x, y))
                diary.write("calls", len(calls))
        diary.write_state(model, optimizer)

    report = both(script, replays=10)
    assert any("counted (" in row.reason for row in report.fallbacks), str(report)


def test_a_replaced_kernel_that_plain_training_would_call_is_told() -> None:
    """Graphs have other kernels than the loop of an optimizer without `fused`. One that nobody calls is told as well:
    which ones are called depends on the device, and on what torch makes of it."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x, y = batches(1)[0]

    def step_fn(x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(model(x), y)

    with mock.patch.object(sgd, "_multi_tensor_sgd", counting(sgd._multi_tensor_sgd, [], "wrapped")):  # type: ignore[attr-defined]
        assert "torch.optim.sgd._multi_tensor_sgd was replaced" in str(
            explain(step_fn, x, y, model=model, optimizer=optimizer)
        )
    assert "was replaced" not in str(explain(step_fn, x, y, model=model, optimizer=optimizer))


@pytest.mark.parametrize("versions", [True, False])
def test_nothing_of_torch_is_taken_for_a_replacement(versions: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inner_functions, "versions_are_known", lambda: versions)
    for cached in ("_clipping", "_steps", "_scalers"):
        monkeypatch.setattr(
            inner_functions, cached, functools.cache(getattr(inner_functions, cached).__wrapped__)
        )
    kinds = [kind for kind in vars(torch.optim).values() if isinstance(kind, type)]
    kinds = [kind for kind in kinds if issubclass(kind, torch.optim.Optimizer)]
    assert len(kinds) > 10
    optimizers: list[Any] = []
    for kind in kinds:
        if kind is not torch.optim.Optimizer:
            optimizers.append(kind([nn.Parameter(torch.ones(2, 2))], lr=0.1))
            torch.optim.lr_scheduler.LambdaLR(optimizers[-1], float)

    def found() -> list[Any]:
        scaler = torch.amp.GradScaler("cpu")
        return [inside_of_clipping(), inside_of_scalers(scaler), *map(inside_of_steps, optimizers)]

    assert not any(found())
    of_sgd = [isinstance(optimizer, torch.optim.SGD) for optimizer in optimizers]
    with mock.patch.object(sgd, "sgd", FunctionType(sgd.sgd.__code__, {})):
        assert list(map(bool, found())) == [False, False, *of_sgd]
    with mock.patch.object(sgd, "_fused_sgd", sgd._single_tensor_sgd):  # type: ignore[attr-defined]
        assert list(map(bool, found())) == [False, False, *of_sgd]
    with mock.patch.object(Tensor, "mul_", functools.partial(Tensor.mul_)):
        assert inside_of_clipping() is not None and list(map(bool, found()))[2:].count(True) > 10
    assert not any(found())
