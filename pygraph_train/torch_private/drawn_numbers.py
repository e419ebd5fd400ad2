"""Numbers that Python and NumPy draw, as Dynamo sees them while `host_draws` changes it. (2.11, 2.13)"""

from __future__ import annotations

import functools
import operator
import random
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, Protocol

import numpy as np
import torch

from pygraph_train.torch_private import host_numbers

__all__ = [
    "DRAWS",
    "NO_VALUE",
    "CallResult",
    "DrawRecorder",
    "DrawingHooks",
    "any_missing",
    "as_constant",
    "drawing_function_class",
    "drawn_class",
    "generator_of",
    "graph_of",
    "is_plain_list",
    "number_class",
    "place_in",
    "present",
    "refuse_draw",
    "refuse_torch",
    "torch_refusal",
    "value_of",
]


class CallResult(NamedTuple):
    """Stands for the result of a call that a recorder has noted."""

    place: int


class DrawRecorder(Protocol):
    """Who notes what one trace draws."""

    def begin(self, trace: Any) -> None:
        """Dynamo traces: anew, where `trace` is another object than before."""

    def make(
        self, fn: Callable[..., Any], args: Any, kwargs: Mapping[str, Any], generator: str | None = None
    ) -> CallResult:
        """Call a function with values and slots; `generator` is what it draws from, None if it computes."""

    def call(
        self, fn: Callable[..., Any], args: Any, kwargs: Mapping[str, Any], generator: str
    ) -> CallResult | None:
        """Call a function of the host with values and slots. None where it did something else than to draw."""

    def value(self, slot: CallResult) -> Any:
        """What a call has returned."""

    def ask(self, slot: CallResult, where: str | None) -> Any:
        """What a call has returned, on which the trace depends from now on."""

    def slot_of(self, node: torch.fx.Node) -> CallResult | None:
        """What a node of the graph computes, if it follows from random numbers of the host alone."""

    def read(self, node: torch.fx.Node, where: str | None, *, trained: bool = True) -> CallResult | None:
        """What a node of the graph computes, if it is read ahead of steps. `where` it is read in the step.

        It may follow from parameters if `trained`.
        """

    def may_ask(self, slot: CallResult) -> bool:
        """Whether the trace may depend on what is in a slot."""

    def is_constant(self, slot: CallResult) -> bool:
        """Whether a call returns the same in each step."""

    def leave(self, slot: CallResult) -> bool:
        """Whether something that was read ahead went into a result. It is left to the step from now on."""

    def was_read(self, slot: CallResult) -> bool:
        """Whether something that was read ahead went into a result."""

    @property
    def takes(self) -> bool:
        """Whether what is drawn may get into tensors of the graph."""

    @property
    def device(self) -> torch.device:
        """Of the step."""

    def take(self, slot: CallResult, device: torch.device | None) -> torch.Tensor:
        """A tensor that holds what is in a slot: a graph may read it, and it is filled before each run."""

    def make_number(self, slot: CallResult, dtype: torch.dtype, *, inverse: bool) -> CallResult:
        """A number, or its reciprocal, as a tensor of the host without dimensions."""

    def hold(self, node: torch.fx.Node, slot: CallResult, *, shared: bool) -> None:
        """Say where the graph goes on with such a tensor, and whether an array may have its memory."""


