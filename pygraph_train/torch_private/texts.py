"""Texts of tensors in a trace of Dynamo, told with the line that makes them. (2.11, 2.13)

Dynamo of 2.11 does not know that a text with a tensor in it is a `str`, and it ends at the first place that asks. That
place is not the user's where the step returns the text. It also ends where a number that was read from a tensor goes
into a text, and says nothing of a text then. Dynamo of 2.13 goes on in both cases. Both lose the format of a number
that is an input of the graph (`f"{weight:.3f}"`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from pygraph_train.problems import is_user_file

__all__ = ["mends"]


@functools.cache
def mends() -> tuple[tuple[Any, str, Any], ...]:
    """(owner, attribute, value): changes of Dynamo while the library traces."""
    from torch._dynamo.symbolic_convert import InstructionTranslatorBase
    from torch._dynamo.variables.misc import StringFormatVariable

    formatting = (
        InstructionTranslatorBase,
        "_format_value",
        _formatting(InstructionTranslatorBase._format_value),
    )
    if torch.__version__ >= "2.13":  # compares versions, not text
        return (formatting,)
    return (
        (StringFormatVariable, "__init__", _placed(StringFormatVariable.__init__)),
        (StringFormatVariable, "__repr__", _with_place(StringFormatVariable.__repr__)),
        formatting,
    )


def _placed(made: Callable[..., None]) -> Callable[..., None]:
    """A text remembers the line of the user that makes it."""

    def make(text: Any, *args: Any, **kwargs: Any) -> None:
        made(text, *args, **kwargs)
        stack = torch._guards.TracingContext.extract_stack()
        text.made_at = next((frame for frame in reversed(stack) if is_user_file(frame.filename)), None)

    return make


def _with_place(as_text: Callable[[Any], str]) -> Callable[[Any], str]:
    """Messages of Dynamo name the text: they name the line too."""

    def named(text: Any) -> str:
        made_at = getattr(text, "made_at", None)
        place = "" if made_at is None else f'\n  File "{made_at.filename}", line {made_at.lineno}\n'
        return f"{as_text(text)}{place}"

    return named


def _formatting(format_value: Callable[..., None]) -> Callable[..., None]:
    """A number whose value nobody knows yet goes into a text that is not known either. For others a guard stands."""
    from torch._dynamo.variables.constant import ConstantVariable
    from torch._dynamo.variables.misc import StringFormatVariable
    from torch._dynamo.variables.tensor import SymNodeVariable
    from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

    def formatted(tx: Any, fmt_spec: Any, flags: int) -> None:
        number = tx.stack[-1].realize()
        if not isinstance(number, SymNodeVariable):
            return format_value(tx, fmt_spec, flags)
        if not free_unbacked_symbols(number.sym_num):
            tx.stack[-1] = ConstantVariable.create(number.evaluate_expr(tx.output))
            return format_value(tx, fmt_spec, flags)
        if torch.__version__ >= "2.13":
            return format_value(tx, fmt_spec, flags)
        text = "{:" + fmt_spec.as_python_constant() + "}"
        tx.push(StringFormatVariable.create(text, [tx.pop()], {}))

    return formatted
