"""Results of a captured step: static inside the graph, ordinary tensors outside."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pygraph_train.problems import NotLegal, Problem
from pygraph_train.torch_private.memory import storage_key
from pygraph_train.torch_private.sharding import local_tensor
from pygraph_train.tracing.late_marks import LateTensor, Mark
from pygraph_train.tracing.opened import is_open, objects_in
from pygraph_train.tracing.returned_objects import ReturnedObjects, undeclared
from pygraph_train.tracing.signature import flatten, map_leaves

__all__ = ["Outputs", "detached_results", "without_graphs"]

# what `guard_constants` and Dynamo's own guards cover
_CONSTANTS = (
    type(None),
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    Enum,
    np.number,
    np.bool_,
    torch.dtype,
    torch.device,
)

_Make = Callable[[Sequence[Any], list[Any]], None]
"""Puts results into the second list; the first one has the leaves of the present call."""


class Outputs:
    """What a captured step returned. Build it inside the capture, call it after each replay.

    Scalars of one dtype are packed into one vector as the graph's last operation: however many values a
    step logs, one copy per replay makes them ordinary tensors that nobody overwrites. Results that share memory
    with each other, or with a tensor of the batch, still do.

    Args:
        tree: the step's results; its tensors have fixed addresses. Guards stand for its other leaves.
        static_leaves: the leaves that the step was called with.
        state: tensors that live longer than a step (parameters, buffers): a result that is one of them,
            or a view of one, shows their present values, as it does without a graph.
        detached: whether results come without a history, except those inside of objects. Otherwise those that have one
            in the step have one after a replay, which cannot be differentiated: as after the step's own backward.
        objects: what is known of the objects that the step makes and returns; None where it may return none.

    Attributes:
        tensors: the results that are tensors, without their history.

    Raises:
        NotLegal: a result is an object that no guard can stand for.
    """

    def __init__(
        self,
        tree: Any,
        static_leaves: Sequence[Any],
        state: Sequence[Tensor] = (),
        *,
        detached: bool = True,
        objects: ReturnedObjects | None = None,
    ) -> None:
        opens = () if objects is None else objects.opens
        if objects is not None:
            for result in objects_in(tree, opens):
                if not objects.knows(result):
                    raise NotLegal(_unknown(result))
        for kind, name in undeclared(tree, opens):
            raise NotLegal(_undeclared(kind, name))
        leaves: list[Any] = []
        flatten(tree, leaves, opens)
        inside = _places_inside(tree, opens) if opens else frozenset()
        static = {k: leaf for k, leaf in enumerate(static_leaves) if isinstance(leaf, Tensor)}
        places = {id(leaf): k for k, leaf in static.items()}
        of_batch = {_memory(leaf): k for k, leaf in static.items() if leaf.layout is torch.strided}
        themselves = set(map(id, state))
        of_state = {_memory(local_tensor(t)) for t in state if t.layout is torch.strided}
        self._makes: list[_Make] = []
        scalars: dict[Any, dict[Any, _Scalar]] = {}
        others: dict[Any, list[tuple[int, Tensor]]] = {}
        self.tensors: list[Tensor] = []
        numbers: dict[Callable[[], list[Any]], list[tuple[int, Callable[[list[Any]], Any]]]] = {}
        for position, leaf in enumerate(leaves):
            if isinstance(leaf, Mark):
                numbers.setdefault(leaf.read, []).append((position, leaf.of))
            if isinstance(leaf, LateTensor):
                raise NotLegal(_OF_NUMBER)
            if not isinstance(leaf, Tensor):
                if not isinstance(leaf, _CONSTANTS) and not (position in inside and isinstance(leaf, type)):
                    raise NotLegal(_unknown(leaf))
                continue
            if local_tensor(leaf) is not leaf or _is_freed(leaf):
                raise NotLegal(_GATHERED)
            tensor = leaf.detach()
            self.tensors.append(tensor)
            memory = _memory(leaf) if leaf.layout is torch.strided else id(leaf)
            if id(leaf) in places:  # taken from the call, not from the graph
                self._makes.append(_pass(position, places[id(leaf)]))
            elif id(leaf) in themselves and (not detached or position in inside):
                self._makes.append(_hand_out(position, leaf))
                continue
            elif memory in of_state:
                self._makes.append(_show(position, tensor))
            elif memory in of_batch and leaf.dtype == static[of_batch[memory]].dtype:
                source = of_batch[memory]
                self._makes.append(_view(position, source, tensor, static[source]))
            elif leaf.dim() == 0:
                alike = scalars.setdefault((leaf.dtype, leaf.device), {})
                _, of_tensors = alike.setdefault((memory, leaf.storage_offset()), (tensor, {}))
                of_tensors.setdefault(id(leaf), []).append(position)
            else:
                others.setdefault(memory, []).append((position, tensor))
        for alike in scalars.values():
            self._makes.append(_copy_scalars(list(alike.values())))
        for sharing in others.values():
            self._makes.append(_copy(*sharing[0]) if len(sharing) == 1 else _copy_together(sharing))
        self._makes += [_read(read, places) for read, places in numbers.items()]
        differentiable: dict[int, list[int]] = {}
        for k in inside if detached else range(len(leaves)):
            leaf = leaves[k]
            if isinstance(leaf, Tensor) and leaf.grad_fn is not None and id(leaf) not in places:
                scalar = leaf.dim() == 0  # several places have one tensor
                differentiable.setdefault(id(leaf) if scalar else -k, []).append(k)
        if differentiable:
            self._makes.append(_with_history(list(differentiable.values())))
        # without the tensors: their history would keep the nodes that accumulate gradients, on this stream
        self._opens = opens
        self._tree = map_leaves(_without_tensor, tree, opens)
        self._leaves = list(map(_without_tensor, leaves))

    def __call__(self, leaves: Sequence[Any]) -> Any:
        """The results of the last replay, as tensors of their own.

        Args:
            leaves: the leaves of the present call.
        """
        values = list(self._leaves)
        for make in self._makes:
            make(leaves, values)
        if self._tree is None:  # a loss alone
            return values[0]
        iterator = iter(values)
        return map_leaves(lambda _: next(iterator), self._tree, self._opens)


def _pass(position: int, source: int) -> _Make:
    def make(leaves: Sequence[Any], values: list[Any]) -> None:
        leaf = leaves[source]
        values[position] = leaf.detach() if leaf.requires_grad else leaf

    return make


def _read(read: Callable[[], list[Any]], places: list[tuple[int, Callable[[list[Any]], Any]]]) -> _Make:
    """The host waits for the replay."""

    def make(leaves: Sequence[Any], values: list[Any]) -> None:
        numbers = read()
        for position, of in places:
            values[position] = of(numbers)

    return make


def _hand_out(position: int, tensor: Tensor) -> _Make:
    def make(leaves: Sequence[Any], values: list[Any]) -> None:
        values[position] = tensor

    return make


class _Used(torch.autograd.Function):
    """The end of a history that a backward has been through."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, root: Tensor) -> Tensor:
        ctx.mark_dirty(value)
        return value

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        raise RuntimeError(
            "Trying to backward through the graph a second time: this result comes from a replay, and a replay "
            "keeps no autograd graph. Differentiate the result inside the step."
        )


