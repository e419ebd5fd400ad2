"""Which of Dynamo's guards stay, and what is looked at in the place of the others."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

from torch import nn

from pygraph_train.torch_private.guards import asked_expression, guarded_expression, question_of
from pygraph_train.tracing.reading import owner_of
from pygraph_train.tracing.stillness import Settings, lack, pinned
from pygraph_train.tracing.traced_code import is_of_this_file
from pygraph_train.tracing.watch import is_asked, is_watched

__all__ = ["KeptGuards"]


class KeptGuards:
    """What the guards of one trace are about that are left to `ModuleWatch` and `Stillness`.

    Attributes:
        modules: expressions of modules that the step calls.
        asked: expressions of objects that the step asks for attributes.
        settings: constants of modules that the step depends on.
    """

    def __init__(self) -> None:
        self.modules: dict[str, None] = {}
        self.asked: dict[str, None] = {}
        self.settings: Settings = {}

    def keep(self, guards: Sequence[Any], *, settings: bool) -> list[bool]:
        """Whether each guard (a `GuardFilterEntry`) stays Dynamo's: the others are seen more cheaply.

        Args:
            settings: whether guards of constants may go.
        """
        self.settings |= pinned(guards) if settings else {}
        kept, classes, known = [], _classes_by_expression(guards), set[Hashable]()
        for guard in guards:
            expression = guarded_expression(guard)
            watched = is_watched(guard) or is_of_this_file(guard)
            if watched and guard.has_value and isinstance(guard.value, nn.Module):
                self.modules[expression] = None
            asked = is_asked(guard) and owner_of(asked_expression(guard))[1] != ""
            if asked:
                self.asked[asked_expression(guard)] = None
            lacks = guard.guard_type == "HASATTR" and lack(guard) in self.settings
            stays = not (watched or asked or lacks or expression in self.settings)
            if stays and (question := _question_of_class(guard, classes)) is not None:
                stays = question not in known  # another module of that class has the same guard
                known.add(question)
            kept.append(stays)
        return kept


def _classes_by_expression(guards: Sequence[Any]) -> dict[str, type]:
    """The classes of modules that are watched: each stays what it is as long as the trace holds."""
    return {
        f"type({guarded_expression(guard)})": type(guard.value)
        for guard in guards
        if guard.has_value and isinstance(guard.value, nn.Module) and is_watched(guard)
    }


def _question_of_class(guard: Any, classes: Mapping[str, type]) -> Hashable | None:
    """What a guard asks of a module's class, in words that are the same for all modules of that class.

    None for guards of anything else. A model has many modules of one class, and Dynamo asks the class once for each.
    """
    asked = question_of(guard)
    if asked is None:
        return None
    before, of_class, after = _parted(asked.expression)
    kind = classes.get(of_class)
    return None if kind is None else (before, kind, after, asked.kind, asked.details)


def _parted(expression: str) -> tuple[str, str, str]:
    """What stands before the first `type(...)`, that, and what stands behind it."""
    begin = expression.find("type(")
    depth = 0
    for end in range(begin, len(expression)) if begin >= 0 else ():
        depth += {"(": 1, ")": -1}.get(expression[end], 0)
        if depth == 0 and expression[end] == ")":
            return expression[:begin], expression[begin : end + 1], expression[end + 1 :]
    return expression, "", ""
