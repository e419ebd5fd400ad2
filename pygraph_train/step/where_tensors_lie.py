"""Whether the tensors that a graph was captured with are where they were."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import Tensor

from pygraph_train.identity import identities
from pygraph_train.step.variants import Capture
from pygraph_train.torch_private.sharding import local_tensor

__all__ = ["moved", "same_memory"]


def same_memory(tensors: Sequence[Tensor], capture: Capture) -> bool:
    """Whether a graph works on these very tensors: parameters are the same objects, all are where they were."""
    parts = list(map(local_tensor, tensors)) if capture.sharded else tensors
    if capture.loaded is not None:
        if not capture.loaded.fit(tensors, capture.written):
            return False
        parts = capture.loaded.without(tensors)
    if list(map(Tensor.data_ptr, parts)) != capture.addresses:
        return False
    return identities(capture.pick_leaves(tensors)) == capture.leaf_identities


def moved(tensors: Sequence[Tensor], capture: Capture) -> Iterator[tuple[int, bool]]:
    """Which of the tensors that the step reads lie elsewhere now: each place, and whether it is another tensor."""
    places = range(len(tensors)) if capture.loaded is None else capture.loaded.others
    for k, address in zip(places, capture.addresses, strict=True):
        tensor, other = tensors[k], capture.ids[k] != id(tensors[k])
        if local_tensor(tensor).data_ptr() != address or (tensor.requires_grad and other):
            yield k, other
