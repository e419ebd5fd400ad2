"""Steps that call functions under `functools.lru_cache`."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from training import Diary, Net, adamw, batches, both

from pygraph_train.random_state import OF_DEVICES, HostRandomState


def train(
    weight: Callable[[Any], Any], between: Callable[[int], None], diary: Diary, count: int = 32
) -> None:
    model = Net()
    optimizer = adamw(model)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return (nn.functional.cross_entropy(model(x), y, reduction="none") * weight(model)).mean()

    step = diary.step(loss, model=model, optimizer=optimizer)
    for index, (x, y) in enumerate(batches(count)):
        between(index)
        diary.write("loss", step(x, y))
    diary.write_state(model, optimizer)


def test_a_cached_tensor_is_read_after_it_was_written_to_or_made_anew() -> None:
    def script(diary: Diary) -> None:
        scale = [1.0]

        @functools.lru_cache
        def weights(rows: int) -> Tensor:
            return torch.full((rows,), scale[0])

        def between(index: int) -> None:
            if index == 12:
                scale[0] = 3.0
                weights.cache_clear()
            elif index == 20:
                weights(1).mul_(2)

        train(lambda model: weights(1), between, diary)

    both(script, replays=18, plan="{F B O}")


def test_a_cache_goes_on_with_what_it_holds() -> None:
    def script(diary: Diary) -> None:
        scale = [1.0]

        @functools.cache
        def factor(name: str) -> float:
            return scale[0]

        def between(index: int) -> None:
            scale[0] = 1.0 if index < 12 else 2.0
            if index == 20:
                factor.cache_clear()

        train(lambda model: factor("loss"), between, diary)

    both(script, replays=18, plan="{F B O}")


def test_a_cached_draw_is_drawn_once() -> None:
    def script(diary: Diary) -> None:
        @functools.lru_cache
        def noise(rows: int) -> Tensor:
            return torch.rand(rows)

        train(lambda model: torch.rand(1) + noise(1), lambda index: None, diary)

    both(script, replays=1)


@pytest.mark.parametrize("cache", [functools.lru_cache, functools.cache, functools.lru_cache(maxsize=1)])
@pytest.mark.parametrize("draw", [torch.rand, lambda rows: torch.from_numpy(np.random.rand(rows)).float()])
def test_a_cached_draw_is_drawn_where_it_stands(
    draw: Callable[[int], Tensor], cache: Callable[..., Any]
) -> None:
    """Neither when the library traces the step, nor when it asks whether the cache is as it was."""

    def script(diary: Diary) -> None:
        np.random.seed(0)
        rows = [1]

        @cache
        def noise(rows: int) -> Tensor:
            return draw(rows)

        def between(index: int) -> None:
            if index == 12:  # the cache holds another result already
                rows[0] = 8
            elif index == 20:
                noise.cache_clear()

        train(lambda model: torch.rand(1) + draw(1) + noise(rows[0]), between, diary, 40)

    both(script, replays=20, plan="{F B O}")


def test_random_numbers_of_devices_are_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the CPU other generators stand for those of devices."""
    generators = torch.Generator().manual_seed(1), torch.Generator().manual_seed(2)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "default_generators", generators)
    before = HostRandomState((OF_DEVICES,))
    assert not before.moved(HostRandomState((OF_DEVICES,)))
    drawn = torch.rand(2, generator=generators[1])
    assert before.moved(HostRandomState((OF_DEVICES,))) == {OF_DEVICES}
    before.restore()
    assert torch.equal(torch.rand(2, generator=generators[1]), drawn)


class Cached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 4)
        self.scale = 1.0

    @functools.lru_cache  # noqa: B019
    def weights(self, rows: int) -> Tensor:
        return torch.full((rows,), self.scale)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.weights(1)


def test_a_method_may_be_cached() -> None:
    def script(diary: Diary) -> None:
        scaled = Cached()

        def between(index: int) -> None:
            scaled.scale = 1.0 if index < 12 else 2.0
            if index == 20:
                Cached.weights.cache_clear()

        train(lambda model: scaled.weights(1), between, diary)

    both(script, replays=18, plan="{F B O}")


