"""What a module's own Python may do to objects outside of tensors: a run more than in plain training would show.

Runs that do not count (they show what gradients are like, or verify a replay) run an island's Python once more. What
it writes to buffers and parameters that are trained is put back after them. Nothing else is.
"""

from __future__ import annotations

import builtins
import dis
import inspect
import io
import logging
import types
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor, nn

from pygraph_train.problems import Problem, is_user_file
from pygraph_train.torch_private.module_state import ObjectsAround

__all__ = ["Effects"]

_MOST_FUNCTIONS = 200
_CONTAINERS = (list, dict, set, deque, bytearray)
_TELLS = (print, open, input, warnings.warn, setattr, delattr, next, exec, eval)
_LOGS = frozenset(("debug", "info", "warning", "error", "exception", "critical", "log"))
_READS = frozenset(
    ("get", "keys", "values", "items", "index", "count", "copy", "union", "difference", "issubset")
)
"""Methods of lists, dicts and sets that change nothing."""
_ASK = frozenset(
    ("len", "enumerate", "sorted", "reversed", "tuple", "list", "set", "dict", "min", "max", "sum")
)
_STEPS = ("LOAD_ATTR", "LOAD_METHOD")
_READING = ("GET_ITER", "CONTAINS_OP", "UNPACK_SEQUENCE", "IS_OP", "COMPARE_OP", "UNARY_NOT", "TO_BOOL")
_WRITES = (["STORE_ATTR"], ["DELETE_ATTR"], ["COPY", "LOAD_ATTR"])
"""Behind an object: `x.a = 1`, `del x.a`, and `x.a += 1`, which copies a reference to the object first."""
_NAMES = ("STORE_GLOBAL", "DELETE_GLOBAL", "STORE_DEREF", "DELETE_DEREF")
_FIX = "Let the module return what it notes, or write it to a buffer, and note it behind the step"
_NOTHING = object()


