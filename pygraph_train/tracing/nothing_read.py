"""What a recorder of draws says that reads no tensors ahead, and lets nothing that is drawn get into tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import fx

from pygraph_train.torch_private.drawn_numbers import CallResult

__all__ = ["NothingRead"]


class NothingRead:
    """See `torch_private.drawn_numbers.DrawRecorder`.

    Attributes:
        has_read: whether anything was read ahead.
        takes: whether what is drawn may get into tensors: somebody has to fill them before each run.
    """

    has_read = False
    takes = False

    def call(
        self, fn: Callable[..., Any], args: Any, kwargs: Mapping[str, Any], generator: str
    ) -> CallResult | None:
        """Call a function of the host: what it returns gets into tensors, and these are not filled here."""
        return None

    def read(self, node: fx.Node, where: str | None, *, trained: bool = True) -> CallResult | None:
        """What a node of the graph computes from tensors that the step is given: nothing is read ahead here."""
        return None

    def may_ask(self, slot: CallResult) -> bool:
        """Whether the trace may depend on what is in a slot."""
        return True

    def is_constant(self, slot: CallResult) -> bool:
        """Whether a call returns the same in each step: nothing is known of that here."""
        return False

    def leave(self, slot: CallResult) -> bool:
        """Whether something that was read ahead went into a result. It is left to the step from now on."""
        return False

    def was_read(self, slot: CallResult) -> bool:
        """Whether something that was read ahead went into a result: nothing is read ahead here."""
        return False
