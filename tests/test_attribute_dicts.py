"""What a step asks of an object's `__dict__`, while attributes come and go."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from copy import copy
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from torch import Tensor, nn
from training import Diary, Net, adamw, batches, both


def contains(options: Any) -> float:
    return 0.5 if "scale" in options.__dict__ else 1.0


def lacks(options: Any) -> float:
    return 1.0 if "scale" not in vars(options) else 0.5


def by_get(options: Any) -> float:
    return float(vars(options).get("scale", 1.0))


def by_get_without_default(options: Any) -> float:
    return vars(options).get("scale") or 1.0


def by_item(options: Any) -> float:
    try:
        return float(vars(options)["scale"])
    except KeyError:
        return 1.0


def by_length(options: Any) -> float:
    return 0.5 if len(vars(options)) % 2 else 1.0


def by_truth(options: Any) -> float:
    return 0.5 if vars(options) else 1.0


def by_iteration(options: Any) -> float:
    factor = 1.0
    for name in vars(options):
        factor *= 0.5 if name == "scale" else 2.0
    return factor


def by_keys(options: Any) -> float:
    return 0.5 if "scale" in list(options.__dict__.keys()) else 1.0


def by_items(options: Any) -> float:
    factor = 1.0
    for name, value in vars(options).items():
        if name == "scale":
            factor *= value
    return factor


def by_copy(options: Any) -> float:
    return 0.5 if "scale" in dict(vars(options)) else 1.0


def by_own_copy(options: Any) -> float:
    return 0.5 if "scale" in vars(options).copy() else 1.0


def by_unpacking(options: Any) -> float:
    return float({"scale": 1.0, **vars(options)}["scale"])


def as_keywords(options: Any) -> float:
    return factor_of(**vars(options))


def factor_of(scale: float = 1.0, **others: float) -> float:
    return scale


def by_equality(options: Any) -> float:
    return 1.0 if vars(options) == {} else 0.5


def by_all_names(options: Any) -> float:
    return 0.5 if "scale" in dir(options) else 1.0


def of_a_shallow_copy(options: Any) -> float:
    return float(getattr(copy(options), "scale", 1.0))


def by_number_of_items(options: Any) -> float:
    return 0.5 if len(vars(options).items()) % 2 else 1.0


def by_sorting(options: Any) -> float:
    return 0.5 if "scale" in sorted(vars(options)) else 1.0


def by_merging(options: Any) -> float:
    return float(({"scale": 1.0} | vars(options))["scale"])


def by_a_set(options: Any) -> float:
    return 0.5 if {"scale"} & set(vars(options)) else 1.0


def with_a_default(options: Any) -> float:
    return float(vars(options).setdefault("scale", 1.0))


def taking_it(options: Any) -> float:
    return float(vars(options).pop("scale", 1.0))


READS = [
    contains,
    lacks,
    by_get,
    by_get_without_default,
    by_item,
    by_length,
    by_truth,
    by_iteration,
    by_keys,
    by_items,
    by_copy,
    by_own_copy,
    by_unpacking,
    as_keywords,
    by_equality,
    by_all_names,
    of_a_shallow_copy,
    by_number_of_items,
    by_sorting,
    by_merging,
    by_a_set,
]


class Options:
    pass


class Slotted:
    __slots__ = ("__dict__",)


def function() -> Callable[[], float]:
    def empty() -> float:
        return 1.0

    return empty


OWNERS: dict[str, Callable[[], Any]] = {
    "an object": Options,
    "a namespace": SimpleNamespace,
    "arguments": Namespace,
    "an object with slots": Slotted,
    "a function": function,
    "a module of torch": lambda: nn.Identity(),
    "a class": lambda: type("Options", (), {}),
    "a module of Python": lambda: ModuleType("options"),
}


def train(read: Callable[[Any], float], made: Callable[[], Any], *, comes: bool) -> Callable[[Diary], None]:
    def script(diary: Diary) -> None:
        options, model = made(), Net()
        optimizer = adamw(model)
        if not comes:
            options.scale = 0.5

        def loss(x: Tensor, y: Tensor) -> Tensor:
            return nn.functional.cross_entropy(model(x), y) * read(options)

        step = diary.step(loss, model=model, optimizer=optimizer)
        for index, (x, y) in enumerate(batches(24)):
            if index == 12:
                if comes:
                    options.scale = 0.5
                else:
                    del options.scale
            diary.write("loss", step(x, y))
        diary.write_state(model, optimizer)

    return script


@pytest.mark.parametrize("comes", [True, False])
@pytest.mark.parametrize("owner", OWNERS)
@pytest.mark.parametrize("read", READS)
@pytest.mark.quick
def test_a_step_notices_attributes_that_come_and_go(
    read: Callable[[Any], float], owner: str, comes: bool
) -> None:
    if read is of_a_shallow_copy and owner in ("a module of Python", "a function", "a class"):
        pytest.skip("Python makes no copies of these")
    both(train(read, OWNERS[owner], comes=comes), replays=1)


@pytest.mark.parametrize("read", [with_a_default, taking_it])
def test_a_step_that_writes_there_notices_attributes(read: Callable[[Any], float]) -> None:
    both(train(read, Options, comes=True), replays=10)


def test_a_step_notices_what_an_argument_parser_did_not_give() -> None:
    def read(options: Namespace) -> float:
        return 0.5 if "scale" in options else 1.0

    both(train(read, Namespace, comes=True), replays=12, plan="{F B O}")
    both(train(read, Namespace, comes=False), replays=12, plan="{F B O}")


def test_a_step_may_write_there_without_being_traced_for_each_name() -> None:
    def script(diary: Diary) -> None:
        options, model = Options(), Net()
        optimizer = adamw(model)

        def loss(x: Tensor, y: Tensor) -> Tensor:
            vars(options)["scale"] = 0.5
            return nn.functional.cross_entropy(model(x), y) * options.scale

        step = diary.step(loss, model=model, optimizer=optimizer)
        for index, (x, y) in enumerate(batches(24)):
            setattr(options, f"other_{index}", 1.0)
            diary.write("loss", step(x, y))
        diary.write_state(model, optimizer)

    both(script, replays=15)