def test_what_the_loop_asks_a_cache_for_is_what_the_step_got() -> None:
    def script(diary: Diary) -> None:
        calls: list[int] = []

        @functools.lru_cache
        def weights(rows: int) -> Tensor:
            calls.append(rows)
            return torch.ones(rows)

        def between(index: int) -> None:
            diary.write("calls", len(calls))

        train(lambda model: weights(1), between, diary)
        diary.write("calls", len(calls))

    both(script, replays=20, plan="{F B O}")


def test_a_cache_that_tells_tensors_apart_is_asked_in_each_step() -> None:
    def script(diary: Diary) -> None:
        @functools.lru_cache
        def norm(weight: Tensor) -> Tensor:
            return weight.detach().norm()

        def of(model: Any) -> Tensor:
            return norm(next(model.parameters()))

        def between(index: int) -> None:
            if index == 12:
                norm.cache_clear()

        train(of, between, diary)

    both(script, replays=1)


def test_a_cached_function_sees_what_it_sees_in_a_plain_loop() -> None:
    def script(diary: Diary) -> None:
        @functools.lru_cache
        def seen() -> tuple[str, bool]:
            return str(torch.get_default_device()), torch.compiler.is_compiling()

        torch.set_default_device("cpu:0")
        try:
            train(lambda model: len(seen()), lambda index: None, diary)
            diary.write("seen", seen())
        finally:
            torch.set_default_device(None)

    both(script, replays=18, plan="{F B O}")


@pytest.mark.parametrize("room", [None, 1])
def test_equal_numbers_are_the_same_answer(room: int | None) -> None:
    def script(diary: Diary) -> None:
        @functools.lru_cache(maxsize=room)
        def factors(n: int) -> tuple[float, tuple[int]]:
            return n / 2, (n,)

        train(lambda model: factors(1)[0] + factors(2)[1][0], lambda index: None, diary)

    both(script, replays=18, plan="{F B O}")


def test_tensors_that_a_cache_has_no_room_for_are_made_in_each_step() -> None:
    def script(diary: Diary) -> None:
        @functools.lru_cache(maxsize=1)
        def weights(rows: int) -> Tensor:
            return torch.full((1,), float(rows))

        train(lambda model: weights(1) + weights(2), lambda index: None, diary)

    both(script, replays=1)


@pytest.mark.parametrize("argument", [3, [3]], ids=["value", "no key"])
def test_what_a_cached_function_raises_is_raised_in_each_step(argument: Any) -> None:
    def script(diary: Diary) -> None:
        @functools.lru_cache
        def checked(rows: Any) -> int:
            raise ValueError

        def weight(model: Any) -> int:
            try:
                return checked(argument)
            except ValueError:
                return 2
            except TypeError:
                return 3

        train(weight, lambda index: None, diary)

    both(script, replays=1)


class Size(NamedTuple):
    rows: int
    scale: float


def test_a_cache_may_be_asked_for_a_named_tuple() -> None:
    def script(diary: Diary) -> None:
        @functools.lru_cache
        def weights(size: Size) -> Tensor:
            return torch.full((size.rows,), size.scale)

        train(lambda model: weights(Size(1, 2.0)), lambda index: None, diary)

    both(script, replays=18, plan="{F B O}")


MADE: dict[str, tuple[Callable[[Tensor], Tensor], bool]] = {
    "new": (lambda weight: weight * 2, True),
    "the same": (lambda weight: weight.float(), False),
    "of its memory": (lambda weight: weight.detach(), False),
}


@pytest.mark.parametrize("kind", MADE)
def test_a_cache_has_no_answer_for_tensors_that_a_step_makes(kind: str) -> None:
    make, graphed = MADE[kind]

    def script(diary: Diary) -> None:
        @functools.lru_cache(maxsize=1)
        def norm(weight: Tensor) -> Tensor:
            return weight.detach().norm()

        train(lambda model: norm(make(next(model.parameters()))), lambda index: None, diary)

    both(script, replays=18 if graphed else 1, plan="{F B O}" if graphed else None)


def test_a_cache_that_is_asked_twice_for_a_tensor_gives_one_answer() -> None:
    def script(diary: Diary) -> None:
        @functools.lru_cache(maxsize=1)
        def norm(weight: Tensor) -> Tensor:
            return weight.detach().norm()

        def weight(model: Any) -> Tensor:
            made = next(model.parameters()) * 2
            return norm(made).mul_(2) + norm(made)

        train(weight, lambda index: None, diary)

    both(script, replays=1)
