"""Reentrant checkpoints under Dynamo, which makes the other kind of them. (2.11, 2.13)

A reentrant one whose inputs want no gradient gives none to its parameters either: torch warns of that.

It has a backward of its own, which adds to the gradients of its parameters. Those of other uses of a parameter are not
summed with these before. A region does not know what else in the step uses its parameters.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils import checkpoint

__all__ = ["checkpoints_leave_generators", "mends"]


@contextmanager
def checkpoints_leave_generators() -> Iterator[None]:
    """Checkpoints in which nothing is drawn do not ask generators of devices where they are. (2.11, 2.13)"""
    stock = checkpoint.get_device_states
    checkpoint.get_device_states = lambda *args: ([], [])
    try:
        yield
    finally:
        checkpoint.get_device_states = stock


@functools.cache
def mends(*, regions: bool) -> tuple[tuple[Any, str, Any], ...]:
    """(owner, attribute, value): what Dynamo gets while we trace.

    Args:
        regions: whether what is traced is a part of a step.
    """
    from torch._dynamo.variables.higher_order_ops import CheckpointHigherOrderVariable as Checkpoint

    return ((Checkpoint, "_call_function", _refusing(Checkpoint._call_function, regions)),)


def _refusing(call_function: Callable[..., Any], regions: bool) -> Callable[..., Any]:
    from torch._dynamo.exc import unimplemented

    def refused(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        reentrant = kwargs.get("use_reentrant")
        is_reentrant = reentrant is None or reentrant.as_python_constant()
        why = None
        if is_reentrant and not any(getattr(x, "requires_grad", False) for x in args[1:]):
            why = "a checkpoint with use_reentrant=True has no input that requires a gradient"
            fix = "Use checkpoint(..., use_reentrant=False), which gives gradients to its parameters"
        elif is_reentrant and regions:
            why = "a checkpoint with use_reentrant=True adds to gradients by itself"
            fix = "Use checkpoint(..., use_reentrant=False), which adds gradients in the usual backward"
        if why is not None:
            unimplemented(gb_type="reentrant checkpoint", context=why, explanation=why, hints=[fix])
        return call_function(self, tx, args, kwargs)

    return refused
