"""How the processes of one training share its model.

No graph holds a collective, but for those of DTensors: see `votes`. DDP exchanges gradients by hooks of autograd, as in
plain training, and the buffers that it gives to other processes before a forward are inputs of that forward's graph.
"""

from __future__ import annotations

import sys
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from pygraph_train.patches import standing_in
from pygraph_train.problems import Problem
from pygraph_train.torch_private.memory import local_tensor
from pygraph_train.torch_private.phases import around_forward

DTENSORS = Problem("parameters are DTensors, so calls of the model have graphs, and no whole step has one")


class Replication:
    """One process, or several that share nothing.

    Attributes:
        shared: whether other processes train the same model.
        sharded: whether each of them has a part of it, so that a step has no graphs as a whole, and its update may
            have to talk to them.
        problem: why no step of this model has graphs as a whole, None where it may have some.
        gathers: whether parameters are gathered within calls of the model, which may have graphs nevertheless.
    """

    shared: bool = False
    sharded: bool = False
    problem: Problem | None = None
    gathers: bool = False

    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]:
        """Around forward and backward; `last`: an update follows, so gradients are exchanged."""
        return nullcontext()

    def around(self) -> AbstractContextManager[None]:
        """Around a call of the model's module, where a framework would call its wrapper."""
        return nullcontext()


class Replicas(Replication):
    """A model in DistributedDataParallel: each process has a copy of it, and gradients are averaged.

    Args:
        wrapper: of the model; where only a framework has that, the model, for `problem` alone.
    """

    shared = True

    def __init__(self, wrapper: nn.Module) -> None:
        self._wrapper: Any = wrapper
        if any(isinstance(module, nn.SyncBatchNorm) for module in wrapper.modules()):
            self.problem = Problem("SyncBatchNorm exchanges statistics in the middle of forward and backward")

    def micro_batch(self, *, last: bool) -> AbstractContextManager[None]:
        """See `Replication.micro_batch`. What `no_sync()` does where gradients are not exchanged."""
        exchanged = last and self._wrapper.require_backward_grad_sync
        return standing_in([(self._wrapper, "require_backward_grad_sync", exchanged)])

    def around(self) -> AbstractContextManager[None]:
        """See `Replication.around`."""
        return around_forward(self._wrapper)


class _Shards(Replication):
    """A model whose processes hold a part of each parameter."""

    shared = sharded = True

    def __init__(self, name: str, *, gathers: bool = False) -> None:
        self.gathers = gathers
        self.problem = Problem(
            f"{name} gives each process a part of each parameter, and no whole step has a graph",
            fix="Make a few steps: the report says whether calls of the model have graphs" if gathers else "",
        )


def replication_of(model: nn.Module) -> Replication:
    """How this model is shared with other processes."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    for module in model.modules() if fsdp is not None else ():
        if isinstance(module, fsdp.FullyShardedDataParallel):
            return _Shards("FullyShardedDataParallel")
        if isinstance(module, fsdp.FSDPModule):
            return _Shards("FSDP", gathers=not any(map(_is_split_twice, model.parameters())))
    if any(local_tensor(p) is not p for p in model.parameters()):
        found = _Shards("DTensor")
        found.problem = DTENSORS
        return found
    wrapper = next((m for m in model.modules() if isinstance(m, DistributedDataParallel)), None)
    if wrapper is not None:
        return Replicas(wrapper)
    alone = Replication()
    alone.shared = several_processes()  # torch's `replicate` listens to autograd, where nobody sees it
    return alone


def several_processes() -> bool:
    """Whether other processes may wait for this one."""
    return distributed.is_available() and distributed.is_initialized() and distributed.get_world_size() > 1


def is_sharded(module: nn.Module) -> bool:
    """Whether FSDP gathers parameters around calls of this module itself."""
    fsdp: Any = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, (fsdp.FSDPModule, fsdp.FullyShardedDataParallel))


def _is_split_twice(parameter: nn.Parameter) -> bool:
    """Whether it is a DTensor still when FSDP has gathered it, as with tensor parallelism inside of FSDP."""
    return sum(not placed.is_replicate() for placed in getattr(parameter, "placements", ())) > 1


def why_not_spread(over: str | None) -> Problem | None:
    """Why nothing of a training has graphs that a framework spreads over devices in a way of its own.

    Args:
        over: what it does so with, in its own words ("DDPStrategy", "FSDP"): that communicates in forward, backward or
            update. None where the model runs as the user made it.
    """
    return None if over is None else Problem(f"{over} is not supported yet: its steps run without graphs")