_USED = "_UsedBackward"


def _with_history(places: list[list[int]]) -> _Make:
    root = torch.zeros((), requires_grad=True)

    def make(leaves: Sequence[Any], values: list[Any]) -> None:
        with torch.enable_grad():
            for positions in places:
                value = _Used.apply(values[positions[0]], root)
                for position in positions:
                    values[position] = value

    return make


def without_graphs(tree: Any) -> Any:
    """What somebody keeps of an earlier step, as a replay would have left it: its tensors have used histories.

    The same object, where no tensor has another history or it is of a class that only its author can rebuild.
    """
    found: dict[int, Tensor] = {}

    def let_go(leaf: Any) -> Any:
        if type(leaf) is not Tensor or leaf.grad_fn is None or leaf.grad_fn.name() == _USED:
            return leaf
        if weakref.getweakrefcount(leaf):  # recurrent networks know their weights so
            return leaf
        if id(leaf) not in found:
            with torch.enable_grad():  # `data`: others may need the tensor's version
                found[id(leaf)] = _Used.apply(leaf.data, torch.zeros((), requires_grad=True))
        return found[id(leaf)]

    try:
        other = map_leaves(let_go, tree)
    except TypeError:
        return tree
    return other if found else tree


def _show(position: int, tensor: Tensor) -> _Make:
    def make(leaves: Sequence[Any], values: list[Any]) -> None:
        values[position] = tensor.detach()

    return make


