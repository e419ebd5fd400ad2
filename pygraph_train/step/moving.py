"""Tensors that the loop gives other memory, or replaces, between steps.

An EMA teacher is assigned with `q.data = ...`, weights are clipped there, a temperature is a new tensor now and then. A
graph reads fixed addresses, so such a tensor has a home, and there are two ways to it:

- A tensor that is still the same object is brought home: the new values are copied into the memory that it had, and it
  lies there again (`rebinding.Anchors.bring_back`). Nobody else may hold the old memory or the new one.
- A tensor that the step only reads is loaded like a batch: its home is a buffer of the graph, and each replay copies
  the present values into it. The tensor itself stays where it is.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from pygraph_train.graphs.memory import Storages, bits, copy_elsewhere
from pygraph_train.problems import NotLegal, Problem
from pygraph_train.step.rebinding import Anchors
from pygraph_train.torch_private.memory import copy_all, storage_key, tensor_version
from pygraph_train.tracing.refusals import problem_of
from pygraph_train.tracing.signature import alignment

__all__ = ["MEMORY_IN_USE", "CannotBeLoaded", "LoadedTensors", "homes", "may_be_loaded", "moves"]

MEMORY_IN_USE = Problem(
    "memory of a tensor that is assigned (`.data = ...`) is in use elsewhere again and again",
    fix="Assign a copy of the value (.clone()), and keep no views of the tensor",
)
_RETURNED = Problem(
    "a result of the step shares memory with a tensor that the loop replaces between steps",
    fix="Return a copy of it (.clone())",
)
_WRITTEN = Problem(
    "the step writes into a tensor that the loop replaces between steps",
    fix="Write into the tensor (`copy_`) in place of replacing it",
)


def moves(name: str) -> Problem:
    """A tensor moves, and no copy can stand for it."""
    return Problem(
        f"{name} lives at a new address again and again",
        fix=f"Write new values into {name} (`copy_`) in place of replacing it, and keep no views of it",
    )


def may_be_loaded(tensor: Tensor) -> bool:
    """Whether a copy can stand for a tensor that a step reads: nobody asks for its gradient, and it is plain memory."""
    plain = type(tensor) in (Tensor, nn.Parameter) and not tensor.is_inference()
    return plain and not tensor.requires_grad and tensor.grad_fn is None


def homes(
    moving: Mapping[int, bool], reads: Sequence[Tensor], anchors: Anchors, *, blind: bool
) -> tuple[list[Tensor], LoadedTensors | None]:
    """What the loop gives other memory: tensors to be brought home, and homes of those to be loaded.

    A tensor that can be neither is captured where it lies.

    Args:
        moving: places in `reads`; True where it is another tensor from time to time.
        reads: all that the step reads.
        anchors: bring tensors home.
        blind: whether no run shows what the step writes.
    Raises:
        NotLegal: there is no memory for the homes.
    """
    if not moving:
        return [], None
    kept: list[Tensor] = []
    places: list[int] = []
    rest = Storages(t for k, t in enumerate(reads) if k not in moving and not t.requires_grad)
    for k, other in moving.items():
        tensor = reads[k]
        if not other and anchors.may_keep(tensor):
            kept.append(tensor)
        elif not blind and may_be_loaded(tensor) and not rest.hold(tensor):
            places.append(k)
    try:
        return kept, LoadedTensors(places, reads) if places else None
    except Exception as error:
        raise NotLegal(problem_of(error)) from error


class CannotBeLoaded(NotLegal):
    """A copy cannot stand for a tensor that the loop replaces. It is captured where it lies."""


class LoadedTensors:
    """Homes of tensors that one capture reads, and that are other ones from step to step.

    Args:
        places: where the tensors are among all that the step reads.
        reads: all that the step reads, as they are now. The homes begin with their values.

    Attributes:
        places, others: of what is loaded, and of what is not.
    """

    def __init__(self, places: Iterable[int], reads: Sequence[Tensor]) -> None:
        self.places = sorted(places)
        self._homes = [copy_elsewhere(reads[k]) for k in self.places]
        self._odd = list(map(alignment, self._homes))
        left_out = set(self.places)
        self.others = [k for k in range(len(reads)) if k not in left_out]

    def without(self, reads: Sequence[Tensor]) -> list[Tensor]:
        """What the step reads where it lies."""
        return [reads[k] for k in self.others]

    def fit(self, reads: Sequence[Tensor], written: Storages | None) -> bool:
        """Whether the present tensors can be loaded. Hot path, where there are any.

        Args:
            written: memory that the step may write before it reads these.
        """
        found = [reads[k] for k in self.places]
        if list(map(alignment, found)) != self._odd:  # kernels are chosen by that
            return False
        return written is None or not any(map(written.hold, found))

    def load(self, reads: Sequence[Tensor]) -> None:
        """Copy the present values home, in the caller's stream."""
        copy_all(self._homes, [reads[k].detach() for k in self.places], non_blocking=True)

    @contextmanager
    def at_home(self, reads: Sequence[Tensor]) -> Iterator[None]:
        """Inside, where a capture is made, the tensors lie in their homes."""
        found = [reads[k] for k in self.places]
        away = [t.detach() for t in found]
        try:
            for tensor, home in zip(found, self._homes, strict=True):
                tensor.data = home
            yield
        finally:
            for tensor, memory in zip(found, away, strict=True):
                tensor.data = memory

    @contextmanager
    def only_read(self, reads: Sequence[Tensor]) -> Iterator[None]:
        """Around a run of the step with the tensors at home.

        Some operations write without being counted (the running statistics of BatchNorm), so values are compared as
        well as the counters of in-place changes.

        Raises:
            CannotBeLoaded: the step has written into one of the tensors.
        """
        before = [bits(home).clone() for home in self._homes]
        versions = [tensor_version(reads[k]) for k in self.places]
        yield
        same = all(map(torch.equal, before, map(bits, self._homes)))
        if not same or [tensor_version(reads[k]) for k in self.places] != versions:
            raise CannotBeLoaded(_WRITTEN)

    def check_results(self, results: Iterable[Tensor]) -> None:
        """Nothing that leaves the step may lie in a home.

        Raises:
            CannotBeLoaded: something does.
        """
        homes = {storage_key(home.untyped_storage()) for home in self._homes}
        if any(storage_key(t.untyped_storage()) in homes for t in results):
            raise CannotBeLoaded(_RETURNED)
