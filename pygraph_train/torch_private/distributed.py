"""Private APIs of torch.distributed: the reducer of DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.nn.parallel import DistributedDataParallel


@contextmanager
def around_forward(ddp: DistributedDataParallel) -> Iterator[None]:
    """What `ddp(...)` does before and after it calls its module, without inputs and outputs (torch 2.11, 2.13)."""
    ddp._pre_forward(None)
    yield
    ddp._post_forward(None)
