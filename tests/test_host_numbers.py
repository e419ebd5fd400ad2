"""NumPy scalars, NumPy functions and random numbers of the host mean in a step what they mean in plain Python."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from training import Diary, Net, batches, both, sgd

SCALARS = [np.float64(0.3), np.float32(0.3), np.float16(0.3), np.int64(2), np.int32(2)]


def train(step_of: Any, *, steps: int = 30, change: Any = None, seed: int = 0, **config: Any) -> Any:
    """Train with `step_of(model)` as step function; the loss's type counts as well as its value."""

    def script(diary: Diary) -> None:
        random.seed(seed)
        np.random.seed(seed)
        model = Net(dropout=0.0)
        optimizer = sgd(model)
        step = diary.step(step_of(model), model=model, optimizer=optimizer)
        for index, batch in enumerate(batches(steps)):
            if change is not None:
                change(model, index)
            result = step(batch)
            diary.write("loss", result["loss"] if isinstance(result, dict) else result)
        diary.write_state(model, optimizer)
        diary.write("random numbers", [random.random(), float(np.random.rand())])

    return both(script, **config)


def entropy(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch[0]), batch[1])


@pytest.mark.parametrize("scalar", SCALARS, ids=lambda s: type(s).__name__)
def test_a_numpy_scalar_of_a_closure_counts_as_a_number(scalar: Any) -> None:
    train(lambda model: lambda batch: entropy(model, batch) * scalar, replays=20, plan="{F} {B} {O}")


@pytest.mark.parametrize("scalar", SCALARS, ids=lambda s: type(s).__name__)
def test_arithmetic_on_numpy_scalars_is_numpys(scalar: Any) -> None:
    def step_of(model: nn.Module) -> Any:
        def step_fn(batch: Any) -> Any:
            factor = scalar * scalar * 3 / np.float32(7) + np.float64(0.1)
            return {"loss": entropy(model, batch) * factor, "factor": factor}

        return step_fn

    train(step_of, replays=20, plan="{F} {B} {O}")


@pytest.mark.parametrize("scalar", [np.bool_(True), np.float64("nan"), np.complex64(1)], ids=str)
def test_a_numpy_scalar_without_a_guard_keeps_its_meaning(scalar: Any) -> None:
    train(lambda model: lambda batch: (entropy(model, batch) * scalar).real, replays=15)


def test_a_numpy_scalar_that_is_an_attribute_may_change() -> None:
    class Scaled(Net):
        scale: Any = np.float32(0.3)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x - self.scale)

    def script(diary: Diary) -> None:
        model = Scaled(dropout=0.0)
        step = diary.step(lambda batch: entropy(model, batch), model=model, optimizer=sgd(model))
        for index, batch in enumerate(batches(36)):
            if index == 12:
                model.scale = np.float32(0.5)
            if index == 24:
                model.scale = np.float64(0.5)  # an equal number, and yet another rounding of the sums
            diary.write("loss", step(batch))

    both(script, replays=20, plan="{F} {B} {O}")


def test_a_numpy_scalar_of_the_batch_counts_as_a_number() -> None:
    def script(diary: Diary) -> None:
        model = Net()
        step = diary.step(
            lambda batch, weight: entropy(model, batch) * weight, model=model, optimizer=sgd(model)
        )
        for batch in batches(30):
            diary.write("loss", step(batch, np.float64(0.3)))

    both(script, replays=20, plan="{F} {B} {O}")


def test_items_of_a_dict_that_the_step_does_not_read_may_change() -> None:
    def step_of(model: nn.Module) -> Any:
        model.settings = {"logged": 0, "scale": 2.0}

        def step_fn(batch: Any) -> Tensor:
            return entropy(model, batch) * (
                model.settings["scale"] if isinstance(model.settings, dict) else 1.0
            )

        return step_fn

    def change(model: Any, index: int) -> None:
        model.settings["logged"] = index

    train(step_of, change=change, replays=20, plan="{F} {B} {O}")


@pytest.mark.parametrize(
    "factor",
    [
        lambda held: float(held.array[0]),
        lambda held: float(held.array.sum()),
        lambda held: 2.0 if held.array[0] > 2 else 1.0,
        lambda held: float(len(held.array)),
    ],
    ids=["entry", "sum", "branch", "length"],
)
def test_an_array_that_changes_in_mid_run(factor: Any) -> None:
    """Dynamo would compute with the values that the array has at the trace."""

    class Held(Net):
        array = np.array([1.0, 2.0])

    def script(diary: Diary) -> None:
        model = Held(dropout=0.0)
        model.array = Held.array.copy()
        step = diary.step(
            lambda batch: entropy(model, batch) * factor(model), model=model, optimizer=sgd(model)
        )
        for index, batch in enumerate(batches(40)):
            if index == 20:
                model.array[0] = 3.0
            if index == 30:
                model.array = np.ones(3)
            diary.write("loss", step(batch))

    both(script, replays=20, plan="{F} {B} {O}")


def test_a_ufunc_of_constants_is_computed_by_numpy() -> None:
    train(
        lambda model: lambda batch: entropy(model, batch) / np.sqrt(6) * np.exp(np.float32(0.1)),
        replays=20,
        plan="{F} {B} {O}",
    )


def test_a_tensor_of_python_numbers_keeps_no_step_out() -> None:
    def step_of(model: nn.Module) -> Any:
        def step_fn(batch: Any) -> Tensor:
            empty = torch.tensor([], dtype=torch.float32, device=batch[0].device)
            return entropy(model, batch) * torch.tensor(0.5) + torch.cat([empty, torch.tensor([1.0])]).sum()

        return step_fn

    train(step_of, replays=20, plan="{F} {B} {O}")


def test_numpy_computes_on_batches_itself() -> None:
    def step_of(model: nn.Module) -> Any:
        def step_fn(batch: Any) -> Tensor:
            x = batch[0].numpy()
            x = np.exp(x - x.max(1, keepdims=True))
            return nn.functional.cross_entropy(model(torch.from_numpy(x / x.sum())), batch[1])

        return step_fn

    train(step_of, replays=50)


def test_numpy_random_numbers_are_numpys() -> None:
    def step_of(model: nn.Module) -> Any:
        def step_fn(batch: Any) -> Tensor:
            noise = torch.from_numpy(np.random.randn(8, 6).astype(np.float32))
            return nn.functional.cross_entropy(model(batch[0] + noise), batch[1])

        return step_fn

    train(step_of, replays=20, plan="{F} {B} {O}")


def test_random_numbers_of_python_are_pythons() -> None:
    train(
        lambda model: lambda batch: entropy(model, batch) * random.uniform(0.5, 1),
        replays=20,
        plan="{F} {B} {O}",
    )


def test_numpy_numbers_between_regions_are_numpys() -> None:
    def step_of(model: nn.Module) -> Any:
        def step_fn(batch: Any) -> Tensor:
            hidden = model.norm(model.first(batch[0])) * np.float32(0.3)
            noise = np.random.rand() * np.sqrt(hidden.mean().item() ** 2)
            return nn.functional.cross_entropy(model.second(hidden + noise), batch[1]) * np.float64(0.3)

        return step_fn

    train(step_of, replays=15)
