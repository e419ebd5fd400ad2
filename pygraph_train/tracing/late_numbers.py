"""Numbers that a step reads of its tensors, and only returns or keeps: `loss.item()` in what it logs.

Nothing in the step depends on them. So a graph holds a copy of each tensor as it was at that line, and the number is
read when the graph has run. Until then a mark stands in its place.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from pygraph_train.gaps import leave_gap, may_leave_gap
from pygraph_train.problems import NotLegal, Problem
from pygraph_train.torch_private.dispatch import FakeTensor
from pygraph_train.torch_private.dynamo import module_of_copy
from pygraph_train.torch_private.late_decisions import QUESTIONS, OtherWay, bounds_bool, decided
from pygraph_train.torch_private.memory import borrower
from pygraph_train.tracing.reasons import line_of

__all__ = [
    "Check",
    "LateFloat",
    "LateInt",
    "LateNumbers",
    "LateTensor",
    "has_questions",
    "late_numbers",
    "nothing_depends_on_numbers",
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
        checks: ask in each run whether values lead the way of the graph.
    """

    reads: int
    alone: tuple[int | None, ...]
    results: tuple[int, ...]
    floats: tuple[bool, ...]
    lines: tuple[str | None, ...]
    compute: Callable[..., tuple[Any, ...]]
    checks: tuple[Check, ...] = ()

    def outputs(self, found: Sequence[Any], *, marked: bool) -> list[Any]:
        """What Dynamo's code wants, of what the graph has returned. The host waits for the numbers.

        Args:
            marked: marks stand for the numbers. Nothing is read.
        """
        end = len(found) - self.reads
        outputs, tensors = list(found[:end]), list(found[end:])
        values = self._marks(tensors) if marked else self.compute(*tensors)
        for place, value in zip(self.results, values, strict=True):  # the places ascend
            outputs.insert(place, value)
        return outputs

    def _marks(self, tensors: list[Tensor]) -> list[Any]:
        def read() -> list[Any]:
            return [x.item() if isinstance(x, Tensor) else x for x in self.compute(*tensors)]

        marks: list[Any] = []
        for index, (is_float, place) in enumerate(zip(self.floats, self.alone, strict=True)):
            mark: LateFloat | LateInt = LateFloat() if is_float else LateInt()
            mark.read, mark.index, mark.line = read, index, self.lines[index]
            mark.tensor = None if place is None else tensors[place]
            marks.append(LateTensor(mark) if is_float else mark)
        return marks


class Check(nn.Module):
    """In a graph: values of the step have to lead the way that was traced. A capture leaves a gap for it.

    Args:
        compute: takes tensors and returns answers.
        answers: of the call that was traced.
        lines: `file:line` of each question.
        tensors: what is read, in the graph that was traced.
    """

    _is_impure = True  # for fx: it has no result, and is no dead code

    def __init__(
        self,
        compute: Callable[..., tuple[Any, ...]],
        answers: Sequence[bool],
        lines: Sequence[str],
        tensors: Sequence[fx.Node],
    ) -> None:
        super().__init__()
        self.lines = tuple(lines)
        self.tensors = list(tensors)
        self._compute, self._answers = compute, tuple(answers)

    def forward(self, *tensors: Tensor) -> None:
        """Ask.

        Raises:
            OtherWay: they lead another way.
        """
        if may_leave_gap():
            places = [borrower(tensor) for tensor in tensors]
            leave_gap(lambda: self._ask([place() for place in places]))
        elif not isinstance(tensors[0], FakeTensor):
            self._ask(tensors)

    def _ask(self, tensors: Sequence[Tensor]) -> None:
        for found, answer, line in zip(self._compute(*tensors), self._answers, self.lines, strict=True):
            if bool(found) is not answer:
                raise OtherWay(line)


