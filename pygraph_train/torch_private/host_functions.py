"""Functions that run on the host as they are, before each run of a graph, under Dynamo. (2.11, 2.13)

Dynamo follows a step into every function of Python, and ends a graph where one draws with NumPy, or reads the values of
a tensor there. Some functions of well-known libraries do nothing else: what they return follows from their arguments
and from the generators of the host. Such a one is not followed. It is called for the trace, and told to a recorder.
"""

from __future__ import annotations

import dis
import random
import sys
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from pygraph_train.torch_private.drawn_numbers import (
    NO_VALUE,
    CallResult,
    any_missing,
    generator_of,
    value_of,
)

__all__ = ["KNOWN", "CallOnHost", "HostFunction", "host_function", "made_by_host"]


class HostFunction(NamedTuple):
    """A function that changes nothing but the state of a generator.

    Attributes:
        module: where it is defined. One that ends with a dot stands for all modules inside of it.
        name: of the function.
        generator: from which it draws.
    """

    module: str
    name: str
    generator: str


KNOWN: tuple[HostFunction, ...] = (
    HostFunction("transformers.models.", "_compute_mask_indices", "numpy"),
    HostFunction("torch_geometric.utils._negative_sampling", "negative_sampling", "python"),
    HostFunction("torch_geometric.utils._negative_sampling", "batched_negative_sampling", "python"),
)
"""Why these change nothing else: the first fills arrays of its own with NumPy, and reads at most the sums of a mask.
The others draw with `random.sample`, and write to no tensors but those that they have made themselves. Where they are
given tensors they read the values, and leave them as they are."""


class CallOnHost:
    """A function of the host, as it was when it was traced. Two that call the same function are equal.

    Args:
        fn: the function.
        called: functions that it calls, of its library and of generators, each with the names among which it finds it,
            and its own there.
    """

    def __init__(self, fn: types.FunctionType, called: Sequence[_Called]) -> None:
        self.fn = fn
        self._called = tuple(called)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call it.

        Raises:
            ReplacedError: somebody has put another function in the place of one that it calls.
        """
        for names, name, other in self._called:
            if names.get(name) is not other:
                raise ReplacedError(name)
        return self.fn(*args, **kwargs)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, CallOnHost) and other.fn is self.fn

    def __hash__(self) -> int:
        return hash(self.fn)


class ReplacedError(Exception):
    """A function of the host is not what it was: nothing was called."""


_Called = tuple[dict[str, Any], str, Any]


def host_function(fn: Any) -> tuple[CallOnHost, str] | None:
    """A function and the generator that it draws from; None for a function that is not known to change nothing."""
    if not isinstance(fn, types.FunctionType):
        return None
    module = fn.__globals__.get("__name__", "")
    for known in KNOWN:
        inside = known.module.endswith(".") and module.startswith(known.module)
        if fn.__code__.co_name == known.name and (inside or module == known.module):
            found: list[_Called] = []
            fits = _is_its_own(fn, module) and _changes_nothing(fn, found, {fn})
            return (CallOnHost(fn, found), known.generator) if fits else None
    return None


def _is_its_own(fn: types.FunctionType, module: str) -> bool:
    """Whether a function is the one that its module has under that name, and nothing around it."""
    return fn.__closure__ is None and getattr(sys.modules.get(module), fn.__code__.co_name, None) is fn


def _changes_nothing(fn: types.FunctionType, found: list[_Called], seen: set[types.FunctionType]) -> bool:
    """Whether neither a function nor those of its library that it calls by name assign to a global or an attribute, or
    have a global list or the like.

    Somebody may have put another function in the place of one that it calls: this one belongs to another library.

    Args:
        found: gets those that it calls.
        seen: functions that were looked at, or are.
    """
    if any(
        isinstance(value, _CONTAINERS)
        for value in (*(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values())
    ):
        return False
    for code in _codes(fn.__code__):
        if any(instruction.opname in _CHANGES for instruction in dis.get_instructions(code)):
            return False
        for name in code.co_names:
            other = fn.__globals__.get(name)
            if isinstance(other, _CONTAINERS) or not _draws_as_ever(name, found):
                return False
            if not isinstance(other, types.FunctionType) or _library(other) == "torch":
                continue
            found.append((fn.__globals__, name, other))
            if other not in seen:
                seen.add(other)
                if _library(other) != _library(fn) or not _changes_nothing(other, found, seen):
                    return False
    return True


def _draws_as_ever(name: str, found: list[_Called]) -> bool:
    """Whether nobody has put a function of Python in the place of a draw of this name."""
    for names in (vars(random), vars(np.random)):
        draw = names.get(name)
        if generator_of(draw) is not None:
            found.append((names, name, draw))
        elif isinstance(draw, types.FunctionType) and _library(draw) not in ("random", "numpy"):
            return False
        elif isinstance(draw, (types.MethodType, types.BuiltinMethodType)) and not isinstance(
            draw.__self__, types.ModuleType
        ):
            return False  # of somebody's own generator
    return True


_CONTAINERS = (list, dict, set, bytearray, deque)
_CHANGES = {"STORE_GLOBAL", "DELETE_GLOBAL", "STORE_ATTR", "DELETE_ATTR"}


def _library(fn: types.FunctionType) -> str:
    return str(fn.__globals__.get("__name__", "")).partition(".")[0]


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _tree(variable: Any, read: Callable[[Any], CallResult | None]) -> Any:
    """An argument: a constant, a slot, or a tuple of these; `NO_VALUE` for anything else.

    Args:
        variable: of Dynamo's.
        read: what is in a tensor before the step; None where only the step knows.
    """
    from torch._dynamo.variables.lists import TupleVariable
    from torch._dynamo.variables.tensor import TensorVariable

    variable = variable.realize()
    if type(variable) is TensorVariable:
        slot = read(variable)
        return NO_VALUE if slot is None else slot
    if type(variable) is TupleVariable and not variable.is_python_constant():
        items = [_tree(x, read) for x in variable.items]
        return NO_VALUE if any_missing(items) else tuple(items)
    return value_of(variable)


def made_by_host(
    hooks: Any, tx: Any, fn: Any, args: Sequence[Any], kwargs: Mapping[str, Any], refuse: Callable[[], Any]
) -> Any:
    """What a function of the host returns, as a variable of Dynamo's; None where the function has to be followed.

    Args:
        hooks: of `host_draws`.
        fn: any function of Python.
        refuse: ends the graph.
    """
    recorder = hooks.recorder
    found = host_function(fn) if recorder.takes else None
    if found is None or not hooks.begins(tx):
        return None

    def read(variable: Any) -> CallResult | None:
        return hooks.read(tx, variable)  # type: ignore[no-any-return]

    given, named = [_tree(x, read) for x in args], {key: _tree(x, read) for key, x in kwargs.items()}
    if any_missing((*given, *named.values())):
        return None
    slot = recorder.call(found[0], given, named, found[1])
    if slot is None:
        return None
    value = recorder.value(slot)
    if isinstance(value, Tensor):
        return hooks.tensors.held(tx, slot, value.device, shared=False) or refuse()
    return hooks.wrapped(tx, slot, refuse) if isinstance(value, np.ndarray) else refuse()
