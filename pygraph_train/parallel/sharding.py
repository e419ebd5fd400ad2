"""Models of `fully_shard` as one graph sees them: what gathers parameters and reduces gradients is part of the graph.

Dynamo traces no hook of FSDP. Around each call that it may trace, others stand in their place: it makes an operation of
each, which runs the hook of FSDP. Parameters are there as a whole, but for their memory, which the hook gives them.
"""

from __future__ import annotations

import functools
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule

from pygraph_train.patches import held_weakly
from pygraph_train.problems import Problem
from pygraph_train.torch_private.dispatch import FakeTensor
from pygraph_train.torch_private.memory import copy_all, storage_key
from pygraph_train.torch_private.sharding import (
    Unit,
    is_idle,
    keep_gradient,
    kept_gradient,
    settings_of,
    states_in,
    tree_flatten,
    tree_unflatten,
    whole,
)

NOT_WHOLE = Problem(
    "FSDP's model runs without a graph: Dynamo traces only parts of it, parameters stay gathered after a backward, "
    "gradients are reduced in part or of unused parameters too, or Inductor's kernels were asked for"
)
GATHERED = Problem(
    "a call of FSDP's model runs without a graph: its parameters are gathered already, as an evaluation leaves them",
    fix="Call model.reshard() behind each evaluation",
)


class Sharding:
    """How a model of `fully_shard` runs as one graph.

    Args:
        model: it was called before.
        plain: called once in each call that runs without a graph, before other processes take part.

    Attributes:
        told: whether others know what this process does in the present call.
        replayed: whether the latest forward was replayed.

    Raises:
        ValueError: see `Unit`.
    """

    def __init__(self, model: nn.Module, plain: Callable[[], object]) -> None:
        self._plain, self.told = plain, False
        self.replayed = False
        self._hidden: list[Tensor | None] = []
        for operation in (_gathered, _left):
            torch.compiler.allow_in_graph(operation)
        self._units: dict[str, Unit] = {}
        for state in states_in(model):
            name = next(_names)
            hooks = functools.partial(_hook_before, name), functools.partial(_hook_after, name)
            self._units[name] = _units[name] = Unit(state, *hooks)
            _plain[name] = held_weakly(self.runs_plainly)
            weakref.finalize(self, _plain.pop, name).atexit = False
        self._groups = [group for unit in self._units.values() for group in unit.groups]
        self._parameters = [p for unit in self._units.values() for p in unit.parameters]

    @contextmanager
    def standing_in(self) -> Iterator[None]:
        """Around calls of the model that Dynamo may trace."""
        self.told = self.replayed = False
        self.unwatch()
        try:
            kept = self.kept
            if any(g is not None for g in kept):
                self._hidden, self.kept = kept, [None] * len(kept)
            for unit in self._units.values():
                unit.stand_in()
            yield
        finally:
            self.show()
            for unit in self._units.values():
                unit.step_back()
                if self.replayed:
                    unit.watch()

    def unwatch(self) -> None:
        """Nothing is noticed of reads any more: a backward ends, or a forward begins. Hot path."""
        for unit in self._units.values():
            unit.unwatch()

    def runs_plainly(self, *, anew: bool = False) -> None:
        """The present call runs without a graph; `anew`: it begins. Hot path."""
        self.show()
        if anew or not self.told:
            self.told = True
            self._plain()

    @property
    def idle(self) -> bool:
        """Whether nothing is gathered: an evaluation may leave parameters so. Hot path."""
        return all(map(is_idle, self._groups))

    @property
    def usual(self) -> bool:
        """Whether a backward frees what it gathers, and reduces gradients wholly, of used ones alone. Hot path."""
        return not any(
            g.reduce_grads > g.all_reduce_grads
            or getattr(g, "reduce_scatter_unused_params", False)  # from torch 2.13 on
            or not g.reshard_after_backward
            for g in self._groups
        )

    @property
    def reduces(self) -> tuple[Any, ...]:
        """Whether gradients wait for a later backward, which parameters get some, and how each group reduces them.

        Hot path.
        """
        waits = any(gradient is not None for gradient in self.kept)
        wanted = bytes([p.sharded_param.requires_grad for p in self._parameters])
        return waits, wanted, *map(settings_of, self._groups)

    @property
    def kept(self) -> list[Tensor | None]:
        """The gradients that wait for a later backward, which reduces them. Hot path."""
        return list(map(kept_gradient, self._parameters))

    @kept.setter
    def kept(self, gradients: Sequence[Tensor | None]) -> None:
        for p, gradient in zip(self._parameters, gradients, strict=True):
            keep_gradient(p, gradient)

    def show(self) -> None:
        """Put the gradients that wait where they were: torch 2.15 traces no parameter with one of another dtype."""
        if self._hidden:
            self.kept, self._hidden = self._hidden, []

    def keep_at(self, places: Sequence[Tensor | None]) -> list[Tensor | None]:
        """Move the gradients that wait to these places, and return them, None where there is none. Hot path."""
        pairs = list(zip(places, self.kept, strict=True))
        if moved := [(place, g) for place, g in pairs if g is not None and g is not place]:
            copy_all(*zip(*moved, strict=True))
        self.kept = there = [None if g is None else place for place, g in pairs]
        return there

    def complete(self, gm: GraphModule) -> bool:
        """Whether a graph has both operations of all units."""
        parts = [m for m in gm.modules() if isinstance(m, GraphModule)]
        calls = [(n.target, n.args[0]) for m in parts for n in m.graph.nodes if n.op == "call_function"]
        ends = [{name for target, name in calls if target is end} for end in (_gathered, _left)]
        return ends[0] == ends[1] == set(self._units)

    @property
    def own(self) -> set[int]:
        """The ids of the parts of parameters that this process holds."""
        return {id(p.sharded_param) for p in self._parameters}

    def sharded(self, given: Sequence[Any]) -> list[Any]:
        """The inputs of a graph, the parts of parameters that this process holds in the place of those. Hot path."""
        self.show()
        known = {id(whole(p)): p.sharded_param for p in self._parameters}
        return [known.get(id(t), t) for t in given]

    def gathered(self, given: Sequence[Any]) -> list[Any]:
        """The opposite of `sharded`."""
        known = {id(p.sharded_param): whole(p) for p in self._parameters}
        return [known.get(id(t), t) for t in given]

    def storages(self) -> set[int]:
        """Those of gathered parameters, which hooks fill again."""
        return {storage_key(whole(p).untyped_storage()) for p in self._parameters}

    @contextmanager
    def communicating(self) -> Iterator[None]:
        """Around a capture: streams of collectives begin and end with the present one."""
        streams = [unit.streams for unit in self._units.values()]
        for others, present in streams:
            for stream in others:
                stream.wait_stream(present)
        yield
        for others, present in streams:
            for stream in others:
                present.wait_stream(stream)

    def reset(self) -> None:
        """After a forward or a backward that did not end: nothing is gathered, and nothing is awaited."""
        for unit in self._units.values():
            unit.reset()


