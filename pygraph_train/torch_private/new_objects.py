"""What the frame being compiled has made: an object that it returns, taken apart while Dynamo traces. (2.11, 2.13)"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from pygraph_train.torch_private.changes import Around

__all__ = ["taking_apart"]

Met = Callable[[type, Sequence[str] | None], bool]
"""Called with the class of an object and the names of what it holds; None for an object that was there before the
frame, or comes twice. Returns whether the attributes are wanted."""


def taking_apart(stand_in: Callable[..., Any], met: Met) -> tuple[tuple[Any, str, Any], ...]:
    """Changes of Dynamo.

    Args:
        stand_in: a function that the frame calls with an object: it returns what the object holds then, as a tuple. It
            returns an empty one for everything that is no object of a class of the user's.
        met: told of each of these objects.
    """
    from torch._dynamo.variables.builder import VariableBuilder

    seen: set[int] = set()
    kept: list[Any] = []  # so that no other object gets an id of `seen`
    opener = _opener()

    def around(stock: Callable[..., Any]) -> Callable[..., Any]:
        def wrap(self: Any, value: Any) -> Any:
            if value is stand_in:
                return opener(met, seen, kept, source=self.source)
            return stock(self, value)

        return wrap

    return ((VariableBuilder, "_wrap", Around(around)),)


def _opener() -> Any:
    from torch._dynamo.variables.base import AttributeMutationNew, VariableTracker
    from torch._dynamo.variables.lists import TupleVariable
    from torch._dynamo.variables.user_defined import UserDefinedObjectVariable

    class Opener(VariableTracker):
        """A function that returns what an object holds."""

        def __init__(self, met: Met, seen: set[int], kept: list[Any], **kwargs: Any) -> None:
            super().__init__(**kwargs)
            self.met, self.seen, self.kept = met, seen, kept

        def call_function(self, tx: Any, args: Any, kwargs: Any) -> Any:
            made = args[0].realize()
            if type(made) is not UserDefinedObjectVariable:
                return TupleVariable([])
            kind, held = made.python_type(), None
            if isinstance(made.mutation_type, AttributeMutationNew) and id(made) not in self.seen:
                held = tx.output.side_effects.store_attr_mutations.get(made, {})
            self.seen.add(id(made))
            self.kept.append(made)
            if held is not None and any(type(x).__name__ == "DeletedVariable" for x in held.values()):
                held = None
            wanted = self.met(kind, None if held is None else tuple(held))
            return TupleVariable([x.realize() for x in held.values()] if wanted and held else [])

    return Opener
