"""Guards of Dynamo: what each one looks at, and where it is from."""

from __future__ import annotations

import functools
import inspect
import re
import types
from collections.abc import Hashable
from contextlib import suppress
from typing import Any, NamedTuple

import torch

from pygraph_train.problems import is_user_file

__all__ = [
    "asked_expression",
    "asked_name",
    "gradients_asked_for",
    "guard_failures",
    "guarded_class",
    "guarded_expression",
    "line_of_guard",
    "parameters_go_unguarded",
    "question_of",
    "traces_compiled_parts",
    "with_place",
]


def guarded_expression(guard: Any) -> str:
    """Python expression over `L` and `G` of what a `GuardFilterEntry` guards (torch 2.11, 2.13)."""
    name = guard.orig_guard.originating_source.name
    return name() if callable(name) else name


def guarded_class(guard: Any) -> type | None:
    """The class of the object that a `GuardFilterEntry` looks at, None where that is not known (torch 2.11, 2.13).

    A HASATTR guard looks at the object that is asked for an attribute.
    """
    known = guard.orig_guard.guarded_class_weakref
    return None if known is None else known()


def asked_expression(guard: Any) -> str:
    """Python expression over `L` and `G` of the object that a HASATTR guard asks (torch 2.11, 2.13)."""
    source = guard.orig_guard.originating_source
    if not isinstance(guard.orig_guard.create_fn, functools.partial):  # 2.11: the source is the attribute
        source = source.base
    return source.name() if callable(source.name) else source.name


def asked_name(guard: Any) -> str:
    """The name of the attribute that a HASATTR guard asks for, "" where that is not known (torch 2.11, 2.13)."""
    make = guard.orig_guard.create_fn
    if isinstance(make, functools.partial):
        return str(make.keywords["attr"])
    return str(getattr(guard.orig_guard.originating_source, "member", ""))


def guard_failures(guards: Any, frame_locals: dict[str, Any]) -> list[tuple[str, str | None]]:
    """The guards of a cache entry's manager that do not hold (torch 2.11, 2.13).

    Each comes with the `file:line` that `with_place` wrote down for it, if it did. Dynamo checks all guards on sizes at
    once, and names all of them where one does not hold: those that hold are left out.
    """
    parts = list(map(str, guards.check_verbose(frame_locals).verbose_code_parts or ()))
    if len(parts) > 1:
        parts = [part for part in parts if not _is_true(part, frame_locals)] or parts
    found = [(part.partition("  # ")[0].strip(), _PLACE.search(part)) for part in parts]
    return [(guard, place and f"{place[1]}:{place[2]}") for guard, place in found]


def _is_true(guard: str, frame_locals: dict[str, Any]) -> bool:
    """Whether a guard on sizes holds; False for what is no expression over the arguments."""
    try:
        return eval(guard, {"L": frame_locals}) is True
    except Exception:
        return False


_PLACE = re.compile(r'  # File "(.+)", line (\d+)')


def with_place(code: str, guard: Any) -> str:
    """The code of a guard with the innermost line of the user's that it is from. (2.11, 2.13)

    Dynamo's own text has the innermost line of all, which may be torch's, and leaves out the folders that its file
    shares with torch.
    """
    frame = _innermost_frame(guard)
    return code if frame is None else f'{code}  # File "{frame.filename}", line {frame.lineno}'


def line_of_guard(guard: Any) -> str | None:
    """`file:line` of the user's code that a `GuardFilterEntry` is from; None where unknown. (2.11, 2.13)"""
    frame = _innermost_frame(guard.orig_guard)
    return None if frame is None else f"{frame.filename}:{frame.lineno}"


class Question(NamedTuple):
    """What a guard asks.

    Attributes:
        expression: over `L` and `G`, of what is looked at.
        kind: of guard.
        details: what else it was made with, such as the key that a dict has to contain.
    """

    expression: str
    kind: str
    details: Hashable


def question_of(guard: Any) -> Question | None:
    """What a `GuardFilterEntry` asks; None where its details cannot be compared (torch 2.11, 2.13)."""
    make: Any = guard.orig_guard.create_fn
    details: tuple[Any, ...] = ()
    if isinstance(make, functools.partial):
        make, details = make.func, (make.args, *sorted(make.keywords.items()))
    try:
        hash(details)
    except TypeError:
        return None
    return Question(guarded_expression(guard), guard.guard_type, (make, details))


def gradients_asked_for() -> list[tuple[str, str | None]]:
    """Gradients of which the frame being compiled asks whether they exist; call inside a backend. (2.11, 2.13)

    Returns:
        The first one of each line: expression over `L` and `G`, and `file:line` of the user's code where it is known.
    """
    found: dict[str | None, str] = {}
    for guard in torch._guards.TracingContext.get().guards_context.dynamo_guards:
        name = guard.name() if callable(guard.name) else guard.name
        if name.endswith(".grad") and not _is_function(name):
            frame = _innermost_frame(guard)
            found.setdefault(None if frame is None else f"{frame.filename}:{frame.lineno}", name)
    return [(name, place) for place, name in found.items()]


def traces_compiled_parts() -> bool:
    """Inside of a backend: whether Dynamo went into what `torch.compile` has made, as if it were not. (2.11, 2.13)"""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    output, guards = (
        InstructionTranslator.current_tx().output,
        torch._guards.TracingContext.get().guards_context,
    )
    scope = {"L": output.local_scope, "G": output.global_scope}
    for name in {guard.name() if callable(guard.name) else guard.name for guard in guards.dynamo_guards}:
        if "._orig_mod" in name:
            return True
        with suppress(Exception):  # an expression that only Dynamo's own code understands
            if name.startswith(("L[", "G[")) and _is_compiled(eval(name, dict(scope))):
                return True
    return False


def _is_compiled(value: Any) -> bool:
    if isinstance(value, torch.nn.Module):
        call = value._compiled_call_impl
        return isinstance(call, types.FunctionType) or _is_compiled(
            inspect.getattr_static(value, "forward", None)
        )
    return isinstance(value, types.FunctionType) and hasattr(value, "_torchdynamo_inline")


def _is_function(name: str) -> bool:
    """Whether the frame being compiled finds `torch.autograd.grad` there, and no gradient. (2.11, 2.13)"""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    if not name.startswith("G["):
        return False
    try:
        found = eval(name, {"G": InstructionTranslator.current_tx().output.global_scope})
    except Exception:  # an expression of Dynamo's own
        return False
    return found is torch.autograd.grad


def _innermost_frame(guard: Any) -> Any:
    stack = getattr(guard, "user_stack", None) or ()
    return next((f for f in reversed(stack) if is_user_file(f.filename)), None)


def parameters_go_unguarded() -> bool:
    """Whether what Dynamo compiles now misses a parameter that gets another shape or other strides.

    torch 2.11 skips guards of parameters while the dict of a module that holds them is as it was.
    """
    import torch._dynamo.config as config

    # compares versions, not text
    return torch.__version__ < "2.13" and config.skip_tensor_guards_with_matching_dict_tags
