"""Numbers that a step reads of its tensors, and only returns or keeps: `loss.item()` in what it logs.

Nothing in the step depends on them. So a graph holds a copy of each tensor as it was at that line, and the number is
read when the graph has run. Until then a mark stands in its place.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from pygraph_train.torch_private.dynamo import module_of_copy
from pygraph_train.torch_private.side_effects import SideEffect
from pygraph_train.tracing.late_marks import LateFloat, LateInt, LateTensor
from pygraph_train.tracing.late_nodes import LateNodes, nothing_depends_on_numbers, value_of
from pygraph_train.tracing.reasons import line_of

__all__ = ["LateNumbers", "late_numbers", "replaced_later", "without_late_numbers"]


@dataclass(frozen=True)
class LateNumbers:
    """Those of one graph.

    Args:
        reads: how many tensors the graph returns, after all else, to be read.
        alone: for each number, the one of these tensors that holds it; None where it is computed.
        results: places of the numbers among what Dynamo's code wants of the graph.
        floats: for each, whether it is a float, which that code takes out of a tensor; otherwise an int.
        lines: for each, `file:line` where it is read or computed.
        compute: takes these tensors and returns these numbers.
    """

    reads: int
    alone: tuple[int | None, ...]
    results: tuple[int, ...]
    floats: tuple[bool, ...]
    lines: tuple[str | None, ...]
    compute: Callable[..., tuple[Any, ...]]
    _results: list[tuple[Any, ...]] = field(
        default_factory=list
    )  # of the replay whose writes are still to be made

    def outputs(self, found: Sequence[Any], *, marked: bool, replayed: bool = False) -> list[Any]:
        """What Dynamo's code wants, of what the graph has returned. The host waits for the numbers, once.

        Args:
            marked: marks stand for the numbers. Nothing is read.
            replayed: the graph has returned it in a replay, whose results may have been read.
        """
        end = len(found) - self.reads
        outputs, tensors = list(found[:end]), list(found[end:])
        results = self._results.pop() if self._results else None
        if marked:
            values: Sequence[Any] = self._marks(tensors)
        else:
            values = results if results is not None and replayed else self.compute(*on_host(tensors))
        for place, value in zip(self.results, values, strict=True):  # the places ascend
            outputs.insert(place, value)
        return outputs

    def _marks(self, tensors: list[Tensor]) -> list[Any]:
        def read() -> list[Any]:
            self._results[:] = [self.compute(*on_host(tensors))]
            return [x.item() if isinstance(x, Tensor) else x for x in self._results[0]]

        marks: list[Any] = []
        for index, (is_float, place) in enumerate(zip(self.floats, self.alone, strict=True)):
            mark: LateFloat | LateInt = LateFloat() if is_float else LateInt()
            mark.read, mark.of, mark.line = read, operator.itemgetter(index), self.lines[index]
            mark.tensor = None if place is None else tensors[place]
            marks.append(LateTensor(mark) if is_float else mark)
        return marks


def late_numbers(gm: fx.GraphModule) -> LateNumbers | None:
    """The numbers that a graph of Dynamo's reads, None where it reads none, or something depends on one."""
    found = LateNodes.of(gm)
    outputs: Any = gm.graph.output_node().args[0]
    if not found.reads or not nothing_depends_on_numbers(gm):
        return None
    places = [i for i, node in enumerate(outputs) if node in found.numbers]
    if any(isinstance(value_of(outputs[i]), torch.SymBool) for i in places):
        return None  # it has no subclass
    floats = tuple(not isinstance(value_of(outputs[i]), torch.SymInt) for i in places)
    compute = found.function(gm, [outputs[i] for i in places], found.reads)
    alone = tuple(_read_alone(outputs[i], found.reads) for i in places)
    lines = tuple(_line(outputs[i]) for i in places)
    return LateNumbers(len(found.reads), alone, tuple(places), floats, lines, compute)


def on_host(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Copies of numbers in the host's memory, for which the host waits once, however many there are."""
    if len(tensors) < 2 or not all(x.is_cuda for x in tensors):
        return tensors
    copies = [x.to("cpu", non_blocking=True) for x in tensors]
    torch.cuda.current_stream(tensors[0].device).synchronize()
    return copies


def replaced_later(gm: fx.GraphModule, effects: Iterable[SideEffect]) -> set[str]:
    """Expressions of numbers that a step depends on, and replaces by such that are read when its graph has run."""
    found = {expression for effect in effects for expression in effect.later}
    return found if found and late_numbers(gm) is not None else set()


def _line(node: fx.Node) -> str | None:
    """What Dynamo adds behind the user's code has none."""
    while (line := line_of(node)) is None and node.all_input_nodes:
        node = node.all_input_nodes[0]
    return line


def _read_alone(node: fx.Node, reads: list[fx.Node]) -> int | None:
    node = node.args[0] if node.target is torch.scalar_tensor else node  # type: ignore[assignment]
    return reads.index(node) if node in reads else None


def without_late_numbers(gm: fx.GraphModule, found: LateNumbers) -> fx.GraphModule:
    """A copy of a graph of Dynamo's that returns copies of the tensors, in the place of their numbers."""
    copies: dict[fx.Node, fx.Node] = {}
    graph = fx.Graph()
    values: Any = graph.graph_copy(gm.graph, copies)
    of_graph = LateNodes.of(gm)
    read: dict[fx.Node, fx.Node] = {}
    for node in of_graph.reads:
        with graph.inserting_before(copies[node]):
            alone = graph.call_method("detach", (copies[node].args[0],))
            read[node] = graph.call_method("clone", (alone,))
    graph.output((*(value for i, value in enumerate(values) if i not in found.results), *read.values()))
    for node in reversed([x for x in gm.graph.nodes if x in of_graph.numbers]):
        graph.erase_node(copies.pop(node))
    return module_of_copy(gm, graph, copies)
