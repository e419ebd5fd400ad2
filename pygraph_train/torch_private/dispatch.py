"""Private APIs of the dispatcher: operators, keys, fake tensors."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, Any

import torch

from pygraph_train.torch_private.names import private

if TYPE_CHECKING:
    from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
else:
    TorchDispatchMode = private("torch.utils._python_dispatch.TorchDispatchMode")


@contextmanager
def below_autograd() -> Iterator[None]:
    """Call operators as a dispatch mode sees them: no autograd, autocast or function modes (torch 2.13)."""
    with no_torch_function(), torch._C._AutoDispatchBelowAutograd(), torch.autocast("cpu", enabled=False):
        yield


def has_no_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor is one of the zeros of forward-mode differentiation, or the shape of one (torch 2.11, 2.13)."""
    return tensor.is_meta or tensor._is_zerotensor()


FakeTensor: Any = private("torch._subclasses.fake_tensor.FakeTensor")
"""The class of tensors that have a shape and no values. (2.11 to 2.15)"""


def computes_shapes() -> bool:
    """Whether operations give FakeTensors now, as where a DTensor looks for the shape of a result (2.11 to 2.15)."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


no_torch_function: Callable[[], AbstractContextManager[None]] = private("torch._C.DisableTorchFunction")
"""Context: calls are not shown to `TorchFunctionMode`s and `__torch_function__`. (2.13)"""


def unsent(result: Any) -> tuple[Any, Any]:
    """What a collective that writes in place returns, where nothing was sent. (2.11 to 2.15)"""
    return result, torch._C._distributed_c10d.Work.boxed(torch._C._distributed_c10d.FakeWork())


def wait_for(returned: tuple[Any, Any]) -> None:
    """Wait until such a collective is done. (2.11 to 2.15)"""
    torch._C._distributed_c10d.Work.unbox(returned[1]).wait()


schema_of: Callable[[Any], Any] = operator.attrgetter("_schema")
"""What an operator takes and gives, and what of it is written in place. (2.11 to 2.15)"""
