"""Numbers that a step reads of its tensors, and only returns or keeps: `loss.item()` in what it logs.

Nothing in the step depends on them. So a graph holds a copy of each tensor as it was at that line, and the number is
read when the graph has run. Until then a mark stands in its place.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from pygraph_train.problems import NotLegal, Problem
from pygraph_train.torch_private.dynamo import module_of_copy
from pygraph_train.torch_private.side_effects import SideEffect
from pygraph_train.tracing.reasons import line_of

__all__ = [
    "LateFloat",
    "LateInt",
    "LateNumbers",
    "LateTensor",
    "LateText",
    "Mark",
    "is_late",
    "late_numbers",
    "once_read",
    "replaced_later",
    "without_late_numbers",
]


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
        outputs, tensors = list(found[: -self.reads]), list(found[-self.reads :])
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


class Mark:
    """Stands for a number until the graph has run. Whoever computes with it is refused.

    Attributes:
        read: returns what the graph's numbers are, once the graph has run.
        of: takes these, and returns this one.
        line: where it comes from.
        tensor: holds the number in the graph; None where Python computes it of others.
    """

    read: Callable[[], list[Any]]
    of: Callable[[list[Any]], Any]
    line: str | None = None
    tensor: Tensor | None


class LateFloat(Mark, float):
    """Stands for a float."""


class LateInt(Mark, int):
    """Stands for an int."""


class LateText(Mark, str):
    """Stands for a text that is made of such numbers."""


_MARKS: dict[type, type[LateFloat | LateInt | LateText]] = {float: LateFloat, int: LateInt, str: LateText}


def once_read(
    compute: Callable[..., Any], expressions: Sequence[str], latest: Mapping[str, Any], kind: type
) -> Callable[..., Any]:
    """`compute`, which returns a mark where it gets marks.

    Args:
        expressions: of what it takes.
        latest: the values of expressions in the step that the graph runs for.
        kind: what it may return.
    """

    def computed(*values: Any) -> Any:
        marks = [x for x in values if isinstance(x, Mark)]
        if not marks:
            return compute(*values)

        def of(numbers: list[Any]) -> Any:
            given = zip(expressions, values, strict=True)
            return compute(*[x.of(numbers) if isinstance(x, Mark) else latest[e] for e, x in given])

        made = _MARKS[kind]()
        made.read, made.of, made.line, made.tensor = marks[0].read, of, marks[0].line, None
        return made

    return computed


def _refused(self: Mark, *_: Any) -> Any:
    raise NotLegal(
        Problem(
            "the step uses a number that it reads of a tensor (in a text, a key or a condition), before its "
            "graph has run",
            self.line,
            "Return the number, and use it outside of the step",
        )
    )


_COMPARISONS = {"__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__"}
_TEXTS = {"__str__", "__repr__", "__format__", "__hash__"}
_KEPT = {"__getnewargs__", "__getformat__"}
for _name in (set(dir(int) + dir(float) + dir(str)) - set(dir(object)) - _KEPT) | _COMPARISONS | _TEXTS:
    if _name.startswith("__"):
        setattr(Mark, _name, _refused)


class LateTensor:
    """Stands for the tensor that Dynamo's code takes a float out of. No result of a step can be one."""

    def __init__(self, mark: LateFloat | LateInt) -> None:
        self.mark = mark

    def item(self) -> Any:
        return self.mark


def late_numbers(gm: fx.GraphModule) -> LateNumbers | None:
    """The numbers that a graph of Dynamo's reads, None where it reads none, or something depends on one."""
    reads, numbers = _numbers(gm)
    outputs: Any = gm.graph.output_node().args[0]
    allowed = {*numbers, gm.graph.output_node()}
    if not reads or any(not allowed.issuperset(node.users) for node in numbers):
        return None
    if any(node.args[0] in numbers for node in reads):  # of a tensor that is made of a number
        return None
    places = [i for i, node in enumerate(outputs) if node in numbers]
    if any(isinstance(_value(outputs[i]), torch.SymBool) for i in places):
        return None  # it has no subclass
    floats = tuple(not isinstance(_value(outputs[i]), torch.SymInt) for i in places)
    graph = fx.Graph()
    given = [graph.placeholder(node.name) for node in reads]
    copies = {node: graph.call_method("item", (x,)) for node, x in zip(reads, given, strict=True)}
    for node in gm.graph.nodes:
        if node in numbers and node not in copies:
            copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(tuple(copies[outputs[i]] for i in places))
    alone = tuple(_read_alone(outputs[i], reads) for i in places)
    lines = tuple(_line(outputs[i]) for i in places)
    return LateNumbers(len(reads), alone, tuple(places), floats, lines, fx.GraphModule(gm, graph).forward)


def is_late(node: fx.Node) -> bool:
    """Whether a node of Dynamo's graph reads a number of a tensor, or computes with nothing but such numbers."""
    if _reads(node):
        return True
    return _computes(node) and bool(node.all_input_nodes) and all(map(is_late, node.all_input_nodes))


def on_host(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """Copies of numbers in the host's memory, for which the host waits once, however many there are."""
    if len(tensors) < 2 or not all(x.is_cuda for x in tensors):
        return tensors
    copies = [x.to("cpu", non_blocking=True) for x in tensors]
    torch.cuda.current_stream(tensors[0].device).synchronize()
    return copies


def _reads(node: fx.Node) -> bool:
    return node.op == "call_method" and node.target == "item" and len(node.args) == 1


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
    reads, numbers = _numbers(gm)
    read: list[fx.Node] = []
    for node in reads:
        with graph.inserting_before(copies[node]):
            alone = graph.call_method("detach", (copies[node].args[0],))
            read.append(graph.call_method("clone", (alone,)))
    graph.output((*(value for i, value in enumerate(values) if i not in found.results), *read))
    for node in reversed(list(numbers)):
        graph.erase_node(copies.pop(node))
    return module_of_copy(gm, graph, copies)


def _numbers(gm: fx.GraphModule) -> tuple[list[fx.Node], dict[fx.Node, None]]:
    """Nodes that read a number of a tensor, and with them all that computes with nothing but such numbers."""
    reads: list[fx.Node] = []
    numbers: dict[fx.Node, None] = {}
    for node in gm.graph.nodes:
        if _reads(node):
            reads.append(node)
            numbers[node] = None
        elif _computes(node) and node.all_input_nodes and all(x in numbers for x in node.all_input_nodes):
            numbers[node] = None
    return reads, numbers


def _computes(node: fx.Node) -> bool:
    """Whether a node gives the same whenever it is done on the host, and raises nothing: the step is made by then."""
    if node.op != "call_function" or node.kwargs.keys() - {"dtype"}:
        return False
    if node.target in _ALWAYS:
        return True
    if node.target in _DIVISIONS:
        divisor = node.args[1]
        return isinstance(divisor, int | float) and divisor != 0
    if node.target is torch.sym_int:  # there is none of what is not finite
        return all(isinstance(_value(x), torch.SymInt) for x in node.all_input_nodes)
    # without a dtype it is of the user
    return node.target is torch.scalar_tensor and node.kwargs.get("dtype") is torch.float64


_ALWAYS = (
    *(operator.add, operator.sub, operator.mul, operator.neg, operator.pos, operator.abs),
    *(operator.iadd, operator.isub, operator.imul, torch.sym_float),
)
_DIVISIONS = (operator.truediv, operator.floordiv, operator.mod)


def _value(node: fx.Node) -> Any:
    return node.meta.get("example_value")
