"""A step writes to Python what is there already: with the next step it may be something else."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from training import Diary, Net, adamw, batches, both

noted: Any = None


class Slots:
    __slots__ = ("noted",)


class Keeping(Net):
    """Notes its logits where it is asked to, and a constant elsewhere."""

    otherwise: Any = None
    keeps = False

    def note(self, value: Any) -> None:
        self.noted = value

    def forward(self, x: Tensor) -> Tensor:
        logits = super().forward(x)
        self.note(logits.detach() if self.keeps else self.otherwise)
        return logits


class KeepingInObject(Keeping):
    def __init__(self, kept: Any) -> None:
        super().__init__()
        self.kept = kept
        kept.noted = None

    def note(self, value: Any) -> None:
        self.kept.noted = value


class KeepingInGlobal(Keeping):
    def note(self, value: Any) -> None:
        global noted
        noted = value


def of_module() -> tuple[nn.Module, Callable[[], Any], Callable[[Any], None]]:
    model = Keeping()
    model.noted = None
    return model, lambda: model.noted, lambda value: setattr(model, "noted", value)


def of_text() -> tuple[nn.Module, Callable[[], Any], Callable[[Any], None]]:
    model = Keeping()
    model.otherwise = model.noted = "nothing"
    return model, lambda: model.noted, lambda value: setattr(model, "noted", value)


def of_object(made: Callable[[], Any]) -> Any:
    def make() -> tuple[nn.Module, Callable[[], Any], Callable[[Any], None]]:
        kept = made()
        return KeepingInObject(kept), lambda: kept.noted, lambda value: setattr(kept, "noted", value)

    return make


def of_global() -> tuple[nn.Module, Callable[[], Any], Callable[[Any], None]]:
    def write(value: Any) -> None:
        global noted
        noted = value

    write(None)
    return KeepingInGlobal(), lambda: noted, write


def of_closure() -> tuple[nn.Module, Callable[[], Any], Callable[[Any], None]]:
    inner: Any = None

    def write(value: Any) -> None:
        nonlocal inner
        inner = value

    model = Keeping()
    model.note = write  # type: ignore[method-assign]
    return model, lambda: inner, write


PLACES: dict[str, Any] = {
    "module": of_module,
    "text": of_text,
    "object": of_object(lambda: Namespace(other=1)),
    "slots": of_object(Slots),
    "global": of_global,
    "closure": of_closure,
}


def written(place: str, before: Callable[[int, Any, Callable[[Any], None]], None]) -> None:
    """Compare with plain training what steps note at a place.

    Args:
        before: called before each step with its number, the model, and what writes to the place.
    """

    def script(diary: Diary) -> None:
        model, read, write = PLACES[place]()
        optimizer = adamw(model)
        step = diary.step(
            lambda x, y: nn.functional.cross_entropy(model(x), y), model=model, optimizer=optimizer
        )
        for i, (x, y) in enumerate(batches(40)):
            before(i, model, write)
            diary.write("loss", step(x, y))
            diary.write("noted", read())
        diary.write_state(model, optimizer)

    both(script, replays=10)


@pytest.mark.parametrize("place", PLACES)
def test_a_constant_is_written_over_what_another_step_wrote(place: str) -> None:
    written(place, lambda i, model, write: setattr(model, "keeps", i % 10 >= 7))


@pytest.mark.parametrize("place", PLACES)
def test_a_constant_is_written_over_what_the_loop_wrote(place: str) -> None:
    def write_now_and_then(i: int, model: Any, write: Callable[[Any], None]) -> None:
        if i % 7 == 6:
            write(torch.ones(1) if i % 2 else "other")

    written(place, write_now_and_then)
