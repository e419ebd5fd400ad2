"""Private APIs of the dispatcher: operators, keys, fake tensors."""

from __future__ import annotations

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
    autocast_off = torch.autocast("cpu", enabled=False)
    with no_torch_function(), torch._C._AutoDispatchBelowAutograd(), autocast_off:
        yield


def has_no_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor is one of the zeros of forward-mode differentiation, or the shape of one (torch 2.11, 2.13)."""
    return tensor.is_meta or tensor._is_zerotensor()


FakeTensor: Any = private("torch._subclasses.fake_tensor.FakeTensor")
"""The class of tensors that have a shape and no values. (2.11 to 2.15)"""


class NoCollectives(TorchDispatchMode):
    """Inside, an operation in which other processes take part raises before they notice (torch 2.11 to 2.15)."""

    def __torch_dispatch__(self, operation: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        wraps = any(t.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__ for t in types)
        if wraps and FakeTensor not in types:
            return NotImplemented  # its operations on plain tensors come back here
        if "c10d" in operation.namespace:
            raise RuntimeError("other processes take part in an operation of it")
        return operation(*args, **(kwargs or {}))


def computes_shapes() -> bool:
    """Whether operations give FakeTensors now, as where a DTensor looks for the shape of a result (2.11 to 2.15)."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None


OpOverload: Any = private("torch._ops.OpOverload")
"""The class of ordinary operators, as dispatch modes get them beside higher-order ones. (2.11 to 2.15)"""

no_torch_function: Callable[[], AbstractContextManager[None]] = private("torch._C.DisableTorchFunction")
"""Context: calls are not shown to `TorchFunctionMode`s and `__torch_function__`. (2.13)"""


def written_arguments(func: torch._ops.OpOverload, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """What a call of an operator writes in place (torch 2.11 to 2.15)."""
    declared = func._schema.arguments
    places = [i for i, a in enumerate(declared) if a.alias_info is not None and a.alias_info.is_write]
    return [args[i] if i < len(args) else kwargs[declared[i].name] for i in places]


def returns_argument(func: torch._ops.OpOverload) -> bool:
    """Whether an operator returns what it has written, or a view (torch 2.11 to 2.15)."""
    return any(r.alias_info is not None for r in func._schema.returns)


def writes_arguments(func: torch._ops.OpOverload) -> bool:
    """Whether an operator's schema declares that it mutates an argument (torch 2.13)."""
    return func._schema.is_mutable
