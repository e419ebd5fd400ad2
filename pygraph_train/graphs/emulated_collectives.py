"""Collectives on the tape of the emulated engine: a capture sends nothing, a replay sends for real."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from pygraph_train.torch_private.dispatch import OpOverload, packet_name
from pygraph_train.torch_private.distributed import done, waited_for

__all__ = ["finished", "is_collective", "runs_in_replays", "stand_in"]

_FUNCTIONAL = "_c10d_functional"
_NAMESPACES = ("c10d", _FUNCTIONAL)


def is_collective(func: OpOverload) -> bool:
    """Whether an operator talks to other processes, or waits for one that does."""
    return func.namespace in _NAMESPACES


def _only_waits(func: OpOverload) -> bool:
    """Whether it waits for a functional collective: it gives back the tensor that it was given."""
    return func.namespace == _FUNCTIONAL and packet_name(func) == "wait_tensor"


def runs_in_replays(func: OpOverload) -> bool:
    """Whether a replay makes it, whatever its schema says of what it writes."""
    return func.namespace in ("c10d", "fsdp") or _only_waits(func)


def stand_in(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a collective returns in a capture, where nothing is sent. None for one that is not known."""
    name = packet_name(func)
    if func.namespace == _FUNCTIONAL:
        if name in ("wait_tensor", "_wrap_tensor_autograd"):
            return func(*args, **kwargs)
        return args[0].clone() if name == "all_reduce" else None
    if name in ("allreduce_", "broadcast_"):
        return args[0], done(args[0])
    if name == "_allgather_base_":
        args[0].view(-1, *args[1].shape).copy_(args[1].clone())
        return args[0], done([args[0]])
    if name == "_reduce_scatter_base_":
        args[0].copy_(args[1].view(-1, *args[0].shape)[0])
        return args[0], done([args[0]])
    return None


def finished(func: OpOverload, returned: Any) -> Any:
    """What a collective has returned in a replay, when it is done."""
    if func.namespace == "c10d":
        returned[-1].wait()
    elif func.namespace == _FUNCTIONAL and isinstance(returned, Tensor) and not _only_waits(func):
        return waited_for(returned)
    return returned
