"""Private APIs of torch.distributed: results of collectives, and the reducer of DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from pygraph_train.torch_private.names import private

__all__ = [
    "around_forward",
    "waited_for",
]


waited_for: Callable[[Tensor], Tensor] = private("torch.ops._c10d_functional.wait_tensor")
"""The result of a functional collective when it is there. (2.11, 2.13)"""


@contextmanager
def around_forward(ddp: DistributedDataParallel) -> Iterator[None]:
    """What `ddp(...)` does before and after it calls its module, without inputs and outputs (torch 2.11, 2.13)."""
    ddp._pre_forward(None)
    yield
    ddp._post_forward(None)
