"""Private APIs of tensors and their storages: identity, holders, layout, parts."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch

from pygraph_train.torch_private.names import private

tensor_version: Callable[[torch.Tensor], int] = operator.attrgetter("_version")
"""Counter of the in-place changes of a tensor. (2.11 to 2.15)"""

keep_versions: Callable[[tuple[torch.Tensor, ...]], AbstractContextManager[None]] = private(
    "torch.autograd.grad_mode._unsafe_preserve_version_counter"
)
"""Inside, in-place changes of these tensors are not counted. (2.11 to 2.15)"""

storage_key: Callable[[torch.UntypedStorage], int] = operator.attrgetter("_cdata")
"""Identity of a storage while it is alive, also when its memory moves or is empty. (2.11, 2.13)"""

copy_all: Callable[..., None] = private("torch._foreach_copy_")
"""`copy_all(targets, sources)`: one call, and few kernels, for many tensors. (2.11, 2.13)"""


def is_alone(tensor: torch.Tensor) -> bool:
    """Whether only this tensor holds its memory: no view, and no array of NumPy's. (2.11, 2.13)"""
    keys = (storage_key(t.untyped_storage()) for t in (tensor, torch.empty(0, device="cpu")))
    return len(set(map(torch._C._storage_Use_Count, keys))) == 1


def borrower(tensor: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Makes tensors over the same memory that do not own it, also when this one is gone. (2.11, 2.13)"""
    storage, place = tensor.untyped_storage(), (tensor.storage_offset(), tensor.size(), tensor.stride())
    kind = {"dtype": tensor.dtype, "device": tensor.device}
    return functools.partial(_over, storage.data_ptr(), storage.nbytes(), place, kind)


def _over(address: int, nbytes: int, place: Any, kind: dict[str, Any]) -> torch.Tensor:
    storage = torch._C._construct_storage_from_data_pointer(address, kind["device"], nbytes)
    return torch.empty(0, **kind).set_(storage, *place)


def tensor_at(address: int, like: torch.Tensor, nbytes: int) -> torch.Tensor:
    """A tensor as `like` whose first element lies at `address`: it does not own these `nbytes`. (2.11, 2.13)"""
    place = 0, like.size(), like.stride()
    return _over(address, nbytes, place, {"dtype": like.dtype, "device": like.device})


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """The part of a DTensor that this process holds; any other tensor itself (torch 2.11, 2.13)."""
    return getattr(tensor, "_local_tensor", tensor)


def received(tensor: Any) -> Any:
    """The same tensor, once what other processes are still sending of it is there (2.11 to 2.15)."""
    part: Any = local_tensor(tensor)
    if part is tensor and hasattr(part, "wait"):
        return tensor.clone() if tensor.requires_grad else tensor.wait()
    if hasattr(part, "wait"):
        tensor._local_tensor = part.wait()
    return tensor


def as_part_of(whole: Any, part: torch.Tensor, placements: Any = None) -> torch.Tensor:
    """A DTensor like this one, of which this process holds that part; the part itself where it is none."""
    if local_tensor(whole) is whole:
        return part
    if placements in (None, whole.placements):
        (whole := whole.detach())._local_tensor = part
        return whole  # type: ignore[no-any-return]
    like = {"run_check": False, "shape": whole.shape, "stride": whole.stride()}
    return whole.from_local(part, whole.device_mesh, placements, **like)  # type: ignore[no-any-return]


_PLAIN = {torch.Tensor, torch.nn.Parameter}


def local_tensors(tensors: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    """As `local_tensor`, of each. Hot path."""
    return tensors if _PLAIN.issuperset(map(type, tensors)) else [local_tensor(t) for t in tensors]


def addresses_of(tensors: Sequence[torch.Tensor]) -> Callable[[], list[int]]:
    """What tells where these tensors lie: those of a sharded one, the part that this rank holds. Hot path."""
    plain = local_tensors(tensors) is tensors
    return lambda: list(map(torch.Tensor.data_ptr, tensors if plain else local_tensors(tensors)))
