"""Numbers for calls that are made ahead of a step: the same number for calls that return the same in one step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from pygraph_train.torch_private.drawn_numbers import CallResult
from pygraph_train.torch_private.host_functions import CallOnHost
from pygraph_train.tracing.graph_calls import is_write, slots_in
from pygraph_train.tracing.host_draws import Asked, Given, Made

__all__ = ["hashable", "key_of", "made_once"]


def made_once(steps: Sequence[Given | Made | Asked]) -> tuple[Given | Made | Asked, ...]:
    """The steps of one trace, with what lets a function of the host be called once for several traces of a step.

    It returns the same where it is given the same, and the same was drawn and changed before.
    """
    found: list[Given | Made | Asked] = []
    keys: dict[int, int] = {}  # of what is in slots
    before: int | None = key_of("nothing is drawn")
    place = 0
    for step in steps:
        if isinstance(step, Asked):
            found.append(step)
            continue
        key = None
        if isinstance(step, Given):
            key = key_of(step)
        elif before is not None and slots_in((step.args, step.kwargs)) <= keys.keys():
            key = _key_of_call(step, keys, before)
        if isinstance(step, Made):
            if step.generator is not None or is_write(step.fn):
                before = key
            step = step._replace(again=key if isinstance(step.fn, CallOnHost) else None)
        if key is not None:
            keys[place] = key
        found.append(step)
        place += 1
    return tuple(found)


def _key_of_call(call: Made, keys: Mapping[int, int], before: int) -> int | None:
    try:
        return key_of((call.fn, hashable((call.args, dict(call.kwargs)), keys), call.generator, before))
    except TypeError:  # an argument that has no hash
        return None


_keys: dict[Any, int] = {}


def key_of(call: Any) -> int:
    """The same number for the same call with what follows from the same tensors."""
    return _keys.setdefault(call, len(_keys))


def hashable(tree: Any, keys: Mapping[int, int]) -> Any:
    """Arguments with keys in the place of slots, where equal ones are the same ones.

    Raises:
        TypeError: one has no hash.
    """
    if isinstance(tree, CallResult):
        return "slot", keys[tree.place]
    if isinstance(tree, (tuple, list)):
        return type(tree), *[hashable(x, keys) for x in tree]
    if isinstance(tree, Mapping):
        return dict, *[(name, hashable(x, keys)) for name, x in sorted(tree.items())]
    if isinstance(tree, slice):
        return slice, hashable((tree.start, tree.stop, tree.step), keys)
    hash(tree)
    return type(tree), repr(tree) if type(tree) in (float, complex) else tree  # 0.0 == -0.0
