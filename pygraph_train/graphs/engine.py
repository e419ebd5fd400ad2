"""What a captured graph is, whichever machine runs it.

Two engines keep this contract: `cuda` (real CUDA graphs) and `emulated` (a CPU tape with the same
rules). Nothing in this package knows what a training step is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch

from pygraph_train.problems import NotLegal, Problem, first_line, user_location

T = TypeVar("T")


class CaptureError(RuntimeError):
    """A capture failed. Nothing was executed: memory contents, random state and streams are as before.

    Attributes:
        reason: one sentence without the location.
        where: `file:line` of the user's code that cannot be captured, or None.
    """

    def __init__(self, reason: str, where: str | None = None) -> None:
        self.reason = reason
        self.where = where
        super().__init__(f"{reason} ({where})" if where else reason)


class IndirectionUnavailable(RuntimeError):
    """The inputs of a graph cannot be moved here. The message is a sentence that says why."""


class NumbersNotFound(RuntimeError):
    """The numbers of a capture cannot be replaced, and it holds numbers that nobody wants: it must not be replayed."""


def problem_of(error: Exception) -> Problem:
    """The sentence for what went wrong with a graph."""
    if isinstance(error, NotLegal):
        return error.problem
    if isinstance(error, CaptureError):
        where = error.where or user_location(error.__traceback__)
        return Problem(error.reason, where, _READ_LATER if "on the host" in error.reason else "")
    if isinstance(error, torch.OutOfMemoryError):
        return Problem(
            "out of memory during the capture", fix="Use a smaller batch, so that the graph's memory fits"
        )
    told = f"the capture failed with {type(error).__name__}: {first_line(error)}"
    return Problem(told, user_location(error.__traceback__))


_READ_LATER = "Return the tensor from the step, and read or print it after the step"


@runtime_checkable
class Graph(Protocol):
    """One captured piece of work with fixed addresses.

    `replay` runs exactly the device work recorded during capture, on the storages it was recorded
    with, in the caller's current stream, and no Python. Python numbers seen by the capture are
    baked in. Random operations draw from the registered generators as eager operations would.
    """

    nodes: int
    """Number of recorded device operations (CUDA graph nodes, or dispatched operations)."""

    def replay(self) -> None:
        """Enqueue the recorded work once."""

    def numbers(self, sets: Sequence[Sequence[float]], kernels: Sequence[str]) -> NumberWriter:
        """Find Python numbers in the captured operations of certain names.

        Args:
            sets: numbers that an operation holds together. Each occurs nowhere else in the capture, and all differ. An
                empty set says that an operation may hold none.
            kernels: parts of the names of the operations.
        Raises:
            NumbersNotFound: an operation of such a name does not hold each number of just one set once, a set is in
                no operation, or nobody can replace numbers here.
        """

    def close(self) -> None:
        """Release the graph and its private memory. Replaying it afterwards raises RuntimeError."""


class Inputs(Protocol):
    """Tensors that a graph works on, and which lie elsewhere in each replay.

    Attributes:
        stand_ins: for the capture, in the place of the inputs. Their values are of no use.
    """

    stand_ins: Sequence[torch.Tensor]

    def follow(self, graph: Graph) -> None:
        """Find the inputs in the graph that was captured with the stand-ins.

        Raises:
            IndirectionUnavailable: they cannot be replaced there. The graph must not be replayed.
        """

    def fit(self, addresses: list[int]) -> bool:
        """Whether replays may work on tensors at these addresses: captured kernels may rely on an alignment."""

    def take(self, inputs: Sequence[torch.Tensor], addresses: list[int]) -> None:
        """Let replays from now on work on these. They look like those of the capture, and are not kept alive.

        Args:
            inputs: tensors.
            addresses: of their first elements.
        """

    def give_back(self, inputs: Sequence[torch.Tensor]) -> None:
        """After a replay: what it wrote into the inputs is there."""

    def close(self) -> None:
        """Release the stand-ins. The graph was closed."""


class NumberWriter(Protocol):
    """Numbers in the captured operations of one graph."""

    def write(self, values: Sequence[float]) -> None:
        """Let later replays use these numbers; those enqueued before keep theirs.

        Args:
            values: one for each number, in the order in which they were given to `Graph.numbers`.
        Raises:
            RuntimeError: a number could not be replaced.
        """


@runtime_checkable
class Engine(Protocol):
    """Makes graphs, which share memory pools; no two graphs of one engine may run at once."""

    name: str
    device: torch.device

    def scratch_pool(self, pool: Any = None) -> AbstractContextManager[Any]:
        """Context in which captures allocate from a pool that is gone once it and their graphs are.

        Args:
            pool: what such a context has given. A capture may use the memory of what earlier ones have let go of, so
                their replays overwrite each other. It is of no use after a capture that failed.
        """

    def allocating_in(self, pool: Any) -> AbstractContextManager[None]:
        """Context in which tensors lie in the pool of a `scratch_pool`, also those of a backward.

        The next replay of a graph there overwrites them. Other streams may use them when the context has ended.
        """

    def lasting_memory(self) -> AbstractContextManager[None]:
        """Context for allocating tensors that stay: they share no segment with what comes and goes."""

    def synchronize(self) -> None:
        """Wait until the device has done everything that was enqueued."""

    def capture(self, fn: Callable[[], T]) -> tuple[Graph, T]:
        """Record the device work of `fn()` without executing it.

        Args:
            fn: called once, with no arguments.
        Returns:
            The graph, and what `fn` returned: its tensors have fixed addresses, hold no defined values
            before the first replay, and are overwritten by every replay.
        Raises:
            CaptureError: `fn` did something that a graph cannot hold (host read, host-to-device copy
                from pageable memory, ...). Other exceptions of `fn`, KeyboardInterrupt and
                out-of-memory errors pass through unchanged, after the same clean-up.
        """

    def movable(self, inputs: Sequence[torch.Tensor]) -> Inputs:
        """For a capture that works on tensors which will lie elsewhere in replays.

        Args:
            inputs: plain tensors that look like those.
        Raises:
            IndirectionUnavailable: this engine has no such graphs here.
        """

    def trim(self) -> None:
        """Hand memory back that warm-up and captures no longer need."""

    def peak_memory(self) -> int:
        """The most bytes that this process ever reserved; 0 where nobody knows."""

    def room(self) -> int:
        """Bytes that can be allocated before it reserves more than ever; 0 where nobody knows."""

    def close(self) -> None:
        """Release the pool. Every graph must have been closed."""
