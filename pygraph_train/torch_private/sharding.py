"""Private APIs of models whose parameters are sharded."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

__all__ = [
    "local_tensor",
    "local_tensors",
    "sharded_states",
    "wrapped_by_fsdp1",
]


def local_tensor(tensor: Tensor) -> Tensor:
    """The part of a DTensor that this process holds; any other tensor itself (torch 2.11, 2.13)."""
    part: Tensor = getattr(tensor, "_local_tensor", tensor)
    return part


_PLAIN = {Tensor, nn.Parameter}


def local_tensors(tensors: Sequence[Tensor]) -> Sequence[Tensor]:
    """As `local_tensor`, of each. Hot path."""
    return tensors if _PLAIN.issuperset(map(type, tensors)) else [local_tensor(t) for t in tensors]


def wrapped_by_fsdp1(model: nn.Module) -> bool:
    """Whether a part of a model is in FullyShardedDataParallel, the older one (torch 2.11, 2.13)."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and any(isinstance(m, fsdp.FullyShardedDataParallel) for m in model.modules())


def sharded_states(model: nn.Module) -> list[Any]:
    """The states of all modules that `fully_shard` was called with, each once (torch 2.11, 2.13)."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is None:
        return []
    modules = (m for m in model.modules() if isinstance(m, fsdp.FSDPModule))
    return list(dict.fromkeys(m._get_fsdp_state() for m in modules))
