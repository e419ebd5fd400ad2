"""What a step returns to its caller."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from pygraph_train.trees import map_leaves

__all__ = ["detached_results"]


def detached_results(result: Any) -> Any:
    """What a step has returned, with its tensors detached."""
    if type(result) is Tensor:
        return result.detach()
    try:
        return map_leaves(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, result)
    except TypeError:  # a container that only its author can rebuild
        return result
