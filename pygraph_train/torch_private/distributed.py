"""Private APIs of torch.distributed: results of collectives, and the reducer of DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

__all__ = [
    "around_forward",
    "waited_for",
]


def waited_for(tensor: Tensor) -> Tensor:
    """The result of a functional collective when it is there (torch 2.11, 2.13)."""
    result: Tensor = torch.ops._c10d_functional.wait_tensor(tensor)
    return result


@contextmanager
def around_forward(ddp: DistributedDataParallel) -> Iterator[None]:
    """What `ddp(...)` does before and after it calls its module, without inputs and outputs (torch 2.11, 2.13)."""
    ddp._pre_forward(None)
    yield
    ddp._post_forward(None)
