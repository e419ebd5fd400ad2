"""Makes functions of the library raise, each at one of its calls, wherever they are defined.

A function is named by its file, its qualified name and its first line. Its body gets one statement more, which counts
calls and raises at the one that was asked for: `__code__` is exchanged, so that decorators, bound methods and tables
that hold the function see it as well. A function inside of another one is exchanged in the code of the outer one.
"""

from __future__ import annotations

import ast
import gc
import importlib
import pkgutil
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pygraph_train
import pygraph_train.integrations
from pygraph_train import boundary

__all__ = ["Function", "Planted", "hit", "hits", "import_all", "library_calls", "plant"]

FOLDERS = tuple(
    str(Path(folder).resolve()) for folder in (*pygraph_train.__path__, *pygraph_train.integrations.__path__)
)


def import_all() -> None:
    """Import each module of the library: what is imported late is found as well."""
    for folder, name in zip(FOLDERS, ("pygraph_train", "pygraph_train.integrations"), strict=True):
        for module in pkgutil.walk_packages([folder], f"{name}."):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)


class Planted(RuntimeError):
    """A fault of the library, which the user's code has nothing to do with."""


class Function(NamedTuple):
    """A function of the library."""

    file: str
    name: str
    line: int

    def __str__(self) -> str:
        return f"{self.short}:{self.line} {self.name}"

    @property
    def short(self) -> str:
        """The file as one would look for it."""
        folder = next(folder for folder in FOLDERS if self.file.startswith(folder))
        return str(Path(self.file).relative_to(Path(folder).parent))


BOUNDARY = frozenset(
    guard.__code__
    for guard in (
        boundary.Boundary.make,
        boundary.arranged,
        boundary.quietly,
        boundary.surely,
        boundary.put_back,
    )
)
"""What catches an exception of the library."""


def library_calls(run: Callable[[], object]) -> dict[Function, tuple[int, set[int]]]:
    """How often each function of the library is called by `run`, by a profile, and which calls are outermost.

    Something has to be outermost, and nothing of the library can catch what is raised in its first line. A call is
    outermost where somebody else makes it, the user's code, a framework or autograd, and so is a call of such a one
    within which the boundary is opened. What an outermost call calls beside the boundary is not.
    """
    calls: dict[types.CodeType, int] = {}
    ours: dict[types.CodeType, bool] = {}
    numbers: dict[types.FrameType, int] = {}
    outermost: dict[types.CodeType, set[int]] = {}

    def note(frame: types.FrameType, event: str, arg: object) -> None:
        code = frame.f_code
        if event == "return":
            numbers.pop(frame, None)
        if event != "call":
            return
        if code not in ours:
            ours[code] = code.co_filename.startswith(FOLDERS) and not code.co_name.startswith("<")
        if not ours[code]:
            return
        calls[code] = numbers[frame] = calls.get(code, 0) + 1
        below = list(_below(frame))
        if any(one.f_code in BOUNDARY for one in below):
            return
        mine = [one for one in below if ours.get(one.f_code)]
        for one in mine if code in BOUNDARY else () if mine else [frame]:
            outermost.setdefault(one.f_code, set()).add(numbers[one])

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    found: dict[Function, tuple[int, set[int]]] = {}
    for code, count in calls.items():
        key = Function(code.co_filename, code.co_qualname, code.co_firstlineno)
        before, known = found.get(key, (0, set()))
        found[key] = before + count, known | outermost.get(code, set())
    return found


def _below(frame: types.FrameType) -> Iterator[types.FrameType]:
    caller = frame.f_back
    while caller is not None:
        yield caller
        caller = caller.f_back


class _Insert(ast.NodeTransformer):
    """Puts the call of the hook at the beginning of one function."""

    def __init__(self, function: Function, number: int) -> None:
        self.function = function
        self.number = number
        self.found = False

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
        if first == self.function.line and node.name == self.function.name.rpartition(".")[2]:
            self.found = True
            body = node.body
            at = 1 if isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant) else 0
            hook = ast.parse(
                f"if __import__('planting').hit({self.number}): raise __import__('planting').Planted('planted')"
            ).body[0]
            for child in ast.walk(hook):
                if hasattr(child, "lineno"):
                    child.lineno = child.end_lineno = body[min(at, len(body) - 1)].lineno
            body.insert(at, hook)
        self.generic_visit(node)
        return node


class _Fault:
    """One that was planted.

    Attributes:
        at: the call that raises.
        when_hit: called just before.
        count: of calls so far.
    """

    def __init__(self, at: int, when_hit: Callable[[], None]) -> None:
        self.at, self.when_hit, self.count = at, when_hit, 0


_faults: list[_Fault] = []


def hit(number: int) -> bool:
    """Asked by a function that was chosen: whether it raises now."""
    fault = _faults[number]
    fault.count += 1
    if fault.count == fault.at:
        fault.when_hit()
    return fault.count == fault.at


def hits() -> int:
    """How many of the faults were raised."""
    return sum(fault.count >= fault.at for fault in _faults)


def plant(function: Function, at: int, when_hit: Callable[[], None]) -> bool:
    """Let a function raise `Planted` at its call number `at`, in this process, for good.

    Returns:
        Whether it was found: one that was made by a decorator that compiles code, for instance, is not.
    """
    _faults.append(_Fault(at, when_hit))
    tree = ast.parse(Path(function.file).read_text())
    insert = _Insert(function, len(_faults) - 1)
    tree = ast.fix_missing_locations(insert.visit(tree))
    if not insert.found:
        return False
    new = _codes(compile(tree, function.file, "exec", dont_inherit=True))
    wanted = _key(function.name, function.line)
    outer = function.name.partition(".<locals>")[0]
    found = False
    for live in [x for x in gc.get_objects() if type(x) is types.FunctionType]:
        code = live.__code__
        if code.co_filename != function.file or code.co_qualname != outer:
            continue
        inside = _codes(code)
        if wanted in inside or _key(code.co_qualname, code.co_firstlineno) == wanted:
            live.__code__ = _exchanged(code, wanted, new[wanted])
            found = True
    return found


def _key(name: str, line: int) -> tuple[str, int]:
    return name, line


def _codes(code: types.CodeType) -> dict[tuple[str, int], types.CodeType]:
    """All code objects inside of one, by name and line."""
    found = {}
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            found[_key(const.co_qualname, const.co_firstlineno)] = const
            found.update(_codes(const))
    return found


def _exchanged(code: types.CodeType, wanted: tuple[str, int], new: types.CodeType) -> types.CodeType:
    if _key(code.co_qualname, code.co_firstlineno) == wanted:
        return new
    consts = tuple(_exchanged(c, wanted, new) if isinstance(c, types.CodeType) else c for c in code.co_consts)
    return code.replace(co_consts=consts)
