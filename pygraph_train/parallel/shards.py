"""A model under `fully_shard` (FSDP2): each process holds a part of every parameter, and gathers them as it goes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, distributed, nn

from pygraph_train.parallel.replication import Alone, exchanged
from pygraph_train.parallel.settings import problem_of_settings
from pygraph_train.problems import Problem
from pygraph_train.torch_private.sharding import (
    at_rest,
    flags,
    forget_iteration,
    has_started,
    is_last_backward,
    mesh_of,
    obstacles_of,
    opened,
    owners_of_unreduced,
    sharded_by_gathered,
    sharded_groups,
    sharded_states,
    without_outside_events,
)

__all__ = ["Shards"]


class Shards(Alone):
    """A model whose parts were given to `fully_shard`.

    Its hooks gather parameters and reduce gradients. They run in Python in every plain step and in a capture, which
    holds their collectives. Dynamo cannot trace them: it sees the modules with stand-ins (`opened`).

    Args:
        model: of which some modules are `FSDPModule`.
        switches: whether `micro_batch` says which micro-batches exchange gradients. Otherwise the user has said so
            himself, by `set_requires_gradient_sync`.
    """

    name = "FSDP"
    sharded = True

    def __init__(self, model: nn.Module, *, switches: bool = False) -> None:
        self._model = model
        self._states = sharded_states(model)
        self._groups = sharded_groups(self._states)
        self._switches = switches
        self._pending: bool | None = None
        meshes = [mesh_of(group) for group in self._groups]
        self.group = next((shard for shard, _, _ in meshes if shard is not None), distributed.group.WORLD)
        self.problem = _problem(self._groups, meshes, self.group)
        self._roots = _roots(model)

    def opened(self) -> AbstractContextManager[frozenset[Any]]:
        """See `Replication.opened`."""
        return opened(self._states)

    @contextmanager
    def micro_batch(self, *, sync: bool) -> Iterator[None]:
        """See `Replication.micro_batch`."""
        if self._switches and not sync:
            self._switch(sync=False)
        try:
            yield
        finally:
            if self._switches and not sync:
                self._switch(sync=True)
            self._pending = None

    def _switch(self, *, sync: bool) -> None:
        for root in self._roots:
            root.set_requires_gradient_sync(sync)

    def exchanges(self, *, update: bool) -> bool:
        """See `Replication.exchanges`: as the user has said, with an update or without."""
        return all(group.reduce_grads for group in self._groups)

    def traceable(self) -> bool:
        """See `Replication.traceable`.

        Parameters are whole after `unshard()`, and some after an evaluation: a step that begins so gathers others.
        """
        return has_started(self._groups) and at_rest(self._groups)

    def why_not_traceable(self) -> Problem:
        """See `Replication.why_not_traceable`."""
        return Problem(
            "parameters are whole when a step begins, and a graph would not gather them",
            fix="Leave out set_reshard_after_backward(False) and unshard() before each step",
        )

    def ready(self) -> bool:
        """See `Replication.ready`."""
        return at_rest(self._groups) and is_last_backward(self._states)

    def resting(self, parameters: list[Tensor]) -> list[Tensor]:
        """See `Replication.resting`: sharded ones."""
        sharded = sharded_by_gathered(self._groups)
        return [sharded.get(id(p), p) for p in parameters]

    def leaves(self, *, sync: bool) -> list[Any]:
        """See `Replication.leaves`: where gradients are not exchanged, the whole parameters have them."""
        return owners_of_unreduced(self._groups) if self._waiting() or not sync else []

    def _waiting(self) -> bool:
        """Whether gradients of micro-batches before wait to be exchanged."""
        if self._pending is None:
            owners = owners_of_unreduced(self._groups) if has_started(self._groups) else ()
            self._pending = any(owner.grad is not None for owner in owners)
        return self._pending

    def constants(self) -> tuple[Any, ...]:
        """See `Replication.constants`: whether gradients wait, and what the loop has switched."""
        return self._waiting(), *map(flags, self._groups)

    def replayed(self, *, sync: bool) -> None:
        """See `Replication.replayed`."""
        self._pending = not sync

    @torch.no_grad()
    def reduced(self, value: Tensor, *, mean: bool) -> Tensor:
        """See `Replication.reduced`. All ranks make each forward together."""
        return exchanged(value, self.group, mean=mean)

    def notes(self) -> Callable[[], None]:
        """See `Replication.notes`: whether gradients wait is found out anew."""

        def put_back() -> None:
            self._pending = None

        return put_back

    def units(self) -> list[nn.Module]:
        """See `Replication.units`: those that `fully_shard` was called with, and that hold no others."""
        found = _sharded_modules(self._model)
        return [m for m in found if len(_sharded_modules(m)) == 1]

    @contextmanager
    def capturing(self) -> Iterator[None]:
        """See `Replication.capturing`. A backward that fails leaves gradients with the whole parameters."""
        owners = owners_of_unreduced(self._groups)
        before = [owner.grad for owner in owners]
        try:
            with without_outside_events(self._states):
                yield
        except BaseException:
            for owner, gradient in zip(owners, before, strict=True):
                owner.grad = gradient
            raise
        finally:
            forget_iteration(self._states)


def _roots(model: nn.Module) -> list[Any]:
    """The outermost modules that were given to `fully_shard`."""
    found = _sharded_modules(model)
    inner = {below for m in found for below in _sharded_modules(m) if below is not m}
    return [m for m in found if m not in inner]


def _sharded_modules(model: nn.Module) -> list[nn.Module]:
    """The modules that were given to `fully_shard`, the model itself included."""
    from torch.distributed.fsdp import FSDPModule

    return [m for m in model.modules() if isinstance(m, FSDPModule)]


def _problem(groups: list[Any], meshes: list[tuple[Any, bool, bool]], group: Any) -> Problem | None:
    """Why no graph can hold what the hooks do."""
    if (problem := problem_of_settings(group)) is not None:
        return problem
    for shard, replicated, spread in meshes:
        if spread:
            return Problem(
                "fully_shard after tensor parallelism (a mesh of several dimensions) is not supported yet"
            )
        if shard is None or replicated:
            return Problem("fully_shard with replicas (a mesh of two dimensions, HSDP) is not supported yet")
        if shard is not group:
            return Problem("fully_shard with several meshes is not supported yet")
    for one in groups:
        if found := obstacles_of(one):
            return Problem(f"fully_shard with {' and '.join(found)} acts in Python, or on the CPU")
    return None
