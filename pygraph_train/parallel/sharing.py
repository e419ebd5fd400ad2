"""Finds out how a model is shared with other processes."""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from pygraph_train.parallel.replicas import Replicas
from pygraph_train.parallel.replication import Alone, Replication
from pygraph_train.parallel.shards import Shards
from pygraph_train.problems import Problem
from pygraph_train.torch_private.sharding import sharded_states, wrapped_by_fsdp1

__all__ = ["replication_of"]


class _Unsupported(Alone):
    """A model that no graph can hold, whose ranks need no agreement about that."""

    def __init__(self, name: str, problem: Problem) -> None:
        self.name, self.problem = name, problem


def replication_of(model: nn.Module, *, switches: bool = False) -> Replication:
    """How this model is shared with other processes.

    Args:
        switches: see `Shards`.
    """
    if isinstance(model, DistributedDataParallel):
        return Replicas(model)
    wrapper = next((m for m in model.modules() if isinstance(m, DistributedDataParallel)), None)
    if wrapper is not None:
        replicas = Replicas(wrapper)
        replicas.problem = Problem(
            "a part of the model, and not the whole model, is in DistributedDataParallel"
        )
        return replicas
    if wrapped_by_fsdp1(model):
        return _Unsupported(
            "FullyShardedDataParallel",
            Problem(
                "FullyShardedDataParallel (FSDP1) is not supported",
                fix="fully_shard of torch.distributed.fsdp (FSDP2) can be in a graph",
            ),
        )
    return Shards(model, switches=switches) if sharded_states(model) else Alone()
