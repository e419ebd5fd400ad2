"""Runs of a step's function that make no step: Python stays as it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from pygraph_train.tracing.reproducing import ReproducingTrace

__all__ = ["SilentCall"]


@dataclass(frozen=True)
class SilentCall:
    """How a function is run that writes to Python or reads numbers, in a run that makes no step.

    Attributes:
        trace: of the function.
        carried, keep, reads: see `ReproducingTrace.silently`.
    """

    trace: ReproducingTrace
    carried: Sequence[Tensor] = ()
    keep: bool = False
    reads: bool = False

    def __call__(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run it."""
        return self.trace.silently(fn, args, kwargs, self.carried, keep=self.keep, reads=self.reads)
