"""What a step draws and reads on the host, and what it asks of that: the answers decide which way the step takes.

A step that does `if torch.rand([]) < p: continue` takes one of two ways. A trace follows the way that its own numbers
lead to, and a graph holds that way. So the trace notes the calls that draw, what is computed from the numbers, and the
answers to the questions of Python's conditions. Before a step is replayed, the same calls are made with the generators
as they are: the graph is for this step only where all answers are the same.

What a step draws may also get into tensors of its graph: these are filled with the numbers of the step before a replay.

A step that does `if labels.max() >= classes: raise ...` reads a number of its batch. What it computes the number from
is noted in the same way, and computed from the batch at hand before a step is replayed.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from pygraph_train.problems import Problem
from pygraph_train.random_state import HostRandomState
from pygraph_train.torch_private.dispatch import no_autocast
from pygraph_train.torch_private.drawn_numbers import CallResult
from pygraph_train.torch_private.selections import is_count

__all__ = ["Ahead", "Asked", "Given", "HostDraws", "Made", "filled"]


class Given(NamedTuple):
    """A tensor that the step is given, which has the next free slot.

    Attributes:
        expression: Dynamo's, by which it is found in each step.
    """

    expression: str


class Made(NamedTuple):
    """A call, whose result has the next free slot.

    Attributes:
        fn: what is called.
        args, kwargs: with what. Slots in them stand for results of earlier calls.
        generator: from which it draws; None for a call that computes.
        filled: whether slots are among the arguments.
        key: the same for the same call with what follows from the same tensors. None where random numbers go into it.
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    generator: str | None
    filled: bool
    key: int | None = None


class Asked(NamedTuple):
    """A question of a condition: what is in this slot?"""

    slot: int
    outcome: Any


@dataclass(frozen=True)
class Ahead:
    """What a step will draw and read.

    Attributes:
        matches: whether it takes the way that was traced.
        path: the answers so far; the last one is another one than was traced, if it does not match.
        end: where the generators are after that way. None where it does not match.
        taken: what tensors of the graph get, in the order of `HostDraws.taken`.
    """

    matches: bool
    path: tuple[Any, ...]
    end: HostRandomState | None = None
    taken: tuple[Tensor, ...] = ()


@dataclass(frozen=True)
class HostDraws:
    """The calls and questions of one trace, in order.

    Attributes:
        steps: what they are.
        generators: those that they draw from.
        where: `file:line` of the first question.
        taken: slots of tensors of the host whose values get into tensors of the graph.
    """

    steps: tuple[Given | Made | Asked, ...]
    generators: frozenset[str]
    where: str | None = None
    taken: tuple[int, ...] = ()

    @functools.cached_property
    def inputs(self) -> tuple[str, ...]:
        """Expressions of the tensors that it reads ahead, in the order in which `look_ahead` takes these."""
        return tuple(step.expression for step in self.steps if isinstance(step, Given))

    @functools.cached_property
    def is_cheap(self) -> bool:
        """Whether to look ahead is cheaper than to check guards."""
        return not self.inputs

    @property
    def questions(self) -> frozenset[int]:
        """Keys of what it asks of such tensors."""
        return frozenset(key for key in self._asked_keys() if key is not None)

    @property
    def told(self) -> str:
        """What decides about the way, for messages."""
        keys = self._asked_keys()
        if self._only_counts():
            return "counts of selected elements (a boolean mask as index, nonzero(), repeat_interleave())"
        if None not in keys and keys:
            return "values of tensors that are read on the host"
        if not self.inputs:
            return "random numbers that are drawn on the host"
        return "random numbers that are drawn on the host, and values of tensors that are read there,"

    @property
    def fix(self) -> str:
        """What to do where steps take too many ways."""
        if self._only_counts():
            return (
                "Keep the shape: multiply with the mask, use torch.where(mask, x, 0), or select as many elements in "
                "each step"
            )
        return "Let few numbers decide, or compute them with torch on the device and choose with torch.where"

    def _only_counts(self) -> bool:
        asked = self._asked_of()
        return bool(asked) and all(isinstance(call, Made) and is_count(call.fn) for call in asked)

    def _asked_of(self) -> list[Given | Made]:
        made = [step for step in self.steps if not isinstance(step, Asked)]
        return [made[step.slot] for step in self.steps if isinstance(step, Asked)]

    def _asked_keys(self) -> list[int | None]:
        return [call.key if isinstance(call, Made) else None for call in self._asked_of()]

    def same_as(self, other: HostDraws) -> bool:
        """Whether both draw, compute and ask the same in the same order, so that what one takes serves the other."""
        return self.taken == other.taken and list(map(_told, self.steps)) == list(map(_told, other.steps))

    def another_way(self) -> Problem:
        """Why a step that takes another way is not for the graph."""
        return Problem(f"{self.told} lead to another way than was traced", self.where)

    def look_ahead(self, inputs: Sequence[Tensor] = (), known: dict[int, Any] | None = None) -> Ahead:
        """Find out what the step draws and reads that comes next. The generators stay where they are. Hot path.

        Args:
            inputs: the tensors behind `inputs`. Nothing of them changes.
            known: results of calls of this step, by their keys. It gets those that are made here. None where nobody
                else looks ahead of this step.
        """
        before = HostRandomState(self.generators)
        known = {} if known is None else known
        left = iter(inputs)
        values: list[Any] = []
        path: list[Any] = []
        try:
            with no_autocast(), torch.no_grad():
                for step in self.steps:
                    if isinstance(step, Made):
                        try:
                            values.append(_result(step, values, known))
                        except Exception as error:  # in the step it raises as well
                            return Ahead(False, (*path, type(error)))
                        continue
                    if isinstance(step, Given):
                        values.append(next(left).detach())
                        continue
                    found = values[step.slot]
                    path.append(found)
                    if type(found) is not type(step.outcome) or found != step.outcome:
                        return Ahead(False, tuple(path))
            taken = tuple([values[slot] for slot in self.taken])
            return Ahead(True, tuple(path), HostRandomState(self.generators), taken)
        finally:
            before.restore()


def _told(step: Given | Made | Asked) -> tuple[Any, ...]:
    """What can be compared of a step: arguments may be tensors."""
    return (step.fn, step.generator, step.filled) if isinstance(step, Made) else tuple(step)


def _result(call: Made, values: Sequence[Any], known: dict[int, Any]) -> Any:
    if call.key is not None and call.key in known:
        return known[call.key]
    args, kwargs = filled((call.args, call.kwargs), values) if call.filled else (call.args, call.kwargs)
    result = call.fn(*args, **kwargs)
    if call.key is not None:
        known[call.key] = result
    return result


def filled(tree: Any, values: Sequence[Any]) -> Any:
    """Arguments with values in the place of slots."""
    if isinstance(tree, CallResult):
        return values[tree.place]
    if isinstance(tree, (tuple, list)):
        return type(tree)([filled(x, values) for x in tree])
    if isinstance(tree, dict):
        return {key: filled(x, values) for key, x in tree.items()}
    if isinstance(tree, slice):
        return slice(*[filled(x, values) for x in (tree.start, tree.stop, tree.step)])
    return tree
