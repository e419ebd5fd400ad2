"""Where a training step ends, in a loop that the user wrote: with the step of one of its optimizers."""

from __future__ import annotations

import weakref

from pygraph_train.optimizers.graph import OptimizerGraph
from pygraph_train.step.living import Living

_ABSENT = 16
"""Steps of others, for each optimizer, after which one that makes none is not waited for."""

_MOST_ABSENT = 256
"""The same of one that came back each time. Each time it is waited for twice as long."""


class Rounds:
    """One round of all optimizers that make steps is a training step, and ends with the last one of them.

    Some make several steps in a round. Some stop, or begin later: then the last one of the others ends the round.

    Args:
        optimizers: of the loop, in the order in which they were taken over. It may change.
    """

    def __init__(self, optimizers: Living[OptimizerGraph]) -> None:
        self._optimizers = optimizers
        self.begin_anew()

    def begin_anew(self) -> None:
        """There are other optimizers than before."""
        self._last: weakref.ref[OptimizerGraph] | None = None
        self._complete = True  # no later one is absent
        self._given_up: weakref.ref[OptimizerGraph] | None = None
        self._patience = _ABSENT
        self._others = 0

    def ends_with(self, graph: OptimizerGraph) -> bool:
        """Whether a training step ends with the step of an optimizer that was just made. Hot path."""
        last = None if self._last is None else self._last()
        if last is graph:
            self._others = 0
            return True
        self._others += 1
        if last is not None and self._complete and self._others <= self._patience * len(self._optimizers):
            return False
        return self._last_is_another(graph, last)

    def _last_is_another(self, graph: OptimizerGraph, last: OptimizerGraph | None) -> bool:
        """The same where the last one is not known, or another one may be the last one from now on."""
        there = list(self._optimizers)
        if graph not in there:
            return False
        if last is None or last not in there:
            last = there[-1]
        later = there.index(graph) > there.index(last)
        if later and self._given_up is not None and self._given_up() is graph:
            self._patience = min(2 * self._patience, _MOST_ABSENT)  # it makes steps, and few
        if later or self._others > self._patience * len(there):
            self._given_up = self._given_up if later else weakref.ref(last)
            last = graph
            self._others = 0
        self._last, self._complete = weakref.ref(last), last is there[-1]
        return last is graph and not later  # who comes back has made a step in a round that was counted
