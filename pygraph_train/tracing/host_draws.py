"""Random numbers that a step draws on the host, and what it asks of them: they decide which way it takes.

A step that does `if torch.rand([]) < p: continue` takes one of two ways. A trace follows the way that its own numbers
lead to, and a graph holds that way. So the trace notes the calls that draw, what is computed from the numbers, and the
answers to the questions of Python's conditions. Before a step is replayed, the same calls are made with the generators
as they are: the graph is for this step only where all answers are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from pygraph_train.problems import Problem
from pygraph_train.random_state import HostRandomState
from pygraph_train.torch_private.dispatch import no_autocast
from pygraph_train.torch_private.drawn_numbers import CallResult

__all__ = ["Ahead", "Asked", "HostDraws", "Made", "filled"]


class Made(NamedTuple):
    """A call, whose result has the next free slot.

    Attributes:
        fn: what is called.
        args, kwargs: with what. Slots in them stand for results of earlier calls.
        generator: from which it draws; None for a call that computes.
        filled: whether slots are among the arguments.
    """

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    generator: str | None
    filled: bool


class Asked(NamedTuple):
    """A question of a condition: what is in this slot?"""

    slot: int
    outcome: Any


@dataclass(frozen=True)
class Ahead:
    """What a step will draw.

    Attributes:
        matches: whether it takes the way that was traced.
        path: the answers so far; the last one is another one than was traced, if it does not match.
        end: where the generators are after that way. None where it does not match.
    """

    matches: bool
    path: tuple[Any, ...]
    end: HostRandomState | None = None


@dataclass(frozen=True)
class HostDraws:
    """The calls and questions of one trace, in order.

    Attributes:
        steps: what they are.
        generators: those that they draw from.
        where: `file:line` of the first question.
    """

    steps: tuple[Made | Asked, ...]
    generators: frozenset[str]
    where: str | None = None

    def another_way(self) -> Problem:
        """Why a step that takes another way is not for the graph."""
        return Problem("random numbers of the host lead to another way than was traced", self.where)

    def look_ahead(self) -> Ahead:
        """Find out what the step draws that comes next. The generators stay where they are. Hot path."""
        before = HostRandomState(self.generators)
        values: list[Any] = []
        path: list[Any] = []
        try:
            with no_autocast(), torch.no_grad():
                for step in self.steps:
                    if isinstance(step, Made):
                        if step.filled:
                            args, kwargs = filled((step.args, step.kwargs), values)
                            values.append(step.fn(*args, **kwargs))
                        else:
                            values.append(step.fn(*step.args, **step.kwargs))
                        continue
                    found = values[step.slot]
                    path.append(found)
                    if type(found) is not type(step.outcome) or found != step.outcome:
                        return Ahead(False, tuple(path))
            return Ahead(True, tuple(path), HostRandomState(self.generators))
        finally:
            before.restore()


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