_units: weakref.WeakValueDictionary[str, Unit] = weakref.WeakValueDictionary()  # by what names them in graphs
_plain: dict[str, Callable[[], object]] = {}
_names = map(str, itertools.count())


def _hook_before(name: str, stock: Callable[..., Any]) -> Callable[..., Any]:
    def gather(module: nn.Module, args: Any, kwargs: Any) -> Any:
        leaves, shape = tree_flatten((args, kwargs))
        if any(map(_has_fields, leaves)):  # FSDP looks into them, and Dynamo breaks the graph
            return stock(module, args, kwargs)
        return tree_unflatten(_through(_gathered, name, leaves), shape)

    return gather


def _hook_after(name: str, stock: Callable[..., Any]) -> Callable[..., Any]:
    def leave(module: nn.Module, args: Any, made: Any) -> Any:
        leaves, shape = tree_flatten(made)
        if any(map(_has_fields, leaves)):
            return stock(module, args, made)
        return tree_unflatten(_through(_left, name, leaves), shape)

    return leave


def _has_fields(leaf: Any) -> bool:
    """Whether it is a dataclass. Dynamo of torch 2.11 traces this of None and of tensors in no other way."""
    plain = leaf is None or isinstance(leaf, (Tensor, bool, int, float, str))
    return not plain and hasattr(leaf, "__dataclass_fields__")


def _gathered(name: str, *tensors: Tensor) -> Sequence[Tensor]:
    """What FSDP's hook in front of a unit's forward does; of fake tensors, which dtypes it gives."""
    if any(isinstance(t, FakeTensor) for t in tensors):
        return _like(tensors, _units[name].dtypes[0])
    _plain[name]()
    return _units[name].gather(tensors)


def _left(name: str, *tensors: Tensor) -> Sequence[Tensor]:
    """As `_gathered`, behind it."""
    if any(isinstance(t, FakeTensor) for t in tensors):
        return _like(tensors, _units[name].dtypes[1])
    return _units[name].leave(tensors)


def _like(tensors: Sequence[Tensor], dtype: torch.dtype | None) -> Sequence[Tensor]:
    return tuple(t.view_as(t) if dtype is None or not t.is_floating_point() else t.to(dtype) for t in tensors)


def _through(operation: Callable[..., Any], name: str, leaves: list[Any]) -> list[Any]:
    """The same values, with the tensors that the operation has made of tensors."""
    places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    for i, made in zip(places, operation(name, *[leaves[i] for i in places]), strict=True):
        leaves[i] = made
    return leaves
