"""Which calls of a trace have to be made before a step: those that draw, and those that something follows from."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
from torch import Tensor

from pygraph_train.torch_private.drawn_numbers import CallResult
from pygraph_train.tracing.graph_calls import is_write, slots_in
from pygraph_train.tracing.host_draws import Asked, Given, Made, filled

__all__ = ["needed"]

_DIVISIONS = (operator.truediv, operator.floordiv, operator.mod, operator.pow)


def needed(
    steps: Sequence[Given | Made | Asked], values: Sequence[Any], taken: set[int]
) -> tuple[tuple[Given | Made | Asked, ...], dict[int, int]]:
    """Without calls that nothing follows from. Slots are numbered anew: their new numbers by the old ones.

    Args:
        steps: of a trace.
        values: what is in the slots.
        taken: slots that are wanted besides those that are asked for.
    """
    wanted = set(taken)
    keep: set[int] = set()
    index = len(values)
    for at in reversed(range(len(steps))):
        step = steps[at]
        if type(step) is Asked:
            wanted.add(step.slot)
            keep.add(at)
            continue
        index -= 1
        if type(step) is Given:
            keep |= {at} if index in wanted else set()
            continue
        assert type(step) is Made
        if step.generator or index in wanted or is_write(step.fn) or _may_raise(step, values):
            keep.add(at)
            wanted |= slots_in((step.args, step.kwargs))
    places: dict[int, int] = {}
    kept: list[Given | Made | Asked] = []
    index = 0
    for at, step in enumerate(steps):
        if type(step) is Asked:
            kept.append(Asked(places[step.slot], step.outcome))
            continue
        if at in keep:
            places[index] = len(places)
            slots = {old: CallResult(new) for old, new in places.items()}
            if type(step) is Made:
                args, kwargs = filled((step.args, dict(step.kwargs)), slots)  # type: ignore[arg-type]
                step = step._replace(args=args, kwargs=kwargs)
            kept.append(step)
        index += 1
    return tuple(kept), places


def _may_raise(call: Made, values: Sequence[Any]) -> bool:
    """Whether Python raises an error at other numbers: nothing else need follow from the call."""
    given = [values[slot] for slot in slots_in((call.args, call.kwargs))]
    if any(isinstance(value, (list, tuple, np.ndarray, np.generic)) for value in given):
        return True
    if call.fn in _DIVISIONS:
        return type(call.args[-1]) is CallResult
    if call.fn not in (int, round) or type(call.args[0]) is not CallResult:
        return False
    value = values[call.args[0].place]
    return value.is_floating_point() if isinstance(value, Tensor) else type(value) is float
