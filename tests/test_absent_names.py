"""Keys and attributes that a step asks for, and that come while it trains."""

from __future__ import annotations

import copy
from collections import ChainMap, OrderedDict
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from torch import Tensor, nn
from training import Diary, Net, adamw, batches, both


def of_a_dict(options: Any) -> float:
    try:
        return float(options["scale"])
    except KeyError:
        return 1.0


def of_an_object(options: Any) -> float:
    try:
        return float(options.scale)
    except AttributeError:
        return 1.0


def put(options: Any) -> None:
    options["scale"] = 0.5


def put_beneath(options: Any) -> None:
    options.maps[-1]["scale"] = 0.5


def give(options: Any) -> None:
    options.scale = 0.5


CASES: dict[str, tuple[Callable[[], Any], Callable[[Any], float], Callable[[Any], None]]] = {
    "a dict": (dict, of_a_dict, put),
    "an ordered dict": (lambda: OrderedDict(other=1.0), of_a_dict, put),
    "several dicts": (lambda: ChainMap({}, {}), of_a_dict, put_beneath),
    "an object": (SimpleNamespace, of_an_object, give),
    "a module of torch": (lambda: nn.Linear(2, 2), of_an_object, give),
    "a class": (lambda: type("Options", (), {}), of_an_object, give),
    "a module of Python": (lambda: ModuleType("options"), of_an_object, give),
}


@pytest.mark.parametrize("case", CASES)
def test_a_step_notices_what_was_not_there_when_it_was_traced(case: str) -> None:
    made, read, add = CASES[case]

    def script(diary: Diary) -> None:
        options, model = made(), Net()
        optimizer = adamw(model)

        def loss(x: Tensor, y: Tensor) -> Tensor:
            return nn.functional.cross_entropy(model(x), y) * read(options)

        step = diary.step(loss, model=model, optimizer=optimizer)
        for index, (x, y) in enumerate(batches(24)):
            if index == 12:
                add(options)
            diary.write("loss", step(x, y))
        diary.write_state(model, optimizer)

    both(script, replays=12, plan="{F B O}")


def asked_for(function: Any) -> float:
    return float(getattr(function, "scale", 1.0))


def found(function: Any) -> float:
    return 0.5 if hasattr(function, "scale") else 1.0


def of_a_copy(function: Any) -> float:
    return float(getattr(copy.copy(function), "scale", 1.0))


def of_a_deep_copy(function: Any) -> float:
    return float(getattr(copy.deepcopy(function), "scale", 1.0))


def make_method() -> Any:
    class Owner:
        def method(self) -> None: ...

    return Owner().method


def remove(function: Any) -> None:
    vars(getattr(function, "__func__", function)).pop("scale")


def give_function(function: Any) -> None:
    getattr(function, "__func__", function).scale = 0.5


@pytest.mark.parametrize("comes", [True, False])
@pytest.mark.parametrize("made", [lambda: lambda x: x, make_method], ids=["a function", "a method"])
@pytest.mark.parametrize("read", [asked_for, found, of_an_object, of_a_copy, of_a_deep_copy])
def test_a_step_notices_attributes_of_functions(
    read: Callable[[Any], float], made: Callable[[], Any], comes: bool
) -> None:
    def script(diary: Diary) -> None:
        function, model = made(), Net()
        optimizer = adamw(model)
        changes = [give_function, remove, give_function]
        if not comes:
            changes.pop(0)(function)

        def loss(x: Tensor, y: Tensor) -> Tensor:
            return nn.functional.cross_entropy(model(x), y) * read(function)

        step = diary.step(loss, model=model, optimizer=optimizer)
        for index, (x, y) in enumerate(batches(32)):
            if index in (12, 24):
                changes.pop(0)(function)
            diary.write("loss", step(x, y))
        diary.write_state(model, optimizer)

    both(script, replays=12)


def test_what_comes_in_the_first_step_is_used_in_the_next_ones() -> None:
    def script(diary: Diary) -> None:
        made, model = SimpleNamespace(), Net()
        optimizer = adamw(model)

        def loss(x: Tensor, y: Tensor) -> Tensor:
            try:
                scale = made.scale
            except AttributeError:
                scale = made.scale = 0.5
            return nn.functional.cross_entropy(model(x), y) * scale

        step = diary.step(loss, model=model, optimizer=optimizer)
        for x, y in batches(16):
            diary.write("loss", step(x, y))
        diary.write_state(model, optimizer)

    both(script, replays=6, plan="{F B O}")
