"""What is switched between steps, outside of the step's own code: a replay never goes on as if it were not."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from training import Diary, Net, batches, both, loss_of, sgd


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(6, 24)
        self.outer = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.inner(x[:, None].repeat(1, 5, 1)).view(-1, 5, 3, 1, 8).permute(2, 0, 3, 1, 4)
        return self.outer(nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).sum((1, 2)))


def train(context: Any, make: Any = Net, *, steps: int = 40, write: Any = lambda: None, **config: Any) -> Any:
    """Every step runs in `context(index)`."""

    def script(diary: Diary) -> None:
        model = make()
        optimizer = sgd(model)
        step = diary.step(loss_of(model), model=model, optimizer=optimizer)
        for index, batch in enumerate(batches(steps)):
            with context(index):
                loss = step(batch)
            diary.write("loss", loss)
            diary.write("seen", write())
            diary.write_state(model, optimizer)

    return both(script, **config)


def test_saved_tensors_hooks_get_what_is_saved() -> None:
    packed = [0]

    def pack(tensor: Tensor) -> Tensor:
        packed[0] += 1
        return tensor.bfloat16() if tensor.dtype is torch.float32 else tensor

    def unpack(tensor: Tensor) -> Tensor:
        return tensor.float() if tensor.dtype is torch.bfloat16 else tensor

    def context(index: int) -> AbstractContextManager[None]:
        if index == 0:
            packed[0] = 0
        return torch.autograd.graph.saved_tensors_hooks(pack, unpack) if 15 <= index < 25 else nullcontext()

    report = train(context, write=lambda: packed[0], replays=15, plan="{F} {B} {O}")
    assert any("saved_tensors_hooks" in fallback.reason for fallback in report.fallbacks)


class _Doubling(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        return result * 2 if func is torch.relu else result


def test_a_function_mode_takes_part_in_every_step() -> None:
    report = train(
        lambda index: _Doubling() if 15 <= index < 25 else nullcontext(), replays=20, plan="{F} {B} {O}"
    )
    assert any("TorchFunctionMode" in fallback.reason for fallback in report.fallbacks)


def test_a_default_device_keeps_no_step_out() -> None:
    report = train(
        lambda index: torch.device("cpu") if index >= 20 else nullcontext(), replays=15, plan="{F} {B} {O}"
    )
    assert not report.fallbacks, str(report)


def test_the_default_dtype_of_the_capture_holds_in_replays() -> None:
    def script(diary: Diary) -> None:
        model = nn.Linear(6, 3, dtype=torch.float64)

        def step_fn(batch: Any) -> Tensor:
            return nn.functional.cross_entropy(model(batch[0].double()), batch[1]) + torch.zeros(2).sum()

        optimizer = sgd(model)
        step = diary.step(step_fn, model=model, optimizer=optimizer)
        for index, batch in enumerate(batches(40)):
            torch.set_default_dtype(torch.float64 if index < 30 else torch.float32)
            try:
                loss = step(batch)
            finally:
                torch.set_default_dtype(torch.float32)
            diary.write("loss", loss)

    both(script, replays=20, plan="{F} {B} {O}")


class Options:
    """Resolves attributes in Python of its own, as transformers' configurations do."""

    also_known_as: ClassVar[dict[str, str]] = {}

    def __getattribute__(self, name: str) -> Any:
        names = super().__getattribute__("also_known_as")
        return super().__getattribute__(names.get(name, name))


def _give(options: Options) -> None:
    options.__dict__["wide"] = True


def _take(options: Options) -> None:
    options.__dict__.pop("wide", None)


def _give_class(options: Options) -> None:
    type(options).wide = True  # type: ignore[attr-defined]


def _take_class(options: Options) -> None:
    if "wide" in vars(type(options)):
        del type(options).wide  # type: ignore[attr-defined]


def _rename(options: Options) -> None:
    type(options).also_known_as["wide"] = "depth"


def _name_back(options: Options) -> None:
    type(options).also_known_as.pop("wide", None)


@pytest.mark.parametrize(
    ("give", "take"),
    [(_give, _take), (_give_class, _take_class), (_rename, _name_back)],
    ids=["object", "class", "alias"],
)
def test_object_with_attributes_of_its_own_making_gains_one_in_mid_run(
    give: Callable[[Options], None], take: Callable[[Options], None]
) -> None:
    def script(diary: Diary) -> None:
        class Own(Options):
            also_known_as: ClassVar[dict[str, str]] = {}

        options = Own()
        options.depth = 2  # type: ignore[attr-defined]
        model = Net()
        optimizer = sgd(model)

        def loss(batch: Any) -> Tensor:
            factor = 3.0 if hasattr(options, "wide") else 1.0
            return loss_of(model)(batch) * factor * options.depth  # type: ignore[attr-defined]

        step = diary.step(loss, model=model, optimizer=optimizer)
        for index, batch in enumerate(batches(60)):
            if index in (15, 45):
                give(options)
            elif index == 30:
                take(options)
            diary.write("loss", step(batch))
            diary.write_state(model, optimizer)

    both(script, replays=30)
