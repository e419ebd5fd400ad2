"""What Dynamo's code calls in the place of its graph: the graph, or what a replay has returned."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pygraph_train.boundary import taken_back
from pygraph_train.putting_back import HostCopy, ScratchState
from pygraph_train.tracing.counters import Counters
from pygraph_train.tracing.late_numbers import LateNumbers
from pygraph_train.tracing.writes import maybe_written

__all__ = ["LEFT", "Seat", "unless_left"]

LEFT = object()
"""In the place of the result of a run that was left to somebody else."""


class _Left(Exception):
    """Dynamo's code is left before its graph has run, and before it has written anything to Python."""


def unless_left(call: Callable[..., Any]) -> Callable[..., Any]:
    """`call`, which returns `LEFT` and no items where `Seat.leaves` has said so."""

    def called(*args: Any) -> Any:
        try:
            return call(*args)
        except _Left:
            return LEFT, ()

    return called


class Seat:
    """Stands where Dynamo's code calls its graph.

    Args:
        counted: the counters of the graph, which has none any more.
        late: the numbers that are read when the graph has run.

    Attributes:
        graph: takes and returns tensors.
        leaves: whether a run is left to somebody else, who runs the function itself: see `unless_left`.
        begins: called with the inputs of the graph before its first run.
        instead: what is returned without a run.
        marks: whether marks stand for such numbers, and nothing is read.
        places: tensors in the place of these inputs.
        keeps: whether `outputs` shall hold what the graph returns.
        undoes: how a run that fails is taken back, for those who ask for it by `failed`; None where it is not.
        failed: whether the last run has failed and was taken back.
    """

    def __init__(self, counted: Counters | None, late: LateNumbers | None) -> None:
        self.graph: Callable[..., Any] = _no_graph
        self.leaves: Callable[[], bool] = bool
        self.begins: Callable[[Sequence[Any]], None] | None = None
        self.instead: Sequence[Any] | None = None
        self.places: dict[int, Tensor] = {}
        self.keeps = self.marks = False
        self.outputs: Sequence[Any] | None = None
        self.undoes: FailedRuns | None = None
        self.failed = False
        self.late = late
        self._counted = counted

    def __call__(self, *inputs: Any) -> Sequence[Any]:
        found = self._with_counters(inputs)
        if self.late is None:
            return found
        return self.late.outputs(found, marked=self.marks, replayed=self.instead is not None)

    def _with_counters(self, inputs: Sequence[Any]) -> Sequence[Any]:
        if self._counted is None:
            return self._tensors(inputs)
        counted = self._counted
        numbers = counted.compute(*[inputs[i] for i in counted.read])
        outputs = list(self._tensors([x for i, x in enumerate(inputs) if i not in counted.inputs]))
        for place, number in zip(counted.results, numbers, strict=True):  # the places ascend
            outputs.insert(place, number)
        return outputs

    def took_back(self) -> bool:
        """After an exception: whether the graph has raised it, and was taken back. Asked once.

        Dynamo's code writes to Python, and draws on the host, at other times than the function. So the function itself
        has to run as far as it comes.
        """
        failed, self.failed = self.failed, False
        return failed

    def _tensors(self, inputs: Sequence[Any]) -> Sequence[Any]:
        if self.instead is not None:
            return self.instead
        if self.begins is not None:
            begins, self.begins = self.begins, None
            begins(inputs)
        if self.leaves():
            raise _Left
        if self.places:
            inputs = [self.places.get(i, x) for i, x in enumerate(inputs)]
        before = None if self.undoes is None else self.undoes.before(inputs)
        try:
            outputs: Sequence[Any] = self.graph(*inputs)
        except Exception:
            if before is not None:
                before.restore()
                taken_back()
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
