"""What stands for a number that a step reads of its tensors, until the graph has run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from pygraph_train.problems import NotLegal, Problem

__all__ = ["LateFloat", "LateInt", "LateTensor", "LateText", "Mark", "once_read"]


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
