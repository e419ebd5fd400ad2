"""Functions under `functools.lru_cache` in what is traced. (2.11, 2.13)

Dynamo goes into the function itself, as if it had no cache. A trace would compute anew what plain Python has computed
once, and would not read what somebody has written to a cached tensor. Here the function is called for the trace, as
plain Python does. What it returns is read as any other object that is there already, and a guard asks the function
before each step whether it still returns the same.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from pygraph_train.random_state import GENERATORS, OF_DEVICES, HostRandomState
from pygraph_train.torch_private.changes import Around
from pygraph_train.torch_private.compiling import called_plainly

__all__ = ["mends"]


@functools.cache
def mends(*, regions: bool) -> tuple[tuple[Any, str, Any], ...]:
    """(owner, attribute, value): changes of Dynamo while the library traces.

    Args:
        regions: whether what is traced may be a part of a step.
    """
    from torch._dynamo.variables.functions import WrapperUserFunctionVariable

    return (
        (WrapperUserFunctionVariable, "call_function", Around(functools.partial(_asking_caches, regions))),
    )


def _asking_caches(regions: bool, call_function: Callable[..., Any]) -> Callable[..., Any]:
    def called(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        function, given = self.wrapper_obj, [*self.self_args(), *args]
        if not isinstance(function, functools._lru_cache_wrapper) or _is_of_a_library(function):
            return call_function(self, tx, args, kwargs)
        if not regions and _gets_new_tensors(tx, function, (*given, *kwargs.values())):
            return call_function(self, tx, args, kwargs)
        values = [_value(tx, argument) for argument in given]
        named = {name: _value(tx, argument) for name, argument in kwargs.items()}
        if _UNKNOWN in (*map(id, values), *map(id, named.values())):
            return call_function(self, tx, args, kwargs)
        call = functools.partial(function, *values, **named)
        result = _call(tx, call)
        _guard_identity(self)
        for argument in (*given, *kwargs.values()):
            _guard_argument(argument)
        return _read(tx, result, call)

    return called


def _is_of_a_library(function: Any) -> bool:
    """Libraries whose cached functions return numbers and recipes that follow from their arguments alone."""
    module = f"{function.__module__ or ''}."
    return module.startswith(("torch.", "einops.", "transformers.utils."))


def _gets_new_tensors(tx: Any, function: Any, arguments: Any) -> bool:
    """Whether the cache never holds an answer: each step makes other tensors, and asks for each of them once.

    Of a part of a step nobody knows that: the rest may ask again.
    """
    tensors = [argument for argument in (one.realize() for one in arguments) if argument.is_tensor()]
    if not tensors:
        return False
    nodes = [argument.as_proxy().node for argument in tensors]
    given = [node for node in tx.output.graph.nodes if node.op in ("placeholder", "get_attr")]
    asked = _of_trace(tx, function, "tensors")
    known = [*asked, *(node.meta.get("example_value") for node in given)]
    made = [node.meta.get("example_value") for node in nodes]
    if any(node in given or "dropout" in str(node.target) for node in nodes):
        return False  # of `dropout` that drops nothing: it returns what it got, and a trace does not show it
    if any(fake is None or _is_part_of(fake, known) for fake in made):
        return False
    asked.update(made)
    return True


def _is_part_of(tensor: Tensor, others: list[Any]) -> bool:
    """Whether a tensor shares memory with others, as it does where `x.float()` returns `x`."""
    aliases: Any = torch._C
    return any(isinstance(one, Tensor) and aliases._is_alias_of(tensor, one) for one in others)


def _of_trace(tx: Any, function: Any, kind: str) -> set[Any]:
    """What this trace has asked the cache of a function for."""
    asked: dict[Any, set[Any]] = vars(tx.output).setdefault("pygraph_asked_caches", {})
    return asked.setdefault((function, kind), set())


_NOTHING = object()
_UNKNOWN = id(_NOTHING)


def _value(tx: Any, argument: Any) -> Any:
    """What plain Python would call the function with."""
    from torch._dynamo.variables.user_defined import UserDefinedObjectVariable

    argument = argument.realize()
    if argument.is_tensor():
        _refuse("gets a tensor, and goes by which tensor it is")
    if isinstance(argument, UserDefinedObjectVariable):
        if argument.source is not None and not tx.output.side_effects.has_pending_mutation(argument):
            return argument.value
        try:
            return argument.as_python_constant()  # a named tuple: a cache compares what is in it
        except NotImplementedError:
            _refuse("gets an object that the step has made or changed")
    try:
        return argument.as_python_constant()
    except NotImplementedError:
        return _NOTHING


def _guard_identity(self: Any) -> None:
    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._dynamo.source import AttrSource, TypeSource

    source, given = self.source, self.self_args()
    if given:  # a method: the object makes a new one for each call
        owner = given[0].source
        source = owner and AttrSource(TypeSource(owner), self.wrapper_obj.__name__)
    if source is not None:
        install_guard(source.make_guard(GuardBuilder.ID_MATCH))


def _guard_argument(argument: Any) -> None:
    """Caches tell objects apart by their own equality, mostly by which they are."""
    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._dynamo.variables.user_defined import UserDefinedObjectVariable

    argument = argument.realize()
    source: Any = argument.source
    if source is not None and isinstance(argument, UserDefinedObjectVariable):
        install_guard(source.make_guard(GuardBuilder.ID_MATCH))


class _Draws(Exception):
    pass


def _undrawn(call: Any) -> Any:
    """Calls the function, as plain Python does here.

    Raises:
        _Draws: it draws random numbers. Plain Python draws them in the step, where the call stands. The generators are
            put back, and the cache forgets what was drawn.
        Exception: of the function. The generators are put back.
    """
    before, held = HostRandomState(_GENERATORS), call.func.cache_info().currsize
    try:
        result = call()
    except Exception:
        before.restore()
        raise
    if before.moved(HostRandomState(_GENERATORS)):
        before.restore()
        _forget_newest(call.func, held)
        raise _Draws
    return result


_GENERATORS = (*GENERATORS, OF_DEVICES)


def _forget_newest(function: Any, held: int) -> None:
    """Let a cache forget what it was given last.

    Args:
        held: how many results it held before.
    """
    if held == 0:
        function.cache_clear()
        return
    # CPython shows it to the garbage collector: a dict in the order of what it was given. It may lose entries
    for table in gc.get_referents(function):
        if (
            type(table) is dict
            and table is not vars(function)
            and len(table) == function.cache_info().currsize
        ):
            table.popitem()
            return


def _call(tx: Any, call: Any) -> Any:
    """Calls the function, as plain Python does here. Draws nothing."""
    from torch._dynamo.variables.torch_function import torch_function_mode_stack_state_mgr as modes

    try:
        # `torch.set_default_device` is a mode, and a trace takes them all away
        with called_plainly(), modes.temp_restore_stack():
            result = _undrawn(call)
    except _Draws:
        _refuse("draws random numbers")
    except Exception as error:
        _refuse(f"raises {type(error).__name__}")
    asked = _of_trace(tx, call.func, "values")
    asked.add((call.args, frozenset(call.keywords.items())))
    room = call.func.cache_info().maxsize
    if room is not None and len(asked) > room and not _is_plain(result):
        _refuse("holds less than the step asks it for")
    if any(isinstance(leaf, Tensor) and leaf.grad_fn is not None for leaf in tree_leaves(result)):
        _refuse("returns a tensor with a history of its own")
    return result


def _refuse(why: str) -> None:
    from torch._dynamo.exc import unimplemented

    unimplemented(
        gb_type="function under functools.lru_cache",
        context="",
        explanation=f"The step calls a function under functools.lru_cache, which {why}.",
        hints=[],
    )


def _read(tx: Any, result: Any, call: Any) -> Any:
    from torch._dynamo.guards import install_guard
    from torch._dynamo.source import GlobalSource
    from torch._dynamo.variables.base import VariableTracker

    answer = GlobalSource(tx.output.install_global("__answer", _Answer(call, result)))
    install_guard(answer.make_guard(_still_given))
    if result is None or type(result) in _PLAIN:
        return VariableTracker.build(tx, result)  # no number that is read anew: there the guard would go
    source = GlobalSource(tx.output.install_global_by_id("__cached", result))
    return VariableTracker.build(tx, result, source)


class _Answer:
    """What a function gave. No number or string: Dynamo looks at none of these in a dict that stays as it was."""

    def __init__(self, call: Any, result: Any) -> None:
        self.call, self._result = call, result
        self._info = call.func.cache_info()

    def is_given(self) -> bool:
        """Whether the function returns the same object, or equal numbers or strings. Draws nothing. Hot path."""
        before, info = self._info, self.call.func.cache_info()
        # it has been asked for nothing new, and was not cleared: it returns what it holds
        kept = info.currsize > 0 and info.misses == before.misses and info.hits >= before.hits
        try:
            now = self.call() if kept else _undrawn(self.call)
        except Exception:  # of the function as well: the step calls it, and meets it
            return False
        self._info = self.call.func.cache_info()
        return _is_same(now, self._result)


def _is_same(now: Any, before: Any) -> bool:
    if now is before:
        return True
    if type(now) is tuple and type(before) is tuple:
        return len(now) == len(before) and all(map(_is_same, now, before))
    return type(now) is type(before) and type(now) in _PLAIN and bool(now == before)


def _is_plain(result: Any) -> bool:
    if type(result) is tuple:
        return all(map(_is_plain, result))
    return result is None or type(result) in _PLAIN


def _still_given(builder: Any, guard: Any) -> None:
    """A guard."""
    from torch._dynamo.guards import get_verbose_code_parts

    name = builder.get(guard).call.func.__name__
    code = f"the cache of {name} holds what it held"
    parts = get_verbose_code_parts(code, guard)
    builder.get_guard_manager(guard).add_lambda_guard(_Answer.is_given, parts, guard.user_stack)


_PLAIN = (int, float, bool, complex, str, bytes)
