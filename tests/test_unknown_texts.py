"""Texts and named tuples that a number of the step goes into: they decide as in plain training."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
from torch import Tensor, nn
from training import Diary, Net, adamw, batches, both

TABLE = {"k0": 1, "k1": 2, "k2": 3}
LAYERS = SimpleNamespace(layer0=1, layer1=2, layer2=3)
MODULES = nn.ModuleDict({"0": nn.Identity(), "1": nn.Tanh(), "2": nn.ReLU()})

TEXTS: dict[str, Callable[[Any], Any]] = {
    "in a set": lambda n: f"k{n}" in {"k1"},
    "equal": lambda n: f"{n}" == "1",
    "in a dict": lambda n: f"k{n}" in {"k1": 0},
    "in a list": lambda n: f"k{n}" in ["k1"],
    "a constant in a tuple": lambda n: "k1" in (f"k{n}", "z"),
    "in a text": lambda n: f"{n}" in "k1",
    "less": lambda n: f"k{n}" < "k1",
    "with a format": lambda n: f"{n:02d}" == "01",
    "converted": lambda n: f"{n!s:>2}" == " 1",
    "str": lambda n: str(n) in {"1"},
    "repr": lambda n: repr(n) == "1",
    "percent": lambda n: "%d" % n in {"1"},  # noqa: UP031
    "percent with a tuple": lambda n: "k%d" % (n,) == "k1",  # noqa: UP031
    "format": lambda n: "{}".format(n) in {"1"},  # noqa: UP032
    "concatenated": lambda n: "k" + f"{n}" in {"k1"},
    "joined": lambda n: "".join(["k", f"{n}"]) == "k1",
    "to a number": lambda n: int(f"{n}") == 1,
    "a key": lambda n: TABLE[f"k{n}"] - 1,
    "got": lambda n: {"k1": 1}.get(f"k{n}", 0),
    "put into a set": lambda n: len({f"k{n}", "k1"}) - 1,
    "put into a dict": lambda n: len({f"k{n}": 0, "k1": 1}) - 1,
    "an attribute": lambda n: getattr(LAYERS, f"layer{n}") - 1,
    "an attribute or not": lambda n: hasattr(LAYERS, f"layer{2 * n}"),
    "a module": lambda n: isinstance(MODULES[f"{n}"], nn.Tanh),
    "a module or not": lambda n: f"{n + 1}" in MODULES,
    "a method": lambda n: f"k{n}".endswith("1"),
    "a letter": lambda n: f"k{n}"[1] == "1",
    "the length": lambda n: len(f"{9 * n}") - 1,
    "compared in a tuple": lambda n: (f"k{n}",) == ("k1",),
    "counted": lambda n: ["k1", f"k{n}"].count("k1") - 1,
}


class Pair(NamedTuple):
    first: Any
    second: Any


TUPLES: dict[str, Callable[[Any], Any]] = {
    "a plain one": lambda n: Pair(n, 2) == (1, 2),
    "a plain one before it": lambda n: (1, 2) == Pair(n, 2),  # noqa: SIM300
    "another one": lambda n: Pair(n, 2) != Pair(1, 2),
    "in a list": lambda n: Pair(n, 2) in [(1, 2)],
    "in a tuple": lambda n: (n, Pair(n, 1)) == (1, (1, 1)),
    "less": lambda n: Pair(n, 2) < (1, 3),
    "of constants": lambda n: n == 1 and Pair(1, 2) == (1, 2),
    "a list": lambda n: n == 1 or Pair(n, 2) == [n, 2],
}

NUMBERS: dict[str, Callable[[Tensor], Any]] = {
    "read": lambda y: y.max().item(),
    "drawn": lambda y: random.randrange(3),
}


def train(decide: Callable[[Any], Any], number: str, replays: int) -> None:
    """Train plainly and graphed: a step computes with what follows from its number."""

    def script(diary: Diary) -> None:
        random.seed(1)
        model = Net()

        def step_fn(batch: Any) -> Tensor:
            x, y = batch
            x = x * (1 + decide(NUMBERS[number](y)))
            return nn.functional.cross_entropy(model(x), y)

        step = diary.step(step_fn, model=model, optimizer=adamw(model))
        for at, (x, y) in enumerate(batches(30)):
            diary.write("loss", step((x, y.clamp(max=1) if at % 3 else y)))
        diary.write_state(model)
        diary.write("drawn", random.random())

    both(script, replays=replays)


@pytest.mark.slow_after(4)
@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("how", TEXTS)
def test_a_text_of_a_number_decides(how: str, number: str) -> None:
    """Dynamo takes such a text for one that differs from every other."""
    train(TEXTS[how], number, replays=10)


@pytest.mark.slow_after(2)
@pytest.mark.parametrize("number", NUMBERS)
@pytest.mark.parametrize("other", TUPLES)
def test_a_named_tuple_is_compared_by_its_values(other: str, number: str) -> None:
    """Dynamo of 2.11 takes it for different from every plain one."""
    train(TUPLES[other], number, replays=15)


def test_a_text_of_a_number_in_a_named_tuple() -> None:
    train(lambda n: Pair(f"k{n}", 2) == ("k1", 2), "read", replays=10)


def test_a_text_that_goes_into_an_error_leaves_the_graph() -> None:
    def script(diary: Diary) -> None:
        model = Net()

        def step_fn(batch: Any) -> Tensor:
            x, y = batch
            largest = y.max().item()
            if largest >= 3:
                raise ValueError(f"labels up to {largest!s:>3}")
            return nn.functional.cross_entropy(model(x), y)

        step = diary.step(step_fn, model=model, optimizer=adamw(model))
        for at, (x, y) in enumerate(batches(30)):
            try:
                diary.write("loss", step((x, y + 3 if at in (12, 20) else y)))
            except ValueError as error:
                diary.write("raised", str(error))
        diary.write_state(model)

    both(script, replays=15, plan="{F B O}")