def _view(position: int, source: int, tensor: Tensor, static: Tensor) -> _Make:
    size, stride = tensor.size(), tensor.stride()
    offset = int(tensor.storage_offset() - static.storage_offset())

    def make(leaves: Sequence[Any], values: list[Any]) -> None:
        leaf = leaves[source].detach()
        values[position] = leaf.as_strided(size, stride, leaf.storage_offset() + offset)

    return make


def _copy(position: int, tensor: Tensor) -> _Make:
    def make(leaves: Sequence[Any], values: list[Any]) -> None:
        values[position] = tensor.clone()

    return make


_Scalar = tuple[Tensor, dict[int, list[int]]]
"""A number in the graph's memory, and the positions of each tensor that the step has of it."""


def _copy_scalars(scalars: list[_Scalar]) -> _Make:
    """Called in the capture: the packing is an operation of the graph."""
    places = [list(of_tensors.values()) for _, of_tensors in scalars]
    if len(scalars) == 1:
        only, place = scalars[0][0], places[0]

        def make_one(leaves: Sequence[Any], values: list[Any]) -> None:
            _put(only.clone(), place, values)

        return make_one
    packed = torch.stack([tensor for tensor, _ in scalars])

    def make(leaves: Sequence[Any], values: list[Any]) -> None:
        for place, value in zip(places, packed.clone().unbind(), strict=True):
            _put(value.data, place, values)  # no view, which could not be changed in place

    return make


def _put(own: Tensor, places: list[list[int]], values: list[Any]) -> None:
    for positions in places:
        for position in positions:
            values[position] = own
        own = own.detach() if len(places) > 1 else own  # another tensor of the same number


def _copy_together(sharing: list[tuple[int, Tensor]]) -> _Make:
    """Results in one piece of memory, of which the copies share theirs."""
    storage = sharing[0][1].untyped_storage()

    def make(leaves: Sequence[Any], values: list[Any]) -> None:
        copy = storage.clone()
        for position, tensor in sharing:
            empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
            values[position] = empty.set_(copy, tensor.storage_offset(), tensor.size(), tensor.stride())

    return make


def _places_inside(tree: Any, opens: Collection[type]) -> frozenset[int]:
    """Which leaves lie inside of objects."""
    closed: list[Any] = []
    flatten(tree, closed)
    inside: list[int] = []
    position = 0
    for leaf in closed:
        parts: list[Any] = []
        flatten(leaf, parts, opens)
        if is_open(leaf, opens):
            inside += range(position, position + len(parts))
        position += len(parts)
    return frozenset(inside)


def detached_results(result: Any) -> Any:
    """What a step that ran without a graph has returned, with its tensors detached."""
    if type(result) is Tensor:
        return result.detach()
    try:
        return map_leaves(lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf, result)
    except TypeError:
        return result  # a container that only its author can rebuild; such a step is never replayed


def _is_freed(tensor: Tensor) -> bool:
    strided = tensor.layout is torch.strided
    return strided and tensor.numel() > 0 and tensor.untyped_storage().nbytes() == 0


def _memory(tensor: Tensor) -> int:
    return storage_key(tensor.untyped_storage())


_GATHERED = Problem(
    "the step returns a sharded tensor, or a parameter that is whole only during the step",
    fix="Return a copy of the tensor (.clone())",
)


_OF_NUMBER = Problem(
    "the step returns a tensor that it makes of a number, which it reads of another tensor",
    fix="Return that tensor (.detach()), or the number",
)


def _unknown(leaf: Any) -> Problem:
    return Problem(
        f"the step returns a {type(leaf).__name__}, and a replay could not return the right value of it",
        fix="Return tensors, numbers and strings in dicts, lists or tuples",
    )


def _undeclared(kind: type, name: str) -> Problem:
    return Problem(
        f"the step returns a {kind.__name__} with the attribute {name}, and a replay could not return its right value",
        fix=f"Make {name} a field of the dataclass or an item of the dict, or return it beside the {kind.__name__}",
    )


def _without_tensor(leaf: Any) -> Any:
    return None if isinstance(leaf, Tensor) else leaf
