"""Variables of Dynamo's for numbers of the host that are no constants of its trace. (2.11, 2.13)"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, Protocol

import torch
from torch import Tensor

from pygraph_train.torch_private import host_numbers
from pygraph_train.torch_private.dynamic_shapes import depends_on_values

__all__ = [
    "NO_CONSTANT",
    "LiveRecorder",
    "constant_of",
    "is_known_later",
    "is_live",
    "is_symbol",
    "live_class",
    "looked_at",
    "name_of",
    "sources_of",
]


class LiveRecorder(Protocol):
    """Who keeps the numbers of one trace."""

    device: torch.device
    met_counter: bool

    def begin(self, trace: Any) -> None:
        """Dynamo traces: anew, where `trace` is another object than before."""

    def wanted(self, expression: str) -> bool:
        """Whether the number that is read from this expression changes."""

    def read(self, expression: str, value: float) -> Any:
        """A number that is read from outside."""

    def compute(self, fn: Callable[..., Any], args: Sequence[Any]) -> Any:
        """What a function of numbers returns, some of which are the recorder's own. None where it is computed when the
        graph has run, and might raise then."""

    def is_read(self, node: Any) -> bool:
        """Whether a node of the graph is a number that is read of a tensor, which may be read when the graph has
        run."""

    def of_tensor(self, node: Any, *, is_float: bool) -> tuple[str, Any]:
        """Such a number, and how it is called among the expressions."""

    def is_late(self, number: Any) -> bool:
        """Whether it is such a number, or computed of such."""

    def types_of(self, number: Any) -> Iterable[type]:
        """The types that such a number may have."""

    def text(self, text: str) -> Callable[..., str]:
        """`str.format` of a text, as a function that `compute` knows."""

    def value(self, number: Any) -> Any:
        """What it is in this trace."""

    def type_of(self, number: Any) -> type | None:
        """Its type, on which the trace depends from now on. None where nobody knows it yet."""

    def expressions(self, number: Any) -> Sequence[str]:
        """What it is computed from."""

    def function(self, number: Any) -> Callable[..., Any]:
        """Computes the number from the values of its expressions."""

    def ask(self, number: Any) -> bool:
        """The answer to a condition, on which the trace depends from now on."""

    def tensor(self, number: Any, dtype: torch.dtype, *, inverse: bool) -> Tensor:
        """The number, or its reciprocal, as a tensor that is filled before each run."""

    def refuse(self, number: Any) -> None:
        """Note that something is done with a number that no graph can hold."""


_LATE = "SymNodeVariable: a number that is read of a tensor is needed before the graph has run"


def is_live(variable: Any) -> bool:
    """Whether a variable of Dynamo's is such a number."""
    return bool(isinstance(variable, live_class()))


def is_known_later(variable: Any) -> bool:
    """Whether a variable of Dynamo's is a number that is read of a tensor, or computed of such."""
    from torch._dynamo.variables.lazy import LazyVariableTracker
    from torch._dynamo.variables.tensor import SymNodeVariable

    if isinstance(variable, LazyVariableTracker):
        return variable.is_realized() and is_known_later(variable.realize())
    if is_live(variable):
        return bool(variable.recorder.is_late(variable.number))
    return isinstance(variable, SymNodeVariable) and depends_on_values(variable.sym_num)


@functools.cache
def live_class() -> Any:
    from torch._dynamo.variables.base import VariableTracker

    class LiveNumber(VariableTracker):
        """A number of Python that another run of the graph may have another value of."""

        def __init__(self, number: Any, recorder: LiveRecorder, read: Any = None, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.number = number
            self.recorder = recorder
            self.read = read or {}  # what is read of tensors, by its names among the expressions

        def python_type(self) -> type:
            kind = self.recorder.type_of(self.number)
            return self.refuse() if kind is None else kind

        def refuse(self, *_: Any, **__: Any) -> NoReturn:
            self.recorder.refuse(self.number)
            if self.recorder.is_late(self.number):
                host_numbers.end_graph(_LATE)
            host_numbers.end_graph("a number that changes is used in a way that no graph can hold")

        as_proxy = call_method = var_getattr = refuse
        # as a key of a dict, in a set, or where a text decides
        is_hashable = is_python_hashable = hash_impl = get_python_hash = refuse
        is_python_equal = richcompare_impl = bool_impl = call_obj_hasattr = refuse

        def reconstruct(self, codegen: Any) -> None:
            from torch._dynamo.bytecode_transformation import create_call_function

            function = self.recorder.function(self.number)
            name = codegen.tx.output.install_global_by_id("computes_number", function)
            known = {**self.sources, **self.read}
            sources = [known[e] for e in self.recorder.expressions(self.number)]
            codegen.add_push_null(lambda: codegen.append_output(codegen.create_load_global(name, add=True)))
            for source in sources:
                codegen(source)
            codegen.extend_output(create_call_function(len(sources), False))

        @property
        def sources(self) -> dict[str, Any]:
            return sources_of(self.recorder)

    return LiveNumber


def sources_of(recorder: Any) -> dict[str, Any]:
    """Dynamo's sources of what is read, by their expressions."""
    found: dict[str, Any] = recorder.__dict__.setdefault("sources_of", {})
    return found


NO_CONSTANT: Any = object()


def is_symbol(variable: Any) -> bool:
    """Whether a variable of Dynamo's is a number that its graph has."""
    from torch._dynamo.variables.lazy import LazyVariableTracker
    from torch._dynamo.variables.tensor import SymNodeVariable

    if isinstance(variable, LazyVariableTracker):
        return variable.is_realized() and is_symbol(variable.realize())
    return isinstance(variable, SymNodeVariable)


def constant_of(variable: Any, *, texts: bool = False) -> Any:
    try:
        value = variable.as_python_constant() if variable.is_python_constant() else NO_CONSTANT
    except NotImplementedError:
        return NO_CONSTANT
    known = type(value) in (int, float, bool, type(None)) or (texts and type(value) is str)
    return value if known else NO_CONSTANT


def looked_at(variable: Any, recorder: LiveRecorder) -> Any:
    """What Dynamo has put off looking at, where that is a number: it may be one of these."""
    from torch._dynamo.variables.lazy import LazyVariableTracker

    if not isinstance(variable, LazyVariableTracker):
        return variable
    if variable.is_realized():
        return variable.realize()
    is_number = type(variable.peek_value()) in (int, float)
    return variable.realize() if is_number and recorder.wanted(name_of(variable.source)) else variable


def name_of(source: Any) -> str:
    name = source.name
    return str(name() if callable(name) else name)
