"""Hyperparameters that replays read anew: betas, momentum, weight decay.

The kernels of an optimizer take them as Python numbers, which a capture bakes in. torch's fused kernels get each number
as it is, and look at its value only when they run: `graphs/rewriting.py` says where that can be read. So an engine that
can rewrite a number of a captured operation keeps the graph right: the number is made that of the optimizer's group
before a replay, where it has changed.

Which number of which operation it is, a capture finds out by itself. Inside of it each hyperparameter has a value that
occurs nowhere else; nothing is computed with it, because a capture executes nothing.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

from pygraph_train.graphs.engine import Graph, NumbersNotFound
from pygraph_train.optimizers.kernels import FUSED_KERNELS
from pygraph_train.patches import nothing


@dataclass(frozen=True)
class NumberPlace:
    """Where a hyperparameter is.

    Attributes:
        entry: its position in `OptimizerPreparation.hyperparameters()`.
        group: the number of the parameter group.
        key: its name there.
        item: its position in a tuple such as `betas`, None for a number.
    """

    entry: int
    group: int
    key: str
    item: int | None


class LiveNumbers:
    """The hyperparameters that one capture leaves open.

    A number that is not above zero is not among them, nor is one of another type than `float`: torch's Python code may
    ask whether a number is zero, its kernels may refuse one below it, and the answer is baked in.

    Args:
        optimizer: of torch.
        entries: hyperparameters that fused kernels take: position in `hyperparameters()`, number of the group, and key.
    """

    def __init__(
        self,
        optimizer: Optimizer,
        entries: Sequence[tuple[int, int, str]] = (),
    ) -> None:
        self.optimizer = optimizer
        self._groups = sorted({group for _, group, _ in entries})
        self._places = list(_open(optimizer, entries))
        self._marks = [_mark(index) for index in range(len(self._places))]
        self._stepped: set[int] = set()
        self._followed = False

    @contextmanager
    def marked(self) -> Iterator[None]:
        """Inside of the capture, around the optimizer's step: each hyperparameter has its own value."""
        groups = self.optimizer.param_groups
        self._stepped = {
            group
            for group in self._groups
            if any(p.grad is not None and p.numel() for p in groups[group]["params"])
        }
        before = [(groups[place.group], place.key, groups[place.group][place.key]) for place in self._places]
        try:
            for place, mark in zip(self._places, self._marks, strict=True):
                group = groups[place.group]
                if place.item is not None:
                    items = list(group[place.key])
                    items[place.item] = mark
                    group[place.key] = tuple(items)
                else:
                    group[place.key] = mark
            yield
        finally:
            for group, key, value in before:
                group[key] = value

    def follow(self, graph: Graph) -> Callable[[], None]:
        """What gives the captured graph the hyperparameters of now, to be called before each replay.

        Those of a group without gradients are in no operation, and change nothing.

        Raises:
            NumbersNotFound: a hyperparameter is not where it should be. The graph is of no use.
        """
        if not self._places:
            return nothing
        marks = list(zip(self._places, self._marks, strict=True))
        sets = [[mark for place, mark in marks if place.group == group] for group in sorted(self._stepped)]
        places = [place for group in sorted(self._stepped) for place in self._places if place.group == group]
        keys = list(dict.fromkeys((place.group, place.key) for place in places))
        writer = graph.numbers(sets, FUSED_KERNELS)
        held: list[Any] = []

        def write() -> None:
            """Give the graph the hyperparameters of now, if they are others than before. Hot path."""
            nonlocal held
            groups = self.optimizer.param_groups
            now = [groups[group][key] for group, key in keys]
            if now != held:
                writer.write([float(self.value(place)) for place in places])
                held = now

        try:
            write()  # a graph that takes no numbers is found out now
        except RuntimeError as error:
            raise NumbersNotFound(str(error)) from error
        self._followed = True
        return write

    def value(self, place: NumberPlace) -> Any:
        """What the user's optimizer has there now."""
        value = self.optimizer.param_groups[place.group][place.key]
        return value if place.item is None else value[place.item]

    def baked(self, hyperparameters: tuple[Any, ...]) -> Any:
        """What the capture bakes in, to be compared with `hyperparameters()` of later steps."""
        if not self._followed:
            return hyperparameters
        opened: dict[int, set[int | None]] = {}
        for place in self._places:
            opened.setdefault(place.entry, set()).add(place.item)
        return _Baked(hyperparameters, opened)


class _Baked:
    """Hyperparameters of a capture without the values that are left open."""

    __hash__ = None  # type: ignore[assignment]

    def __init__(self, hyperparameters: tuple[Any, ...], opened: dict[int, set[int | None]]) -> None:
        self._opened = opened
        self._values = self._without_open(hyperparameters)
        self._last = hyperparameters

    def __eq__(self, now: object) -> bool:
        """Hot path: hyperparameters of most steps are those of the step before."""
        if now == self._last:
            return True
        if not isinstance(now, tuple) or self._without_open(now) != self._values:
            return False
        self._last = now
        return True

    def _without_open(self, hyperparameters: tuple[Any, ...]) -> list[Any]:
        values = list(hyperparameters)
        for entry, items in self._opened.items():
            if entry >= len(values):
                break
            value = values[entry]
            if isinstance(value, tuple):
                values[entry] = tuple(
                    _OPEN if position in items and _may_change(item) else item
                    for position, item in enumerate(value)
                )
            elif None in items and _may_change(value):
                values[entry] = _OPEN
        return values


_OPEN = object()
"""Stands for a number that replays read anew."""


def _may_change(value: Any) -> bool:
    return isinstance(value, float) and 0 < value < math.inf  # NumPy's float64 is one as well


def _open(optimizer: Optimizer, entries: Iterable[tuple[int, int, str]]) -> Iterator[NumberPlace]:
    for entry, group, key in entries:
        value = optimizer.param_groups[group].get(key)
        if type(value) is tuple:
            yield from (
                NumberPlace(entry, group, key, k) for k, item in enumerate(value) if _may_change(item)
            )
        elif _may_change(value):
            yield NumberPlace(entry, group, key, None)


def _mark(index: int) -> float:
    """A number between 0 and 1 with 53 random bits, always the same one: no constant of a model has it."""
    return random.Random(f"hyperparameter {index}").random()
