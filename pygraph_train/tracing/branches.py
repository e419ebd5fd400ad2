"""Which branches a traced function takes that asks whether something compiles it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pygraph_train.problems import Problem
from pygraph_train.torch_private.compiling import (
    dropout_as_it_is,
    file_of,
    nothing_captures,
    nothing_compiles,
)
from pygraph_train.tracing.reasons import RAISES

__all__ = ["Branches"]

_STORES = "class `ContextVar`"
"""In the reason of a break where something is stored, which computes nothing."""

_STORING = "transformers.utils.output_capturing", "CompileableContextVar"
"""A module that is known to ask for no other reason, where it has this class. A first trace would find that out."""


class Branches:
    """Those of plain training at first. What cannot be traced then takes those of compiled code.

    Args:
        plain: whether the function is to take the branches of plain training at all.

    Attributes:
        compiled: where the function asked, if it takes the branch of compiled code, which may compute something else.
    """

    def __init__(self, *, plain: bool) -> None:
        self.compiled: str | None = None
        self._makes_steps = False
        self._plain = plain
        self._asked: list[str] = []
        self._as_compiled = _files_that_store()  # their questions are answered as in compiled code
        self._refused: Problem | None = None  # in the way of plain training's branches

    @property
    def taken(self) -> bool:
        """Whether it takes any branch of compiled code in the place of plain training's."""
        return self.compiled is not None or any(file_of(place) in self._as_compiled for place in self._asked)

    def changes(self) -> list[tuple[Any, str, Any]]:
        """Changes of Dynamo while it traces."""
        plain = [nothing_compiles(self._asked, self._as_compiled), *nothing_captures()] if self._plain else []
        return [*plain, dropout_as_it_is()]

    def others(self, refused: Problem) -> bool:
        """After a trace that was given up: whether the function takes other branches the next time.

        Where the file in which it failed has asked, only that file gets another answer: transformers has a class that
        stores things in another way under Dynamo, and asks elsewhere which mask it is to make.
        """
        if not (self._plain and self._asked):
            return False
        file = file_of(refused.where)
        asked = [place for place in self._asked if file_of(place) == file]
        if asked and file not in self._as_compiled:
            self._as_compiled.add(file)
            computes = _STORES not in refused.reason
        else:
            self._plain, computes, asked = False, True, self._asked
        if computes:
            self.compiled, self._refused = asked[-1], self.in_the_way(refused)
        self._asked.clear()
        return True

    @contextmanager
    def in_steps(self) -> Iterator[None]:
        """Inside, calls of the trace make steps of the training that have no graph."""
        self._makes_steps = True
        try:
            yield
        finally:
            self._makes_steps = False

    def leave_step(self) -> bool:
        """Whether the function itself makes the step: what was traced may differ from plain training.

        Where a branch of compiled code only stores something in another way, both compute the same.
        """
        return self._makes_steps and self.taken

    def in_the_way(self, refused: Problem) -> Problem:
        """Why there is no trace: an exception on branches that plain training does not take is no reason."""
        return self._refused if self._refused is not None and RAISES in refused.reason else refused


def _files_that_store() -> set[str]:
    """Files whose questions decide where something is stored."""
    module = sys.modules.get(_STORING[0])
    file = getattr(module, "__file__", None)
    return {file} if file is not None and hasattr(module, _STORING[1]) else set()
