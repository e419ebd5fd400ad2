"""What Dynamo's code calls in the place of its graph: the graph, or what a replay has returned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pygraph_train.putting_back import HostCopy, ScratchState
from pygraph_train.tracing.counters import Counters
from pygraph_train.tracing.writes import maybe_written

__all__ = ["Seat"]


class Seat:
    """Stands where Dynamo's code calls its graph.

    Args:
        counted: the counters of the graph, which has none any more.

    Attributes:
        graph: takes and returns tensors.
        begins: called with the inputs of the graph before its first run.
        instead: what is returned without a run.
        places: tensors in the place of these inputs.
        keeps: whether `outputs` shall hold what the graph returns.
        undoes: how a run that fails is taken back, for those who ask for it by `failed`; None where it is not.
        failed: whether the last run has failed and was taken back.
    """

    def __init__(self, counted: Counters | None) -> None:
        self.graph: Callable[..., Any] = _no_graph
        self.begins: Callable[[Sequence[Any]], None] | None = None
        self.instead: Sequence[Any] | None = None
        self.places: dict[int, Tensor] = {}
        self.keeps = False
        self.outputs: Sequence[Any] | None = None
        self.undoes: FailedRuns | None = None
        self.failed = False
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
        before = None if self.undoes is None else self.undoes.before(inputs)
        try:
            outputs: Sequence[Any] = self.graph(*inputs)
        except Exception:
            if before is not None:
                before.restore()
                self.failed = True
            raise
        if self.keeps:
            self.outputs = outputs
        return outputs


class FailedRuns:
    """Takes runs of a graph of Dynamo's back that raise an exception.

    Args:
        graph: the graph, in whose order its inputs are.
        device: where it runs.
    """

    def __init__(self, graph: torch.fx.GraphModule, device: torch.device) -> None:
        written = set(maybe_written(graph))
        placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
        self._places = [i for i, node in enumerate(placeholders) if node in written]
        self._device = device

    def before(self, inputs: Sequence[Any]) -> ScratchState | HostCopy:
        """What a run may change, as it is now. Parameters are large."""
        # sizes are inputs as well, where a trace is for several shapes
        written = [inputs[i] for i in self._places if isinstance(inputs[i], Tensor)]
        kind = HostCopy if any(isinstance(tensor, nn.Parameter) for tensor in written) else ScratchState
        return kind(self._device, written)


def _no_graph(*inputs: Any) -> Sequence[Any]:
    raise AssertionError("nothing was compiled")