class _Mark:
    """Stands for a number until the graph has run. Whoever computes with it is refused.

    Attributes:
        read: returns all numbers of the step, once the graph has run.
        index: of this one among them.
        line: where it comes from.
        tensor: holds the number in the graph; None where Python computes it of others.
    """

    read: Callable[[], list[Any]]
    index: int
    line: str | None = None
    tensor: Tensor | None


class LateFloat(_Mark, float):
    """Stands for a float."""


class LateInt(_Mark, int):
    """Stands for an int."""


def _refused(self: _Mark, *_: Any) -> Any:
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
for _name in (set(dir(int) + dir(float)) - set(dir(object)) - _KEPT) | _COMPARISONS | _TEXTS:
    if _name.startswith("__"):
        setattr(_Mark, _name, _refused)


class LateTensor:
    """Stands for the tensor that Dynamo's code takes a float out of. No result of a step can be one."""

    def __init__(self, mark: LateFloat | LateInt) -> None:
        self.mark = mark

    def item(self) -> Any:
        return self.mark


def late_numbers(gm: fx.GraphModule) -> LateNumbers | None:
    """The numbers that a graph of Dynamo's reads, None where it reads none, or something depends on one."""
    found = _Found.of(gm)
    outputs: Any = gm.graph.output_node().args[0]
    if not (found.reads or found.asks) or not nothing_depends_on_numbers(gm):
        return None
    places = [i for i, node in enumerate(outputs) if node in found.numbers]
    if any(isinstance(_value(outputs[i]), torch.SymBool) for i in places):
        return None  # it has no subclass
    floats = tuple(not isinstance(_value(outputs[i]), torch.SymInt) for i in places)
    compute = found.function(gm, [outputs[i] for i in places], found.reads)
    alone = tuple(_read_alone(outputs[i], found.reads) for i in places)
    lines = tuple(_line(outputs[i]) for i in places)
    checks = tuple(found.check(gm, asks) for asks in found.groups(gm))
    return LateNumbers(len(found.reads), alone, tuple(places), floats, lines, compute, checks)


def has_questions(gm: fx.GraphModule) -> bool:
    """Whether values that a graph computes have decided which way it takes."""
    return any(node.target is decided for node in gm.graph.nodes)


def nothing_depends_on_numbers(gm: fx.GraphModule) -> bool:
    """Whether the numbers that a graph reads, if any, are for its results and for decisions alone."""
    found = _Found.of(gm)
    if any(node.args[0] in found.numbers for node in found.reads):  # of a tensor that is made of a number
        return False
    allowed = {*found.numbers, *found.asks, gm.graph.output_node()}
    return all(allowed.issuperset(node.users) for node in found.numbers)


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
    of_graph = _Found.of(gm)
    read: dict[fx.Node, fx.Node] = {}
    for node in of_graph.reads:
        with graph.inserting_before(copies[node]):
            alone = graph.call_method("detach", (copies[node].args[0],))
            read[node] = graph.call_method("clone", (alone,))
    for number, (asks, check) in enumerate(zip(of_graph.groups(gm), found.checks, strict=True)):
        gm.add_module(f"{_CHECK}_{number}", check)
        with graph.inserting_after(copies[asks[-1]]):
            graph.call_module(f"{_CHECK}_{number}", tuple(map(read.__getitem__, check.tensors)))
        check.tensors.clear()
    graph.output((*(value for i, value in enumerate(values) if i not in found.results), *read.values()))
    for node in reversed([x for x in gm.graph.nodes if x in of_graph.numbers or x in of_graph.asks]):
        graph.erase_node(copies.pop(node))
    return module_of_copy(gm, graph, copies)


_CHECK = "check_of_decisions"


