"""Why something is not replayed, and which line of the user's code is meant."""

from __future__ import annotations

import linecache
import os
import re
import sys
import traceback
import types
from dataclasses import dataclass


class PyGraphError(RuntimeError):
    """A step cannot run from a graph and `on_failure="raise"` is set, or training cannot continue."""


ONLY_ON_CPU = "a GPU has other kernels"
"""Ends a reason that holds on the CPU alone."""


@dataclass(frozen=True)
class Problem:
    """Why a step cannot be replayed.

    Attributes:
        reason: one sentence that starts with the obstacle.
        where: `file:line` in the user's code, or None if there is no single line.
        fix: the remedy as a sentence, or "".
    """

    reason: str
    where: str | None = None
    fix: str = ""

    def __str__(self) -> str:
        text = f"{self.reason} ({self.where})" if self.where else self.reason
        return f"{text}. {self.fix}" if self.fix else text


class NotLegal(Exception):
    """Tracing found a problem before anything was executed."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        super().__init__(str(problem))


_packages = {"torch", "pygraph_train"}
"""Top-level packages whose frames are never the user's."""

_folders = [os.path.dirname(os.path.abspath(__file__)) + os.sep]
"""Folders of the library itself, wherever it is installed."""

_STDLIB = os.path.dirname(os.__file__) + os.sep
_FRAME = re.compile(r'^\s*File "(.+)", line (\d+)', re.MULTILINE)


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or the name of its class if the message is empty."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def not_the_users(*packages: str, folder: str | None = None) -> None:
    """Let frames of these top-level packages, and those in this folder, never count as the user's."""
    _packages.update(packages)
    if folder is not None:
        _folders.append(os.path.abspath(folder) + os.sep)


def defined_at(function: object) -> str | None:
    """`file:line` of a function or method, None if it is not written in Python."""
    code = getattr(function, "__code__", None)
    return None if code is None else f"{code.co_filename}:{code.co_firstlineno}"


def user_location(tb: types.TracebackType | None = None) -> str | None:
    """`file:line` of the innermost frame of user code in a traceback, or in the present stack; None without one."""
    stack = traceback.walk_stack(sys._getframe(1)) if tb is None else reversed(list(traceback.walk_tb(tb)))
    for frame, line in stack:
        if (traced := _traced_from(frame, line)) is not None or _is_user_code(frame):
            return traced or f"{frame.f_code.co_filename}:{line}"
    return None


def _traced_from(frame: types.FrameType, line: int) -> str | None:
    """`file:line` of the user's code that a line of a trace stands for, None in other code."""
    graph = getattr(frame.f_locals.get("self"), "graph", None)
    if graph is None or not (path := frame.f_code.co_filename).startswith("<eval_with_key>"):
        return None
    name = linecache.getline(path, line, frame.f_globals).partition(" = ")[0].strip()
    return user_line_in(next((n.meta.get("stack_trace") for n in graph.nodes if n.name == name), None))


def _is_user_code(frame: types.FrameType) -> bool:
    package = str(frame.f_globals.get("__name__", "")).partition(".")[0]
    return package not in _packages and is_user_file(frame.f_code.co_filename)


def is_library_file(path: str) -> bool:
    """Whether a source file belongs to the library itself."""
    return path.startswith(tuple(_folders))


def is_user_file(path: str) -> bool:
    """Whether a source file is neither the library's nor of the packages that are never the user's."""
    if path.startswith("<") and not path.startswith("<ipython"):  # generated code, frozen modules
        return False
    _, found, tail = path.rpartition("-packages" + os.sep)
    if found:
        return tail.partition(os.sep)[0] not in _packages
    return not path.startswith((_STDLIB, *_folders))


def user_line_in(stack_trace: str | None) -> str | None:
    """`file:line` of the innermost frame of user code in a formatted stack, as FX nodes carry it."""
    return next(
        (f"{path}:{line}" for path, line in reversed(frames_in(stack_trace)) if is_user_file(path)), None
    )


def frames_in(stack_trace: str | None) -> list[tuple[str, int]]:
    """File and line of each frame of a formatted stack, the innermost last."""
    return [(path, int(line)) for path, line in _FRAME.findall(stack_trace or "")]
