"""Private APIs of torch.distributed: results of collectives, and the reducer of DistributedDataParallel."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

__all__ = [
    "begin_forward",
    "end_forward",
    "waited_for",
]


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