@dataclass(frozen=True)
class _Found:
    """Nodes of a graph: those that read a value of a tensor, all that computes with nothing but such, and questions."""

    reads: list[fx.Node]
    numbers: dict[fx.Node, None]
    asks: list[fx.Node]

    @classmethod
    def of(cls, gm: fx.GraphModule) -> _Found:
        found = cls([], {}, [])
        for node in gm.graph.nodes:
            if node.op == "call_method" and node.target == "item" and len(node.args) == 1:
                found.reads.append(node)
                found.numbers[node] = None
            elif node.target is decided:
                found.asks.append(node)
                if node.args[0] not in found.numbers:
                    found.reads.append(node)
            elif (
                _computes(node)
                and node.all_input_nodes
                and all(x in found.numbers for x in node.all_input_nodes)
            ):
                found.numbers[node] = None
        return found

    def groups(self, gm: fx.GraphModule) -> list[list[fx.Node]]:
        """Questions that are asked together: nothing between them goes wrong where an answer is another one.

        What comes after a question may rest on its answer, as an index that the question was about: it would stop the
        device.
        """
        groups: list[list[fx.Node]] = []
        together = False
        for node in gm.graph.nodes:
            if node in self.asks:
                if not together:
                    groups.append([])
                groups[-1].append(node)
                together = True
            elif node not in self.numbers and node not in self.reads and not _goes_well(node):
                together = False
        return groups

    def check(self, gm: fx.GraphModule, asks: list[fx.Node]) -> Check:
        """Asks these questions."""
        wanted, needed = list(asks), set[fx.Node]()
        while wanted:
            node = wanted.pop()
            if node in self.reads:
                needed.add(node)
            else:
                wanted += node.all_input_nodes
        reads = [node for node in self.reads if node in needed]
        answers, lines = zip(*[node.args[2:] for node in asks], strict=True)
        return Check(self.function(gm, asks, reads), answers, lines, reads)  # type: ignore[arg-type]

    def function(
        self, gm: fx.GraphModule, wanted: list[fx.Node], reads: list[fx.Node]
    ) -> Callable[..., tuple[Any, ...]]:
        """Takes the tensors that are read, and returns these numbers, or answers to these questions."""
        graph = fx.Graph()
        given = {node: graph.placeholder(node.name) for node in reads}
        copies: dict[fx.Node, fx.Node] = {}
        for node in gm.graph.nodes:
            if node in self.asks:
                value = given.get(node) or copies.get(node.args[0])
                if value is not None:
                    copies[node] = graph.call_function(QUESTIONS[str(node.args[1])], (value,))
            elif node in given:
                copies[node] = graph.call_method("item", (given[node],))
            elif (
                node in self.numbers
                and all(x in copies for x in node.all_input_nodes)
                and node not in self.reads
            ):
                copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output(tuple(copies[node] for node in wanted))
        graph.eliminate_dead_code()
        return fx.GraphModule(gm, graph).forward


def _goes_well(node: fx.Node) -> bool:
    """Whether an operation does nothing but compare, whatever its values are."""
    return node.target in (_COMPARISONS_OF_TENSORS if node.op == "call_method" else _COMPARE)


_COMPARISONS_OF_TENSORS = (
    *("gt", "lt", "ge", "le", "eq", "ne", "isnan", "isinf", "isfinite", "logical_not", "logical_or"),
    *("logical_and", "any", "all", "abs", "detach", "float", "bool"),
)
_COMPARE = {
    getattr(m, name) for name in _COMPARISONS_OF_TENSORS for m in (torch, operator) if hasattr(m, name)
}


def _computes(node: fx.Node) -> bool:
    """Whether a node gives the same whenever it is done on the host, and raises nothing: the step is made by then."""
    if node.op != "call_function" or node.kwargs.keys() - {"dtype"}:
        return False
    if node.target in _ALWAYS or bounds_bool(node):
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
    *(operator.iadd, operator.isub, operator.imul, torch.sym_float, torch.sym_ite, torch.sym_not),
    *(operator.eq, operator.ne, operator.lt, operator.le, operator.gt, operator.ge),
)
_DIVISIONS = (operator.truediv, operator.floordiv, operator.mod)


def _value(node: fx.Node) -> Any:
    return node.meta.get("example_value")
