"""Which numbers of Python a next trace should not be bound to."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from pygraph_train.tracing.reproducing import ReproducingTrace
from pygraph_train.tracing.trace import Trace

__all__ = ["changing_numbers"]


def changing_numbers(
    traces: Iterable[Trace], fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[set[str], set[str]]:
    """Expressions of numbers that a next trace should not be bound to, where no trace so far holds for a call.

    Integers such as the number of a batch that decides what is done in each tenth step, and numbers that tensors depend
    on.
    """
    refused: set[str] = set()
    changed: set[str] = set()
    decisive: set[str] = set()
    for trace in traces:
        if isinstance(trace, ReproducingTrace):
            found, of_tensors = trace.numbers(fn, args, kwargs)
            changed |= found
            decisive |= of_tensors
            refused |= trace.live.refused
    return changed - decisive, decisive - refused
