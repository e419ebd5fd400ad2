"""Guards for the order of an `OrderedDict` that a step goes through. (2.11, 2.13)

Dynamo's guards see the order in which the keys came. `move_to_end` leaves that as it is, so a step that calls it is no
graph: what such a call leaves looks like no change.
"""

from __future__ import annotations

import functools
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from pygraph_train.torch_private.changes import Around

__all__ = ["mends"]


@functools.cache
def mends() -> tuple[tuple[Any, str, Any], ...]:
    """(owner, attribute, value): changes of Dynamo while the library traces."""
    from torch._dynamo.variables import user_defined
    from torch._dynamo.variables.dicts import ConstDictVariable

    moved = getattr(user_defined, "OrderedDictVariable", ConstDictVariable)  # of 2.11 is the second one
    names = ("install_dict_keys_match_guard", "tp_iter_impl")  # of 2.13 is the second one
    around = Around(_guarding_order)
    guards = [(ConstDictVariable, name, around) for name in names if name in vars(ConstDictVariable)]
    return (*guards, (moved, "call_method", Around(_moving_nothing)))


def _guarding_order(ask: Callable[..., Any]) -> Callable[..., Any]:
    def asked(self: Any, *args: Any) -> Any:
        from torch._dynamo.guards import install_guard

        if self.source and issubclass(self.user_cls, OrderedDict):
            install_guard(self.source.make_guard(_in_this_order))
        return ask(self, *args)

    return asked


def _moving_nothing(call: Callable[..., Any]) -> Callable[..., Any]:
    def called(self: Any, tx: Any, name: str, *args: Any) -> Any:
        from torch._dynamo.exc import unimplemented

        if name == "move_to_end" and self.source:
            unimplemented(
                gb_type="move_to_end",
                context="",
                explanation="The step calls move_to_end() of an OrderedDict that it has not made.",
                hints=[],
            )
        return call(self, tx, name, *args)

    return called


def _in_this_order(builder: Any, guard: Any) -> None:
    """A guard. Those of a dict itself know no other checks: it is one of the frame, which looks the dict up."""
    from torch._dynamo.guards import GuardManagerType, _get_closure_vars, get_verbose_code_parts

    expression = builder.arg_ref(guard)
    code, scope = compile(expression, "<guard>", "eval"), {**_get_closure_vars(), "G": builder.scope["G"]}
    keys = tuple(OrderedDict.__iter__(builder.get(guard)))

    def keys_now(local: Any) -> tuple[Any, ...] | None:
        try:
            return tuple(OrderedDict.__iter__(eval(code, {**scope, "L": local})))
        except Exception:  # it is not there any more
            return None

    def is_in_order(now: Any) -> bool:
        return now is not None and len(now) == len(keys) and all(map(_is_same, now, keys))

    name = f"list({expression})"
    order = builder.guard_manager.root.lambda_manager(
        python_lambda=keys_now,
        source=name,
        example_value=keys,
        guard_manager_enum=GuardManagerType.GUARD_MANAGER,
    )
    parts = get_verbose_code_parts(f"{name} == {list(keys)!r}", guard)
    order.add_lambda_guard(is_in_order, parts, guard.user_stack)


def _is_same(one: Any, other: Any) -> bool:
    """As a dict compares its keys."""
    return one is other or (hash(one) == hash(other) and bool(one == other))
