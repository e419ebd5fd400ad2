"""What code under Dynamo is told when it asks whether something compiles it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from pygraph_train.torch_private.changes import Around
from pygraph_train.torch_private.traces_of_threads import no_other_trace

__all__ = [
    "as_in_plain_python",
    "called_plainly",
    "dropout_as_it_is",
    "file_of",
    "nothing_captures",
    "nothing_compiles",
]


def as_in_plain_python() -> list[tuple[Any, str, Any]]:
    """Changes of Dynamo: what it traces takes the branches of plain Python. (2.11, 2.13)"""
    return [nothing_compiles([]), *nothing_captures(), dropout_as_it_is()]


@contextmanager
def called_plainly() -> Iterator[None]:
    """Inside, also while Dynamo traces, a function that runs is told by torch that nothing compiles it. (2.11, 2.13)"""
    if not torch.compiler._is_compiling_flag:
        yield
        return
    with no_other_trace():  # torch has one answer for all threads
        before = torch.compiler._is_compiling_flag
        torch.compiler._is_compiling_flag = False
        try:
            yield
        finally:
            torch.compiler._is_compiling_flag = before


def nothing_compiles(asked: list[str], but: Collection[str] = ()) -> tuple[Any, str, Any]:
    """A change of Dynamo: `torch.compiler.is_compiling()` and its kin are false in what it traces. (2.11, 2.13)

    Dynamo of 2.11 says that everything is exported, too.

    Args:
        asked: gets the place of each question, as `file:line`.
        but: files whose questions are answered as Dynamo does it.
    Returns:
        Owner, attribute and value.
    """
    from torch._dynamo.variables import torch as functions

    told = functions.tracing_state_functions
    questions = [
        torch.compiler.is_compiling,
        torch.compiler.is_dynamo_compiling,
        torch.compiler.is_exporting,
        torch._utils.is_compiling,
        torch._dynamo.external_utils.is_compiling,
    ]

    class Answers(dict[Any, Any]):
        def __getitem__(self, question: Any) -> Any:
            if question not in questions:
                return super().__getitem__(question)
            asked.append(_place())
            return super().__getitem__(question) if file_of(asked[-1]) in but else False

    return functions, "tracing_state_functions", lambda: Answers(told())


def nothing_captures() -> tuple[tuple[Any, str, Any], ...]:
    """Changes of Dynamo: `torch.cuda.is_current_stream_capturing()` and its kin are false in what it traces.

    Dynamo has no answer: it puts the question into its graph, or ends the graph there. (2.11, 2.13)

    Returns:
        Owner, attribute and value of each.
    """
    from torch._dynamo.variables.functions import SkipFunctionVariable
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

    kinds = (TorchInGraphFunctionVariable, SkipFunctionVariable)
    return tuple((kind, "call_function", Around(_answering)) for kind in kinds)


def _answering(call_function: Callable[..., Any]) -> Callable[..., Any]:
    from torch._dynamo.variables.constant import ConstantVariable

    questions = [getattr(backend, "is_current_stream_capturing", None) for backend in (torch.cuda, torch.xpu)]

    def called(variable: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        if any(variable.value is question for question in questions):
            return ConstantVariable.create(False)
        return call_function(variable, tx, args, kwargs)

    return called


def dropout_as_it_is() -> tuple[Any, str, Any]:
    """A change of Dynamo: dropout that drops nothing returns the tensor that it gets, as it does in plain Python.

    Dynamo takes what it returns for another tensor: `dropout(x, p, training=False) is x` is false for it. (2.11, 2.13)
    """
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

    return TorchInGraphFunctionVariable, "call_function", Around(_dropping)


def _dropping(call_function: Callable[..., Any]) -> Callable[..., Any]:
    from torch._dynamo.variables.constant import ConstantVariable
    from torch._dynamo.variables.tensor import TensorVariable

    def called(variable: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        defaults = variable.value is torch.nn.functional.dropout
        if defaults or variable.value is torch.dropout:
            flag = "training" if defaults else "train"
            given = {**dict(zip(("input", "p", flag), args, strict=False)), **kwargs}
            if not defaults and len(given) < 3:
                return call_function(variable, tx, args, kwargs)  # which raises
            named = {name: given[name].realize() if name in given else None for name in ("p", flag)}
            known = {name: v.value for name, v in named.items() if type(v) is ConstantVariable}
            p, training = known.get("p", 0.5 if named["p"] is None else None), known.get(flag)
            tensor = given["input"].realize() if "input" in given else None
            drops = p is None or not 0 <= p <= 1 or (training is not False and p != 0)
            if not drops and type(tensor) is TensorVariable:
                return tensor
        return call_function(variable, tx, args, kwargs)

    return called


def file_of(place: str | None) -> str:
    """The file of a place that is written as `file:line`."""
    return str(place or "").rpartition(":")[0]


def _place() -> str:
    """Where the traced code is, outside of functions whose name is a question themselves."""
    frames = list(torch._guards.TracingContext.extract_stack())
    named = [f for f in frames if not f.name.startswith("is_")] or frames
    return f"{named[-1].filename}:{named[-1].lineno}" if named else ""
