"""Dynamo without what it prints for loops that never asked for it: the report has that. (2.11, 2.13)"""

from __future__ import annotations

import functools
import logging
from typing import Any

__all__ = ["mends"]


def mends() -> tuple[tuple[Any, str, Any], ...]:
    """(owner, attribute, value): changes while the library traces."""
    return (*_no_advice(), _no_pages())


_ADVICE = ("Dynamo does not know how to trace", "Dynamo detected a call to a `functools.lru_cache`")


@functools.cache
def _no_advice() -> tuple[tuple[Any, str, Any], ...]:
    """No advice on graph breaks and on caches.

    What Dynamo warns of only once it has not warned of then, and does when the user's own code is compiled.
    """
    import torch._dynamo.utils as utils
    from torch._dynamo.variables.tensor import TensorVariable

    warn_once = utils.warn_once

    def warn(msg: str, stacklevel: int = 1) -> None:
        if not msg.startswith(_ADVICE):
            warn_once(msg, stacklevel + 1)

    return (
        (utils, "warn_once", warn),
        (TensorVariable, "_warn_capture_scalar_outputs", staticmethod(lambda: None)),
    )


def _no_pages() -> tuple[Any, str, Any]:
    """No page for an operation that fails: the step raises what it raises in a plain loop.

    Who asks for what fake tensors log gets all of it.
    """
    log = logging.getLogger("torch._subclasses.fake_tensor")
    return log, "disabled", log.disabled or not log.isEnabledFor(logging.DEBUG)