class DrawingHooks(Protocol):
    """What numbers ask."""

    recorder: DrawRecorder

    def exactly(self, tx: Any, number: Any) -> Any:
        """A whole number as a constant of the trace."""

    def draw(self, tx: Any, fn: Any, generator: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """A call that draws."""

    def compared(self, tx: Any, fn: Any, number: Any, other: Any) -> Any:
        """What a comparison of a number with something else gives."""


@functools.cache
def drawn_class() -> Any:
    """The class of Dynamo's variables for what was drawn, or computed from it: numbers, and lists and arrays."""
    from torch._dynamo.variables.base import VariableTracker

    class Drawn(VariableTracker):
        """Its value is in a slot of the recorder, and it cannot leave the trace."""

        def __init__(
            self, slot: CallResult, hooks: DrawingHooks, refuse: Callable[[], NoReturn], **kwargs: Any
        ) -> None:
            super().__init__(**kwargs)
            self.slot = slot
            self.hooks = hooks
            self.refuse = refuse

        def python_type(self) -> type:
            return type(self.hooks.recorder.value(self.slot))

        def reconstruct(self, codegen: Any) -> None:
            self.refuse()

        # As a key of a dict or in a set: Dynamo would take it for an object that equals nothing else.

        def is_hashable(self) -> bool:  # 2.13
            self.refuse()

        is_python_hashable = is_hashable  # 2.11

        def hash_impl(self, tx: Any) -> Any:  # 2.13
            self.refuse()

        def get_python_hash(self) -> int:  # 2.11
            self.refuse()

    return Drawn


@functools.cache
def number_class() -> type:
    class DrawnNumber(drawn_class()):  # type: ignore[misc]
        """A number of Python that was drawn, or computed from such numbers."""

        def as_proxy(self) -> Any:
            return self.hooks.exactly(present(), self).as_proxy()

        def call_method(self, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
            return self.hooks.exactly(tx, self).call_method(tx, name, args, kwargs)

        def var_getattr(self, tx: Any, name: str) -> Any:
            return self.hooks.exactly(tx, self).var_getattr(tx, name)

        def richcompare_impl(self, tx: Any, other: Any, op: str) -> Any:  # in a list or tuple (2.13)
            fn = getattr(operator, op.strip("_"))
            return self.hooks.compared(tx, fn, self, other)

    return DrawnNumber


@functools.cache
def drawing_function_class() -> type:
    from torch._dynamo.variables.base import VariableTracker

    class DrawingFunction(VariableTracker):
        """A method of the process's generator of Python or NumPy."""

        def __init__(self, value: Any, generator: str, hooks: DrawingHooks, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.value = value
            self.generator = generator
            self.hooks = hooks

        def python_type(self) -> type:
            return type(self.value)

        def call_function(self, tx: Any, args: Any, kwargs: Any) -> Any:
            return self.hooks.draw(tx, self.value, self.generator, args, kwargs)

    return DrawingFunction


DRAWS = {
    "python": frozenset(
        (
            *(
                "random",
                "uniform",
                "randint",
                "randrange",
                "getrandbits",
                "gauss",
                "normalvariate",
                "triangular",
            ),
            *(
                "betavariate",
                "expovariate",
                "gammavariate",
                "lognormvariate",
                "choices",
                "sample",
                "randbytes",
            ),
        )
    ),
    "numpy": frozenset(
        (
            *(
                "rand",
                "random",
                "random_sample",
                "ranf",
                "sample",
                "uniform",
                "randint",
                "randn",
                "normal",
                "beta",
            ),
            *(
                "binomial",
                "choice",
                "exponential",
                "gamma",
                "geometric",
                "permutation",
                "poisson",
                "standard_normal",
                "triangular",
            ),
        )
    ),
}
"""Functions that do nothing but draw. Others seed generators, or change what they are given."""


def generator_of(value: Any) -> str | None:
    """Which generator of the process a bound method belongs to."""
    owner = getattr(value, "__self__", None) if callable(value) else None
    if owner is None or isinstance(value, type):
        return None
    if owner is _OF_PYTHON:
        return "python"
    return "numpy" if owner is _OF_NUMPY else None


_OF_PYTHON = random.random.__self__  # type: ignore[attr-defined]
_OF_NUMPY = np.random.rand.__self__  # type: ignore[attr-defined]

NO_VALUE: Any = object()


def value_of(variable: Any) -> Any:
    """A constant's value, or the slot of a number; `NO_VALUE` for anything else."""
    if isinstance(variable, number_class()):
        return variable.slot  # type: ignore[attr-defined]
    try:
        return variable.as_python_constant() if variable.is_python_constant() else NO_VALUE
    except NotImplementedError:
        return NO_VALUE


def any_missing(values: Sequence[Any]) -> bool:
    return any(value is NO_VALUE for value in values)


def is_plain_list(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(
        type(x) in (int, bool, str) or is_plain_list(x) for x in value
    )


def as_constant(tx: Any, value: Any) -> Any:
    from torch._dynamo.variables.base import VariableTracker
    from torch._dynamo.variables.constant import ConstantVariable

    if isinstance(value, (list, tuple)):
        return VariableTracker.build(tx, value)
    return ConstantVariable.create(value)


def graph_of(tx: Any) -> Any:
    return tx.output.root_tracer.graph


def place_in(tx: Any) -> str | None:
    """`file:line` of the user's that is being traced."""
    from pygraph_train.torch_private.past_obstacles import user_place

    return user_place(tx)


def refuse_draw(generator: str, fn: Any) -> NoReturn:
    if generator == "numpy":
        host_numbers.end_graph(f"numpy.{fn.__name__} runs on the host")
    host_numbers.end_graph("Python's random module draws a number on the host")


def refuse_torch(where: str | None = None) -> NoReturn:
    """A number that is read there has a use that no replay has."""
    why = "torch draws a number on the host, which gets into tensors or out of the step"
    host_numbers.end_graph(why, where)


def torch_refusal(tx: Any) -> Callable[[], NoReturn]:
    """Ends the graph where a number that is read now has such a use later."""
    return functools.partial(refuse_torch, place_in(tx))


def present() -> Any:
    from torch._dynamo.symbolic_convert import InstructionTranslator

    return InstructionTranslator.current_tx()
