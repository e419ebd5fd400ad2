"""Texts of tensors in a trace of Dynamo, told with the line that makes them. (2.11, 2.13)

Dynamo of 2.11 does not know that a text with a tensor in it is a `str`, and it ends at the first place that asks. That
place is not the user's where the step returns the text. It also ends where a number that was read from a tensor goes
into a text, and says nothing of a text then. Dynamo of 2.13 goes on in both cases. Both lose the format of a number
that is an input of the graph (`f"{weight:.3f}"`).

For both, a text whose letters nobody knows yet differs from every other text. So the trace ends where anything follows
from the letters: a comparison, a key of a dict, the name of an attribute.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import torch

from pygraph_train.problems import is_user_file

__all__ = ["is_unknown", "mends", "refuse_questions"]

_NO_QUESTIONS = frozenset({isinstance, type, callable, id, print, str.format, operator.is_, operator.is_not})
"""Functions of a text that do not depend on its letters, or make another unknown text of them."""

_STORES = frozenset({setattr, operator.setitem})

_QUESTIONS = (
    *("is_hashable", "hash_impl", "richcompare_impl", "bool_impl"),  # 2.13
    *("is_python_hashable", "get_python_hash"),  # 2.11
    *("is_python_equal", "call_method", "var_getattr", "call_obj_hasattr"),
)
"""What Dynamo asks a variable for that depends on letters: as a key, in a list, by a method."""


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
    making = (StringFormatVariable, "create", _making(vars(StringFormatVariable)["create"]))
    if torch.__version__ >= "2.13":  # compares versions, not text
        return (formatting, making)
    return (
        making,
        (StringFormatVariable, "__init__", _placed(StringFormatVariable.__init__)),
        (StringFormatVariable, "__repr__", _with_place(StringFormatVariable.__repr__)),
        formatting,
    )


def is_unknown(variable: Any) -> bool:
    """Whether a variable of Dynamo's is a text whose letters the trace does not know."""
    return type(variable) is _text_class()  # `isinstance` would look at what Dynamo has not looked at yet


def refuse_questions(fn: Any, args: Sequence[Any]) -> None:
    """End the graph where a function of Python's depends on the letters of an unknown text."""
    if fn not in _NO_QUESTIONS:
        for text in filter(is_unknown, args[:2] if fn in _STORES else args):
            _refuse(text)


def _refuse(text: Any, *_: Any, **__: Any) -> NoReturn:
    from torch._dynamo.exc import unimplemented

    why = "the letters of a text that a tensor or a number of the step went into decide something"
    unimplemented(
        gb_type="text that is not known",
        context=repr(text),
        explanation=why,
        hints=["Decide by the number or by a tensor, and make the text afterwards"],
    )


@functools.cache
def _text_class() -> type:
    from torch._dynamo.variables import misc

    class StringFormatVariable(misc.StringFormatVariable):  # messages of Dynamo name the class
        """A text that nobody may ask for its letters."""

    for name in _QUESTIONS:
        setattr(StringFormatVariable, name, _refuse)
    return StringFormatVariable


def _making(create: Any) -> Any:
    """Texts of the class above."""

    def made(text: str, args: Any, kwargs: Any) -> Any:
        return create.__func__(_text_class(), text, args, kwargs)

    return staticmethod(made)


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


_CONVERSIONS = ("", "!s", "!r", "!a")


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
        text = "{" + _CONVERSIONS[flags & 3] + ":" + fmt_spec.as_python_constant() + "}"
        tx.pop()
        tx.push(StringFormatVariable.create(text, [number], {}))

    return formatted
