"""Guards that Dynamo lacks, and which pygraph-train adds while the library traces. (2.11, 2.13)"""

from __future__ import annotations

import functools
from typing import Any

from pygraph_train.torch_private import absent_names, attribute_dicts, cached_calls, ordered_dicts

__all__ = ["mends"]


@functools.cache
def mends(*, regions: bool) -> tuple[tuple[Any, str, Any], ...]:
    """(owner, attribute, value): changes of Dynamo while the library traces.

    Args:
        regions: whether what is traced may be a part of a step.
    """
    return (
        *absent_names.mends(),
        *attribute_dicts.mends(),
        *cached_calls.mends(regions=regions),
        *ordered_dicts.mends(),
    )
