"""Private APIs of tensors and their storages: identity, holders, layout."""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from pygraph_train.torch_private.names import private

__all__ = [
    "borrow_memory",
    "borrower",
    "cached_tensors",
    "copy_all",
    "is_alone",
    "keep_cached_tensors",
    "keep_versions",
    "no_view",
    "reinterpret_tensor",
    "storage_key",
    "storage_use_count",
    "storages",
    "tensor_looks",
    "tensor_use_count",
    "tensor_version",
    "uncached_tensors",
]


def tensor_version(tensor: torch.Tensor) -> int:
    """Counter of the in-place changes of a tensor (torch 2.11, 2.13)."""
    return int(tensor._version)


def keep_versions(tensors: Sequence[torch.Tensor]) -> AbstractContextManager[None]:
    """Inside, in-place changes of these tensors are not counted. (2.11, 2.13)"""
    from torch.autograd.grad_mode import _unsafe_preserve_version_counter

    return _unsafe_preserve_version_counter(tuple(tensors))


storage_key: Callable[[torch.UntypedStorage], int] = operator.attrgetter("_cdata")
"""Identity of a storage while it is alive, also when its memory moves or is empty. (2.11, 2.13)"""

copy_all: Callable[..., None] = private("torch._foreach_copy_")
"""`copy_all(targets, sources)`: one call, and few kernels, for many tensors. (2.11, 2.13)"""


def tensor_looks(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """What tensors look like: type, dtype, device, shape, strides, requires_grad. (2.11, 2.13)

    Args:
        tensors: of any kind that has a shape.

    Returns:
        Whether as many other tensors, given as arguments, look the same. It is one call in C.
    """
    from torch._C._dynamo.guards import TensorGuards

    if not tensors:
        return lambda: True
    sizes: list[Any] = [list(t.shape) for t in tensors]
    strides: list[Any] = [
        list(t.stride()) if t.layout is torch.strided else [None] * t.dim() for t in tensors
    ]
    guards = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    return guards.check


storage_use_count: Callable[[int], int] = private("torch._C._storage_Use_Count")
"""References to the storage whose `_cdata` is given. (2.11, 2.13)"""


def is_alone(tensor: torch.Tensor) -> bool:
    """Whether only this tensor holds its memory: no view, and no array of NumPy's. (2.11, 2.13)"""
    return _holders(tensor) == _holders(torch.empty(0))


def _holders(tensor: torch.Tensor) -> int:
    return storage_use_count(storage_key(tensor.untyped_storage()))


def borrow_memory(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor over the same memory that does not own it. (2.11, 2.13)"""
    return borrower(tensor)()


def borrower(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Makes tensors over the same memory that do not own it, also when this one is gone. (2.11, 2.13)"""
    storage, device, dtype = tensor.untyped_storage(), tensor.device, tensor.dtype
    address, nbytes = storage.data_ptr(), storage.nbytes()
    place = tensor.storage_offset(), tensor.size(), tensor.stride()

    def borrow() -> torch.Tensor:
        borrowed = torch._C._construct_storage_from_data_pointer(address, device, nbytes)
        return torch.empty(0, dtype=dtype, device=device).set_(borrowed, *place)

    return borrow


def storages(values: Sequence[Any]) -> list[Hashable]:
    """What tells whether tensors share memory. It keeps none alive, but its place is not taken. (2.11, 2.13)"""
    from torch.multiprocessing.reductions import StorageWeakRef

    strided = [x for x in values if isinstance(x, torch.Tensor) and x.layout == torch.strided]
    return [StorageWeakRef(x.untyped_storage()) for x in strided]


def reinterpret_tensor(
    tensor: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int
) -> torch.Tensor:
    """A tensor over the same storage that autograd does not take for a view; `offset` counts from the
    tensor's own first element. (2.11, 2.13)"""
    reinterpret = torch._C._dynamo.guards._reinterpret_tensor  # type: ignore[attr-defined]
    return reinterpret(tensor, tuple(size), tuple(stride), offset)


def no_view(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, as a tensor that autograd takes for no view. (2.11, 2.13)"""
    return torch.ops.aten._unsafe_view(tensor, tensor.size())  # type: ignore[no-any-return]


def cached_tensors(tensors: Sequence[torch.Tensor]) -> None:
    """Let autograd ignore one reference to each of these, its holder's, when it asks whether a gradient
    is nobody else's. (2.11, 2.13)"""
    keep_cached_tensors()
    for tensor in tensors:
        torch._C._add_cached_tensor(tensor)


def keep_cached_tensors() -> None:
    """Switch the mechanism of `cached_tensors` on again: a reset of torch's CUDA graph trees, also one of
    dead objects at any time, switches it off for all. (2.11, 2.13)"""
    torch._C._set_cached_tensors_enabled(True)


def uncached_tensors(tensors: Sequence[torch.Tensor]) -> None:
    """Undo `cached_tensors`, also where torch has switched the mechanism off since. (2.11, 2.13)"""
    keep_cached_tensors()
    for tensor in tensors:
        torch._C._remove_cached_tensor(tensor)


tensor_use_count: Callable[[torch.Tensor], int] = private("torch.Tensor._use_count")
"""References to the tensor from C++, its Python object being one. (2.11, 2.13)"""
