"""Private APIs of models whose parameters are sharded."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

__all__ = [
    "local_tensor",
    "local_tensors",
]


def local_tensor(tensor: Tensor) -> Tensor:
    """The part of a DTensor that this process holds; any other tensor itself (torch 2.11, 2.13)."""
    part: Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


_PLAIN = {Tensor, nn.Parameter}


def local_tensors(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """As `local_tensor`, of each. Hot path."""
    return tensors if _PLAIN.issuperset(map(type, tensors)) else [local_tensor(t) for t in tensors]
