"""Which state an optimizer has: a step makes what it misses, and must not do so inside of a capture."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from pygraph_train.problems import NotLegal, Problem


class StateWatch:
    """Notices state that was cleared, replaced, or never made.

    Args:
        optimizer: any; state that is no dict is not looked into.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self._optimizer = optimizer
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
        state = self._optimizer.state
        before = {id(p): (own, dict(own)) for p, own in state.items() if isinstance(own, dict)}
        made = False
        try:
            yield
        finally:
            for p, own in list(state.items()):
                known, values = before.get(id(p), (None, {}))
                if not isinstance(own, dict):
                    continue
                if known is not own:
                    made |= bool(own)
                    del state[p]
                elif not _same(_tensors(own), _tensors(values)):
                    made = True
                    own.clear()
                    own.update(values)
        if made:
            raise NotLegal(
                Problem(
                    "the optimizer makes state in a step that is to be captured, and has made none before"
                )
            )

    def _objects(self) -> list[Tensor]:
        return [t for own in self._optimizer.state.values() if isinstance(own, dict) for t in _tensors(own)]


def _tensors(own: dict[Any, Any]) -> list[Tensor]:
    return [value for value in own.values() if isinstance(value, Tensor)]


def _same(before: list[Tensor], after: list[Tensor]) -> bool:
    return len(before) == len(after) and all(map(operator.is_, before, after))