class Effects:
    """What the Python of a module may do, by its code: its forwards, and functions that these call.

    Attributes:
        problem: the first effect that happens once more in a run that does not count, or None.
        around: objects that its Python names, besides the module: globals, variables of functions around, defaults.
    """

    def __init__(self, module: nn.Module) -> None:
        self.problem: Problem | None = None
        self._named: dict[int, Any] = {}
        self._known: set[Any] = set()
        self._name = type(module).__name__
        for each in module.modules():
            for function in _forwards(each):
                self._follow(function, each)

    @property
    def around(self) -> list[Any]:
        return list(self._named.values())

    def objects(self, module: nn.Module) -> ObjectsAround:
        """Those that the module's Python may change, as they are now."""
        kept = [*module.buffers(), *(p for p in module.parameters() if p.requires_grad)]
        classes = [c for m in module.modules() for c in type(m).__mro__ if _is_users(c)]
        return ObjectsAround([module, *classes, *self.around], kept)

    def _follow(self, value: Any, owner: Any = None) -> None:
        """A function that the module's Python calls, or an object with such functions."""
        value = inspect.unwrap(value) if callable(value) else value
        if isinstance(value, types.MethodType):
            value, owner = value.__func__, value.__self__
        if isinstance(value, property):
            value = value.fget
        if isinstance(value, (staticmethod, classmethod)):
            value = value.__func__
        code = getattr(value, "__code__", None)
        if not isinstance(value, types.FunctionType) or code is None or not is_user_file(code.co_filename):
            return
        if (code, id(owner)) in self._known or len(self._known) >= _MOST_FUNCTIONS:
            return
        self._known.add((code, id(owner)))
        for default in (*(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()):
            self._named[id(default)] = default
        cells = zip(code.co_freevars, value.__closure__ or (), strict=True)
        outside = {name: _content(cell) for name, cell in cells}
        own = {code.co_varnames[0]: owner} if owner is not None and code.co_argcount else {}
        self._read(code, value.__globals__, outside, own)

    def _read(
        self, code: types.CodeType, names: dict[str, Any], outside: dict[str, Any], own: dict[str, Any]
    ) -> None:
        steps = [x for x in dis.get_instructions(code) if x.opname not in ("CACHE", "PRECALL", "PUSH_NULL")]
        line = code.co_firstlineno
        for i, step in enumerate(steps):
            if step.positions is not None and step.positions.lineno is not None:
                line = step.positions.lineno
            where = f"{code.co_filename}:{line}"
            if step.opname in _NAMES:
                if step.opname.endswith("GLOBAL") or step.argval in outside:
                    self._tell(f"it writes the variable {step.argval}, which is not its own", where)
                continue
            value, is_own = _NOTHING, False
            if step.opname == "LOAD_GLOBAL":
                value = names.get(step.argval, getattr(builtins, str(step.argval), _NOTHING))
            elif step.opname in ("LOAD_DEREF", "LOAD_CLASSDEREF"):
                value = outside.get(step.argval, _NOTHING)
            elif step.opname.startswith("LOAD_FAST"):
                value = own.get(step.argval, _NOTHING)
                is_own = True
            if value is not _NOTHING:
                before = steps[i - 1] if i else None
                self._use(step.argval, value, before, steps[i + 1 : i + 12], where, is_own=is_own)
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self._read(
                    constant, names, outside, {k: v for k, v in own.items() if k in constant.co_freevars}
                )

    def _use(
        self, name: str, value: Any, before: Any, behind: list[Any], where: str, *, is_own: bool
    ) -> None:
        """An object is loaded, and attributes of it are read one after the other."""
        if not is_own:
            self._named[id(value)] = value
        owner: Any = None
        while behind and behind[0].opname in _STEPS:
            owner, holder, name = value, owner, str(behind[0].argval)
            behind = behind[1:]
            if isinstance(owner, logging.Logger) and name in _LOGS:
                return self._tell("it writes to a log", where)
            watched = is_own and isinstance(holder, nn.Module)  # see `ModuleState`
            if isinstance(owner, _CONTAINERS) and name not in _READS and not watched:
                return self._tell(f"it calls {name}() of an object that is not its own", where)
            if owner is warnings and name in ("warn", "warn_explicit"):
                return self._tell("it warns", where)
            if isinstance(owner, io.IOBase):
                return self._tell("it writes to a file", where)
            if isinstance(owner, Tensor):
                if not is_own and name.endswith("_") and not name.endswith("__"):
                    self._tell("it writes to a tensor that is not its own", where)
                return None
            value = _attribute(owner, name)
            if value is _NOTHING:
                return None
            self._follow(value, owner if not isinstance(owner, (types.ModuleType, type)) else None)
        self._follow(value)
        following = [step.opname for step in behind[:2]]
        if any(value is builtin for builtin in _TELLS):
            return self._tell(f"it calls {name}()", where)
        if isinstance(value, (types.ModuleType, nn.Module)):
            return None
        if following in _WRITES or following[:1] in _WRITES:
            return self._tell(f"it writes to {name}, which is not its own", where)
        if not is_own and isinstance(value, _CONTAINERS) and not _only_reads(behind, before):
            return self._tell(f"it may write to {name}, which is not its own", where)
        return None

    def _tell(self, what: str, where: str) -> None:
        if self.problem is None:
            self.problem = Problem(
                f"{what}, and that would happen more often than in plain training", where, _FIX
            )


def _forwards(module: nn.Module) -> Iterator[Callable[..., Any]]:
    own = vars(module).get("forward")
    if own is not None:
        yield own
    for each in type(module).__mro__:
        if _is_users(each) and "forward" in vars(each):
            yield vars(each)["forward"]


def _is_users(each: type) -> bool:
    return each.__module__.partition(".")[0] not in ("torch", "builtins", "typing")


def _content(cell: Any) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # it is not filled yet
        return _NOTHING


def _attribute(owner: Any, name: str) -> Any:
    """An attribute, without running Python of the owner; a property is itself."""
    if isinstance(owner, types.ModuleType):
        return vars(owner).get(name, _NOTHING)
    if isinstance(owner, nn.Module):
        for held in (vars(owner), owner._parameters, owner._buffers, owner._modules):
            if name in held:
                return held[name]
    return inspect.getattr_static(owner, name, _NOTHING)


def _only_reads(behind: list[Any], before: Any) -> bool:
    """Whether a list or dict is looked up, gone through, or asked for something: `x[key]`, `for _ in x`, `key in x`."""
    names = [step.opname for step in behind]
    if names[:1] == ["COPY"] and names[1:] and names[1].startswith(("POP_JUMP", "TO_BOOL")):
        return True  # of `x and y`
    if names[:1] == ["CALL"]:
        return before is not None and before.opname == "LOAD_GLOBAL" and before.argval in _ASK
    if names[:1] and (names[0] in _READING or names[0].startswith(("POP_JUMP", "JUMP_IF"))):
        return True
    above = 0  # of it on the stack
    for name in names:
        if name == "BINARY_SUBSCR":
            if above == 1:
                return True
            above -= 1
        elif name.startswith("LOAD_") and name not in _STEPS:
            above += 1
        elif name not in _STEPS or not above:
            return False
    return False
