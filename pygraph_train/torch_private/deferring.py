"""How Dynamo traces lists that the frame only appends to, and what the library's own functions do in a frame."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from typing import Any, NoReturn

from pygraph_train.torch_private.changes import Around, no_comparisons
from pygraph_train.torch_private.dynamic_shapes import is_settled
from pygraph_train.torch_private.live_variables import is_known_later, is_live

__all__ = ["appends_in_frame", "deferring"]


def appends_in_frame() -> bool:
    """Whether the frame being compiled appends to lists that `deferring` has taken; call inside a backend."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    return bool(getattr(InstructionTranslator.current_tx().output, _APPENDED, None))


_APPENDED = "_pygraph_train_appended"


def deferring(
    appended: Callable[[Any], bool],
    collect: Callable[..., Any],
    settle: Callable[..., Any],
    later: Callable[..., Any],
) -> tuple[tuple[Any, str, Any], ...]:
    """Changes of Dynamo: some lists are not looked at, and what the frame appends to them is a result. (2.11, 2.13)

    Args:
        appended: whether a list is one of these. The frame may do nothing to it but append.
        collect: a function without arguments that the frame calls at its end: it returns (list, item) pairs then.
        settle: a function that the frame calls with a number, of which a guard shall keep the value.
        later: a function that the frame calls with anything: whether it is a number that is read of a tensor.
    """
    from torch._dynamo.variables.builder import VariableBuilder

    listed, collector, settler, teller = _variables()

    def around(stock: Callable[..., Any]) -> Callable[..., Any]:
        def wrap(self: Any, value: Any) -> Any:
            if value is collect:
                return collector(source=self.source)
            if value is settle:
                return settler(source=self.source)
            if value is later:
                return teller(source=self.source)
            if type(value) in (list, deque) and appended(value):
                return listed(value, source=self.source, guard=self)
            return stock(self, value)

        return wrap

    return (VariableBuilder, "_wrap", Around(around)), no_comparisons(listed)


@functools.cache
def _variables() -> tuple[Any, Any, Any, Any]:
    from torch._dynamo.exc import unimplemented
    from torch._dynamo.guards import GuardBuilder
    from torch._dynamo.variables.base import VariableTracker
    from torch._dynamo.variables.constant import ConstantVariable
    from torch._dynamo.variables.lists import TupleVariable
    from torch._dynamo.variables.misc import GetAttrVariable
    from torch._dynamo.variables.tensor import SymNodeVariable

    def kept(tx: Any) -> list[Any]:
        """What was appended in the trace that is under way."""
        found: list[Any] = tx.output.__dict__.setdefault(_APPENDED, [])
        return found

    class Appended(VariableTracker):
        """A list that the frame only appends to."""

        def __init__(self, value: Any, guard: Any = None, **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.value = value
            if guard is not None:
                guard.install_guards(GuardBuilder.TYPE_MATCH)

        def python_type(self) -> type:
            # whoever asks for the type goes on to ask for a length or a truth value, and no guard stands for these
            self.refuse()

        def refuse(self) -> NoReturn:
            unimplemented(
                gb_type="List that is only appended to",
                context="",
                explanation="The step looks at a list that grows.",
                hints=[],
            )

        def var_getattr(self, tx: Any, name: str) -> Any:
            return GetAttrVariable(self, name)

        def call_method(self, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
            at_top = tx.output.current_tracer is tx.output.root_tracer
            if name != "append" or len(args) != 1 or kwargs or not at_top:
                self.refuse()  # Dynamo of 2.11 takes lists for different that it does not look at
            kept(tx).append(TupleVariable([self, args[0]]))
            return ConstantVariable.create(None)

    class Collector(VariableTracker):
        """A function that returns what was appended."""

        def call_function(self, tx: Any, args: Any, kwargs: Any) -> Any:
            return TupleVariable(list(kept(tx)))

    class Settler(VariableTracker):
        """A function that sets a guard for a number."""

        def call_function(self, tx: Any, args: Any, kwargs: Any) -> Any:
            number = args[0].realize()
            if is_live(number):
                number.refuse()
            if isinstance(number, SymNodeVariable) and not is_settled(number.sym_num):
                number.evaluate_expr(tx.output)
            return ConstantVariable.create(None)

    class Teller(VariableTracker):
        """A function that tells numbers that are computed when the graph has run."""

        def call_function(self, tx: Any, args: Any, kwargs: Any) -> Any:
            return ConstantVariable.create(is_live(args[0]) and is_known_later(args[0]))

    return Appended, Collector, Settler, Teller
