"""Calls that Dynamo traces in another form than Python runs them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

from pygraph_train.torch_private.traces_of_threads import around_traces

__all__ = ["replaced_in_traces"]


def replaced_in_traces(
    functions: Mapping[Callable[..., Any], Any], backward: Any
) -> AbstractContextManager[None]:
    """Let Dynamo trace a call of each function as a call of another one, which gets the same arguments.

    Python runs the functions as they are. (2.11, 2.13)

    Args:
        functions: the other one for each function or method.
        backward: the other one for `Tensor.backward`. Its first argument is the tensor.
    """
    return around_traces(lambda: _replaced(functions, backward))


@contextmanager
def _replaced(functions: Mapping[Callable[..., Any], Any], backward: Any) -> Iterator[None]:
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase
    from torch._dynamo.variables import TensorVariable, UserFunctionVariable

    inline = InstructionTranslatorBase.inline_user_function_return

    def inlined(self: Any, fn: Any, *arguments: Any, **options: Any) -> Any:
        called = getattr(fn, "fn", None)
        try:
            other = functions.get(called)  # type: ignore[arg-type]
        except TypeError:  # it has no hash
            other = None
        return inline(self, fn if other is None else UserFunctionVariable(other), *arguments, **options)

    def method_backward(self: Any, tx: Any, *args: Any, **kwargs: Any) -> Any:
        return UserFunctionVariable(backward).call_function(tx, [self, *args], kwargs)

    with (
        patch.object(InstructionTranslatorBase, "inline_user_function_return", inlined),
        patch.object(TensorVariable, "method_backward", method_backward),
    ):
        yield
