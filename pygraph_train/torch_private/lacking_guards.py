"""Guards that Dynamo lacks, and which pygraph-train adds while the library traces. (2.11, 2.13)"""

from __future__ import annotations

import functools
from typing import Any

from pygraph_train.torch_private import absent_names, attribute_dicts, cached_calls

__all__ = ["mends"]


@functools.cache
def mends() -> tuple[tuple[Any, str, Any], ...]:
    """(owner, attribute, value): changes of Dynamo while the library traces."""
    return (*absent_names.mends(), *attribute_dicts.mends(), *cached_calls.mends())
