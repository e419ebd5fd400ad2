"""Counters of a region: see `tracing.counters`.

Where no tensor depends on a number, the region is called with the number of its first run each time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pygraph_train.tracing.counters import Counters

__all__ = ["Counting"]


class Counting:
    """A region with counters. Python computes the new numbers, so one captured graph serves every count.

    Args:
        region: a callable in AOTAutograd's boxed convention.
        counters: the counters of the region's graph.
    """

    def __init__(self, region: Callable[[list[Any]], Any], counters: Counters) -> None:
        self._boxed_call = True
        self._region = region
        self._inputs = counters.inputs
        self._results = counters.results
        self._read = counters.read
        self._compute = counters.compute
        self._first: list[Any] | None = None

    def __call__(self, inputs: list[Any]) -> list[Any]:
        """Run the region once; the list is emptied."""
        results = self._compute(*[inputs[i] for i in self._read])
        if self._first is None:
            self._first = [inputs[i] for i in self._inputs]
        for i, number in zip(self._inputs, self._first, strict=True):
            inputs[i] = number
        outputs = list(self._region(inputs))
        for i, number in zip(self._results, results, strict=True):
            outputs[i] = number
        return outputs
