"""What Dynamo does beside each trace, and nobody reads who has not asked for its logs. (2.11, 2.13)"""

from __future__ import annotations

import functools
import gc
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

__all__ = ["left_out", "old_objects_wait", "read_once"]

_YOUNG = 20_000
"""Objects that are made before the garbage collector looks at new ones, while Dynamo traces."""


@contextmanager
def old_objects_wait() -> Iterator[None]:
    """Around a trace: the garbage collector looks at new objects only, and at many together.

    A trace makes so many objects that last that the collector looks at all that the process has more than once: half a
    million, most of them of what libraries have imported. No step of the training is made meanwhile.
    """
    first, second, third = gc.get_threshold()
    if first:  # 0: it looks at nothing by itself
        gc.set_threshold(max(first, _YOUNG), second, 1 << 30)
    try:
        yield
    finally:
        if first:
            gc.set_threshold(first, second, third)


@contextmanager
def read_once() -> Iterator[None]:
    """Around a trace: Dynamo finds at once whether it is to be verbose, which it asks for each instruction.

    torch looks each setting up with a function of Python.
    """
    import torch._dynamo.config as config

    found = vars(config)
    found["verbose"] = config.verbose
    try:
        yield
    finally:
        found.pop("verbose", None)


@functools.cache
def left_out() -> tuple[tuple[Any, str, Any], ...]:
    """(owner, attribute, value): what Dynamo gets while it traces."""
    import torch._dynamo.guards as guards
    import torch._dynamo.symbolic_convert as symbolic_convert

    return (
        (guards, "profile_guard_manager", _no_time),
        (symbolic_convert, "get_funcname", _named_for_logs(vars(symbolic_convert)["get_funcname"])),
    )


def _no_time(*arguments: Any) -> float:
    """The microseconds that guards take, for a log: it empties the caches of the processor, and checks them once."""
    return 0.0


def _named_for_logs(name_of: Callable[[str, int], str | None]) -> Callable[[str, int], str | None]:
    """The name of the function around a line, which Dynamo finds by reading the whole file.

    It asks for it at each operation, for two logs that are off.
    """
    import torch._dynamo.symbolic_convert as symbolic_convert

    logs = symbolic_convert.trace_call_log, symbolic_convert.trace_source_log

    def named(filename: str, line: int) -> str | None:
        on = any(log.isEnabledFor(logging.DEBUG) for log in logs)
        return name_of(filename, line) if on else None

    return named
