"""A step that moves entries of an `OrderedDict` is no graph: that looks like no change to Dynamo. (2.11, 2.13)"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from pygraph_train.torch_private.changes import Around

__all__ = ["moving_nothing"]


def moving_nothing() -> tuple[Any, str, Any]:
    """(owner, attribute, value): a change of Dynamo while the library traces."""
    from torch._dynamo.variables import user_defined
    from torch._dynamo.variables.dicts import ConstDictVariable

    owner = getattr(user_defined, "OrderedDictVariable", ConstDictVariable)  # of 2.11 is the second one
    return owner, "call_method", Around(_moving_nothing)


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
