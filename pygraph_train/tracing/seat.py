"""What Dynamo's code calls in the place of its graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from pygraph_train.tracing.counters import Counters

__all__ = ["Seat"]


class Seat:
    """What Dynamo's code calls in the place of its graph.

    Args:
        counted: the counters of the graph, which has none any more.

    Attributes:
        graph: takes and returns tensors.
        begins: called with the inputs of the graph before its first run.
        instead: what is returned without a run.
        places: tensors in the place of these inputs.
        keeps: whether `outputs` shall hold what the graph returns.
    """

    def __init__(self, counted: Counters | None) -> None:
        self.graph: Callable[..., Any] = _no_graph
        self.begins: Callable[[Sequence[Any]], None] | None = None
        self.instead: Sequence[Any] | None = None
        self.places: dict[int, Tensor] = {}
        self.keeps = False
        self.outputs: Sequence[Any] | None = None
        self._counted = counted

    def __call__(self, *inputs: Any) -> Sequence[Any]:
        if self._counted is None:
            return self._tensors(inputs)
        counted = self._counted
        numbers = counted.compute(*[inputs[i] for i in counted.read])
        outputs = list(self._tensors([x for i, x in enumerate(inputs) if i not in counted.inputs]))
        for place, number in zip(counted.results, numbers, strict=True):  # the places ascend
            outputs.insert(place, number)
        return outputs

    def _tensors(self, inputs: Sequence[Any]) -> Sequence[Any]:
        if self.instead is not None:
            return self.instead
        if self.begins is not None:
            begins, self.begins = self.begins, None
            begins(inputs)
        if self.places:
            inputs = [self.places.get(i, x) for i, x in enumerate(inputs)]
        outputs: Sequence[Any] = self.graph(*inputs)
        if self.keeps:
            self.outputs = outputs
        return outputs


def _no_graph(*inputs: Any) -> Sequence[Any]:
    raise AssertionError("nothing was compiled")
