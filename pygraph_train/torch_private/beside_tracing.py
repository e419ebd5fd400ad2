"""What Dynamo does beside each trace, and nobody reads who has not asked for its logs. (2.11, 2.13)"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

__all__ = ["left_out"]


@functools.cache
def left_out() -> tuple[tuple[Any, str, Any], ...]:
    """(owner, attribute, value): what Dynamo gets while it traces."""
    import torch._dynamo.guards as guards
    import torch._dynamo.symbolic_convert as symbolic_convert

    return (
        (guards, "profile_guard_manager", _no_time),
        (symbolic_convert, "get_funcname", _named_for_logs(vars(symbolic_convert)["get_funcname"])),
        *_quiet(),
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


def _quiet() -> tuple[tuple[Any, str, Any], ...]:
    """Dynamo without its advice on graph breaks, for loops that never asked for it: the report has that. (2.11, 2.13)

    What it warns of only once it has not warned of then, and does when the user's own code is compiled.
    """
    import torch._dynamo.utils as utils
    from torch._dynamo.variables.tensor import TensorVariable

    warn_once = utils.warn_once

    def warn(msg: str, stacklevel: int = 1) -> None:
        if not msg.startswith("Dynamo does not know how to trace"):
            warn_once(msg, stacklevel + 1)

    return (
        (utils, "warn_once", warn),
        (TensorVariable, "_warn_capture_scalar_outputs", staticmethod(lambda: None)),
    )
