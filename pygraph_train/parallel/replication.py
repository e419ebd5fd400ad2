"""How the processes of one training share its model: what a step has to do for the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

from torch import Tensor, distributed, nn

from pygraph_train.problems import Problem
from pygraph_train.tracing.trace import Compiler

__all__ = ["RECORDER", "Alone", "Replication", "exchanged"]

RECORDER = ".seen_through.calls"
"""Suffix of the expression of the list that a trace writes to, once for each call of a wrapper."""


class Replication(Protocol):
    """What a step has to do for the other processes that train the same model."""

    name: str
    """What torch calls it, "" for one process."""
    sharded: bool
    """Whether each rank holds a part of every parameter: then no rank can run a forward alone."""
    group: Any
    """The process group of its collectives, None without one."""
    problem: Problem | None
    """Why no graph can hold its collectives, None where one may."""

    def seen_through(self) -> AbstractContextManager[None]:
        """Around traced calls and questions to their guards: a wrapper is no more than its module."""

    def opened(self) -> AbstractContextManager[frozenset[Any]]:
        """Around a trace that executes nothing: modules are as Dynamo can see them.

        Yields what stands in for hooks of modules.
        """

    def around(self) -> AbstractContextManager[None]:
        """Around a traced call of the step's function: what the wrapper does before and after its module."""

    def not_called_once(self) -> Problem | None:
        """Why no graph can hold a step like the last one that was looked at."""

    def micro_batch(self, *, sync: bool) -> AbstractContextManager[None]:
        """Around forward and backward: whether gradients are exchanged in it."""

    def exchanges(self, *, update: bool) -> bool:
        """Whether the next backward exchanges gradients.

        Args:
            update: whether an update follows it.
        """

    def uneven(self) -> bool:
        """Whether ranks may make different numbers of steps. Hot path."""

    def traceable(self) -> bool:
        """Whether the next step may be traced."""

    def why_not_traceable(self) -> Problem:
        """What to say where no step may be traced for a long time."""

    def ready(self) -> bool:
        """Whether the next step exchanges gradients as all later ones will."""

    def exchange_buffers(self) -> None:
        """Before a local forward: what the wrapper's forward would exchange. All ranks call it."""

    def local(self) -> AbstractContextManager[None]:
        """Around a forward and backward that is not part of training: nothing is exchanged."""

    def resting(self, parameters: list[Tensor]) -> list[Tensor]:
        """Parameters that were met in the middle of a step, as the optimizer knows them."""

    def leaves(self, *, sync: bool) -> list[Any]:
        """What, besides parameters, keeps gradients as its `.grad` from one micro-batch to the next.

        Args:
            sync: whether the present one exchanges gradients.
        """

    def constants(self) -> tuple[Any, ...]:
        """What a capture of the next micro-batch bakes in of the one before."""

    def replayed(self, *, sync: bool) -> None:
        """A micro-batch came from a graph, in which gradients were exchanged or not."""

    def reduced(self, value: Tensor, *, mean: bool) -> Tensor:
        """The sum or mean of a value over all ranks. In a local forward, which exchanges nothing, the value itself."""

    def reduce(self, parameters: Iterable[Tensor]) -> None:
        """Exchange gradients of a local backward as the wrapper would have."""

    def notes(self) -> Callable[[], None]:
        """Note what a wrapper knows in Python of the micro-batch before. Returns what puts that back."""

    def in_pieces(self, compiler: Compiler) -> Compiler:
        """What compiles as `compiler` does, in pieces: the gradients of one are exchanged while the next one runs."""

    def units(self) -> list[nn.Module]:
        """Modules that are compiled one by one, because hooks around them cannot be traced."""

    def capturing(self) -> AbstractContextManager[None]:
        """Around a capture: what it leaves in Python is put in order."""

    def reset(self) -> None:
        """After a capture that did not end on all ranks. All of them call it."""


_NO_CONTEXT = nullcontext()


class Alone:
    """One process, or several that share nothing."""

    name: str = ""
    sharded: bool = False
    group: Any = None
    problem: Problem | None = None

    def seen_through(self) -> AbstractContextManager[None]:
        """Nothing is wrapped."""
        return _NO_CONTEXT

    def opened(self) -> AbstractContextManager[frozenset[Any]]:
        """Nothing is wrapped."""
        return nullcontext(frozenset())

    def around(self) -> AbstractContextManager[None]:
        """Nothing is wrapped."""
        return nullcontext()

    def not_called_once(self) -> Problem | None:
        """Nothing is wrapped."""
        return None

    def micro_batch(self, *, sync: bool) -> AbstractContextManager[None]:
        """Nothing is exchanged."""
        return nullcontext()

    def exchanges(self, *, update: bool) -> bool:
        """There is nothing to be left out."""
        return True

    def uneven(self) -> bool:
        """Nobody waits for another one."""
        return False

    def traceable(self) -> bool:
        """Always."""
        return True

    def why_not_traceable(self) -> Problem:
        """Nothing of the kind."""
        return Problem("no step of the model may be traced yet")

    def ready(self) -> bool:
        """Always."""
        return True

    def exchange_buffers(self) -> None:
        """Nothing is exchanged."""

    def local(self) -> AbstractContextManager[None]:
        """Nothing is exchanged."""
        return nullcontext()

    def resting(self, parameters: list[Tensor]) -> list[Tensor]:
        """They are always the same."""
        return parameters

    def leaves(self, *, sync: bool) -> list[Any]:
        """Parameters keep all gradients."""
        return []

    def constants(self) -> tuple[Any, ...]:
        """Nothing."""
        return ()

    def replayed(self, *, sync: bool) -> None:
        """Nothing to put in order."""

    def reduced(self, value: Tensor, *, mean: bool) -> Tensor:
        """The value itself."""
        return value

    def reduce(self, parameters: Iterable[Tensor]) -> None:
        """Nothing is exchanged."""

    def notes(self) -> Callable[[], None]:
        """Nothing to put back."""
        return lambda: None

    def in_pieces(self, compiler: Compiler) -> Compiler:
        """One piece."""
        return compiler

    def units(self) -> list[nn.Module]:
        """None: the step is compiled as a whole."""
        return []

    def capturing(self) -> AbstractContextManager[None]:
        """Nothing to put in order."""
        return nullcontext()

    def reset(self) -> None:
        """Nothing to put in order."""


def exchanged(value: Tensor, group: Any, *, mean: bool) -> Tensor:
    """The sum or mean of a value over all ranks of a group, as a new tensor."""
    value = value.clone()
    averages = mean and distributed.get_backend(group) != "gloo"
    op = distributed.ReduceOp.AVG if averages else distributed.ReduceOp.SUM
    distributed.all_reduce(value, op=op, group=group)
    return value.div_(distributed.get_world_size(group)) if mean and not averages else value
