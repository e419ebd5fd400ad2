"""Private APIs of torch.distributed: its store, work that is done, and the reducer of DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

__all__ = [
    "begin_forward",
    "done",
    "end_forward",
    "waited_for",
]


def done(tensors: Sequence[Tensor]) -> Any:
    """What a collective returns whose work is complete (torch 2.11, 2.13)."""
    from torch._C import _distributed_c10d as c10d

    future: torch.futures.Future[list[Tensor]] = torch.futures.Future()
    future.set_result(list(tensors))
    return c10d._create_work_from_future(future).boxed()  # type: ignore[attr-defined]


def waited_for(tensor: Tensor) -> Tensor:
    """The result of a functional collective when it is there (torch 2.11, 2.13)."""
    result: Tensor = torch.ops._c10d_functional.wait_tensor(tensor)
    return result


def begin_forward(ddp: DistributedDataParallel) -> None:
    """What `ddp(...)` does before it calls its module, without the inputs (torch 2.11, 2.13)."""
    ddp._pre_forward(None)


def end_forward(ddp: DistributedDataParallel) -> None:
    """What `ddp(...)` does after it called its module, without the outputs (torch 2.11, 2.13)."""
    ddp._post_forward(None)
