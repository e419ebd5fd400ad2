"""Reentrant checkpoints under Dynamo, which makes the other kind of them. (2.11, 2.13)

A reentrant one whose inputs want no gradient gives none to its parameters either: torch warns of that.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

__all__ = ["mends"]


@functools.cache
def mends() -> tuple[tuple[Any, str, Any], ...]:
    """(owner, attribute, value): what Dynamo gets while we trace."""
    from torch._dynamo.variables.higher_order_ops import CheckpointHigherOrderVariable as Checkpoint

    return ((Checkpoint, "_call_function", _refusing(Checkpoint._call_function)),)


def _refusing(call_function: Callable[..., Any]) -> Callable[..., Any]:
    from torch._dynamo.exc import unimplemented

    def refused(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        reentrant = kwargs.get("use_reentrant")
        is_reentrant = reentrant is None or reentrant.as_python_constant()
        if is_reentrant and not any(getattr(x, "requires_grad", False) for x in args[1:]):
            why = "a checkpoint with use_reentrant=True has no input that requires a gradient"
            unimplemented(
                gb_type="reentrant checkpoint",
                context=why,
                explanation=why,
                hints=["use_reentrant=False gives gradients to its parameters"],
            )
        return call_function(self, tx, args, kwargs)

    return refused
