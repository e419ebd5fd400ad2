"""Which state an optimizer has: a step makes what it misses, and must not do so inside of a capture."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import chain
from unittest import mock

from torch import Tensor
from torch.optim import Optimizer

from pygraph_train.problems import NotLegal, Problem


class StateWatch:
    """Notices state that was cleared, replaced, or never made.

    Args:
        *optimizers: of one step; state that is no dict is not looked into.
    """

    def __init__(self, *optimizers: Optimizer) -> None:
        self._optimizers = optimizers
        self._left: list[Tensor] | None = None

    def leave(self) -> None:
        """Note the state as a step that ran without a graph has left it."""
        self._left = self._objects()

    def as_left(self) -> bool:
        """Whether the state holds the objects of the last `leave()`, so that the next step makes none."""
        return self._left is None or _same(self._left, self._objects())

    @contextmanager
    def none_is_made(self) -> Iterator[None]:
        """Around a capture: the values of state that is made inside would exist in replays only.

        Raises:
            NotLegal: state was made. It is gone again.
        """
        objects, states = self._objects(), [optimizer.state for optimizer in self._optimizers]
        with ExitStack() as before:
            for table in chain(states, *(state.values() for state in states)):
                if isinstance(table, dict):
                    before.enter_context(mock.patch.dict(table))
            yield
            made = not _same(objects, self._objects())
        if made:
            raise NotLegal(
                Problem(
                    "the optimizer makes state in a step that is to be captured, and has made none before"
                )
            )

    def _objects(self) -> list[Tensor]:
        all_own = chain.from_iterable(optimizer.state.values() for optimizer in self._optimizers)
        values = chain.from_iterable(own.values() for own in all_own if isinstance(own, dict))
        return [value for value in values if isinstance(value, Tensor)]


def _same(before: list[Tensor], after: list[Tensor]) -> bool:
    return len(before) == len(after) and all(map(operator.is_, before, after))
