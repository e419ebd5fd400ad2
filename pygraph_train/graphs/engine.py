"""What a captured graph is, whichever machine runs it.

Two engines keep this contract: `cuda` (real CUDA graphs) and `emulated` (a CPU tape with the same
rules). Nothing in this package knows what a training step is.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol, TypeVar, runtime_checkable

import torch

__all__ = ["CaptureError", "Engine", "Graph"]

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

    def close(self) -> None:
        """Release the graph and its private memory. Replaying it afterwards raises RuntimeError."""


@runtime_checkable
class Engine(Protocol):
    """Makes graphs. All graphs of one engine share one memory pool; no two of them may run at once."""

    name: str
    device: torch.device

    def warm_up(self) -> AbstractContextManager[None]:
        """Context for ordinary runs before a capture (the side stream that captures use on CUDA)."""

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

    def trim(self) -> None:
        """Hand memory back that warm-up and captures no longer need."""

    def close(self) -> None:
        """Release the pool. Every graph must have been closed."""
