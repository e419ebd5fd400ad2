"""Constants that a step makes on the host: they are the same in every step, so they are made once.

Python makes `torch.tensor(scale)`, or a table of positions, on the CPU in each step, and most steps copy such tensors
to the device. A capture cannot hold a copy from memory that is not pinned. Such a copy is made when the step is traced,
and the graph holds a copy of the result. The host reads a constant that stays on the CPU when it launches a kernel: a
capture bakes the value in, and the value never changes.

What is computed from tensors of the host that the step is given (a noise schedule) is found in the same way, where all
of it is copied to the device: see `HostTables`.
"""

from __future__ import annotations

import operator
import types
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx

from pygraph_train.torch_private.dispatch import mode_of_fakes, no_fake_mode
from pygraph_train.torch_private.dynamo import hold_constant
from pygraph_train.tracing.host_tables import HostTables
from pygraph_train.tracing.reasons import line_of
from pygraph_train.tracing.recompute import RandomDraws
from pygraph_train.tracing.sizes import make_sizes_numbers

__all__ = ["HostConstants", "make_once"]

_ON_HOST = ("cpu",)
"""Types of devices to which nothing is copied."""

LARGE = 16 << 20
"""Bytes from which a constant is not kept on the device."""


class HostConstants(NamedTuple):
    """What `make_once` has found.

    Attributes:
        nodes: that compute constants on the CPU, and are still in the graph.
        told: a sentence for each constant that is copied to the device once.
        values: on the device. A captured graph reads their memory: they must live as long.
    """

    nodes: frozenset[fx.Node] = frozenset()
    told: tuple[str, ...] = ()
    values: tuple[Tensor, ...] = ()


def make_once(
    graph: fx.GraphModule,
    device: torch.device,
    given: HostTables | None = None,
    is_of_batch: Callable[[str], bool] = lambda expression: False,
) -> HostConstants:
    """Let a graph of Dynamo's hold the constants of the host that it copies to the device.

    Args:
        graph: is changed.
        device: of the step. On a CPU nothing is copied, and everything stays as it is.
        given: takes the tensors of the host that the step is given and copies to the device.
        is_of_batch: whether an input of this expression belongs to the batch.
    """
    make_sizes_numbers(graph)
    if device.type in _ON_HOST:
        return HostConstants()
    with no_fake_mode(), torch.random.fork_rng(devices=[]), torch.no_grad():
        tensors = {} if given is None else given.candidates(graph, is_of_batch, _is_on_host)
        while True:
            found = _Constants(device, tensors)
            for node in graph.graph.nodes:
                found.look_at(node)
            if not (needed := found.needed_on_host()):
                break
            tensors = {node: value for node, value in tensors.items() if node not in needed}
    if found.written:
        return HostConstants()
    if given is not None and tensors:
        copies = [(node, value) for node, value in found.copies.items() if node in found.origins]
        copies += [(node, value) for (_, node), value in found.read_by.items() if node in found.origins]
        given.take(list(tensors), found.on_cpu | found.copies, copies, device)
    told = []
    for node, value in found.copies.items():
        told.append(_told(node, given=node in found.origins))
        node.replace_all_uses_with(_held(graph, len(told), value, node, node.meta["example_value"]))
        graph.graph.erase_node(node)
    for (node, read), value in found.read_by.items():
        told.append(_told(node, given=read in found.origins))
        node.replace_input_with(read, _held(graph, len(told), value, node, _moved(read, device)))
    for (node, position), value in found.lists.items():
        told.append(_told(node))
        held = _held(graph, len(told), value, node, _example(value, node))
        index: Any = node.args[1]
        node.update_arg(1, held if position is None else (*index[:position], held, *index[position + 1 :]))
    if told:
        graph.recompile()
    returned = graph.graph.output_node().all_input_nodes
    values = (*found.copies.values(), *found.read_by.values(), *found.lists.values())
    return HostConstants(frozenset(found.on_cpu) - set(returned), tuple(told), values)


def _is_on_host(value: Tensor) -> bool:
    return value.device.type == "cpu"


def _held(graph: fx.GraphModule, number: int, value: Tensor, place: fx.Node, example: Any) -> fx.Node:
    """A copy of a value that the graph holds, made before `place`: the step may write to it."""
    name = f"host_constant_{number}"
    hold_constant(graph, name, value)
    with graph.graph.inserting_before(place):
        held = graph.graph.get_attr(name)
        fresh = graph.graph.call_method("clone", (held,))
    held.meta = {**place.meta, "example_value": example}
    fresh.meta = dict(held.meta)
    return fresh


def _told(node: fx.Node, *, given: bool = False) -> str:
    line = line_of(node)
    where = f" ({line})" if line else ""
    if given:
        return (
            f"a tensor of the host is copied to the device where it has changed, and not in each step{where}"
        )
    return f"a constant of the host is copied to the device once instead of in each step{where}"


class _Constants:
    """The nodes of one graph that depend on no input.

    Attributes:
        on_cpu: constants on the CPU, with their values after all operations so far.
        copies: constants that are copied to the device, with what the copy gives.
        read_by: operations that copy a constant to the device themselves, with the constant, and what the copy gives.
        lists: indices that are lists of Python's numbers: the operation, the list's position in a tuple of indices
            (None without a tuple), and the list as a tensor. The operation copies the list to the device.
        written: whether an operation that is no constant writes to one.
        origins: of these nodes, those that are computed from tensors that the step is given, and from which ones.
    """

    def __init__(self, device: torch.device, given: dict[fx.Node, Tensor]) -> None:
        self.on_cpu: dict[fx.Node, Any] = dict(given)
        self.origins = {node: frozenset((node,)) for node in given}
        self.copies: dict[fx.Node, Tensor] = {}
        self.read_by: dict[tuple[fx.Node, fx.Node], Tensor] = {}
        self.lists: dict[tuple[fx.Node, int | None], Tensor] = {}
        self.written = False
        self._device = device

    def look_at(self, node: fx.Node) -> None:
        """Take the next node of the graph."""
        if node.op not in ("call_function", "call_method"):
            return
        example = node.meta.get("example_value")
        origins = [self.origins[read] for read in node.all_input_nodes if read in self.origins]
        written = [target for target in _written_by(node) if target in self.on_cpu]
        value = self._value(node) if self._is_constant(node) and not (origins and written) else _UNKNOWN
        if origins and value is not _UNKNOWN:
            self.origins[node] = frozenset().union(*origins)
        if value is _UNKNOWN:
            self.written |= any(target not in self.origins for target in written)
            self._take_reads(node)
        elif isinstance(example, Tensor) and self._is_copied(node, example):
            if value.nbytes <= LARGE and value.clone().stride() == value.stride():
                self.copies[node] = value
        else:
            self.on_cpu[node] = value

    def needed_on_host(self) -> set[fx.Node]:
        """Of the tensors that the step is given, those that are needed on the host where the graph runs."""
        found: set[fx.Node] = set()
        for node, origins in self.origins.items():
            known = node in self.on_cpu
            for user in node.users if known else ():
                if user not in self.origins and (user, node) not in self.read_by:
                    found |= origins
            if not (known or node in self.copies):
                found |= origins
        return found

    def _is_copied(self, node: fx.Node, example: Tensor) -> bool:
        """Whether a constant is on the device."""
        return example.device.type == self._device.type

    def _is_constant(self, node: fx.Node) -> bool:
        if "requires_grad" in str(node.target) or node.kwargs.get("requires_grad"):
            return False
        if self._takes_type_of_another(node) or _is_new_tensor(node):
            return True
        if node.all_input_nodes:
            return _is_of_torch(node) and all(read in self.on_cpu for read in node.all_input_nodes)
        example = node.meta.get("example_value")
        if node.target in _COPIES or not isinstance(example, Tensor) or example.device.type != "cpu":
            return node.target in _COPIES
        return node.target in _MAKERS or (node.target is torch.empty and not example.numel())

    def _takes_type_of_another(self, node: fx.Node) -> bool:
        """`constant.to(x)` and `constant.type_as(x)` read nothing of `x` but its type and its device."""
        return (
            node.op == "call_method"
            and node.target in ("to", "type_as")
            and len(node.args) == 2
            and node.args[0] in self.on_cpu
            and isinstance(node.args[1], fx.Node)
            and isinstance(node.args[1].meta.get("example_value"), Tensor)
            and not node.kwargs
        )

    def _value(self, node: fx.Node) -> Any:
        """What it computes, made now; `_UNKNOWN` for random numbers, and where the graph has something else."""
        try:
            with RandomDraws() as draws:
                if self._takes_type_of_another(node):
                    other = node.args[1].meta["example_value"]  # type: ignore[union-attr]
                    value = self.on_cpu[node.args[0]].to(device=other.device, dtype=other.dtype)  # type: ignore[index]
                elif _is_new_tensor(node):
                    like = node.args[0].meta["example_value"]  # type: ignore[union-attr]
                    options = {"dtype": like.dtype, "device": like.device, **node.kwargs}
                    value = torch.tensor(*node.args[1:], **options)  # type: ignore[arg-type]
                else:
                    args, kwargs = fx.node.map_arg((node.args, node.kwargs), self.on_cpu.__getitem__)
                    if node.op == "call_method":
                        value = getattr(args[0], str(node.target))(*args[1:], **kwargs)
                    else:
                        value = node.target(*args, **kwargs)  # type: ignore[operator]
        except Exception:  # the step itself will say what is wrong
            return _UNKNOWN
        example = node.meta.get("example_value")
        return _UNKNOWN if draws.seen or not _alike(value, example) else value

    def _take_reads(self, node: fx.Node) -> None:
        """Constants on the CPU that an operation on the device copies by itself: indices, and those of `where`."""
        example = node.meta.get("example_value")
        reads: list[Any] = []
        if node.target in (operator.getitem, operator.setitem):
            index = node.args[1]
            parts = index if isinstance(index, (tuple, list)) else [index]
            reads = [x for x in parts if isinstance(x, fx.Node) and x in self.on_cpu]
            reads = [x for x in reads if _is_list_of_integers(x.meta.get("example_value"))]
            self._take_lists(node)
        elif node.target in (torch.where, "where") and isinstance(example, Tensor):
            reads = [x for x in node.all_input_nodes if x in self.on_cpu]
        for read in reads:
            value = self.on_cpu[read]
            if isinstance(value, Tensor) and value.nbytes <= LARGE:
                self.read_by[node, read] = value.to(self._device, copy=True)

    def _take_lists(self, node: fx.Node) -> None:
        """Indices that are lists of Python's integers."""
        target, index = node.args[0], node.args[1]
        example = target.meta.get("example_value") if isinstance(target, fx.Node) else None
        if not isinstance(example, Tensor) or example.device.type != self._device.type:
            return
        alone = _is_list_of_numbers(index)
        parts = [index] if alone else index if isinstance(index, tuple) else []
        for position, part in enumerate(parts):
            if _is_list_of_numbers(part):
                self.lists[node, None if alone else position] = torch.tensor(list(part), device=self._device)


_UNKNOWN: Any = object()
_COPIES = {torch.tensor, torch.as_tensor, torch.asarray}
"""They copy Python's numbers to the device; `torch.zeros` and the like make theirs there."""

_MAKERS = {
    *(
        torch.arange,
        torch.range,
        torch.zeros,
        torch.ones,
        torch.full,
        torch.eye,
        torch.linspace,
        torch.logspace,
    ),
    *(torch.scalar_tensor, torch.tril_indices, torch.triu_indices, torch.hann_window, torch.hamming_window),
    *(torch.div, torch.true_divide, torch.floor_divide, torch.add, torch.sub, torch.mul),
}
"""They make the same tensor of the same numbers each time. Arithmetic with numbers alone is done on the CPU."""

_IN_PLACE = {
    operator.setitem,
    *(getattr(operator, f"i{name}") for name in ("add", "and", "concat", "floordiv", "lshift", "matmul")),
    *(
        getattr(operator, f"i{name}")
        for name in ("mod", "mul", "or", "pow", "rshift", "sub", "truediv", "xor")
    ),
}


def _is_of_torch(node: fx.Node) -> bool:
    """Whether an operation is one of torch or Python. An operator of somebody else may depend on what it likes."""
    if node.op == "call_method" or isinstance(node.target, types.BuiltinFunctionType):
        return True
    module = str(getattr(node.target, "__module__", ""))
    return module.startswith("torch.") and not module.startswith(("torch._ops", "torch.ops"))


def _is_new_tensor(node: fx.Node) -> bool:
    """`x.new_tensor(numbers)` reads nothing of `x` but its type and its device, as Dynamo of torch 2.11 keeps it."""
    return (
        node.op == "call_method"
        and node.target == "new_tensor"
        and len(node.all_input_nodes) == 1
        and node.all_input_nodes[0] is node.args[0]
        and isinstance(node.args[0].meta.get("example_value"), Tensor)
    )


def _written_by(node: fx.Node) -> list[fx.Node]:
    """The arguments that an operation writes to, as far as its name says."""
    name = str(node.target) if node.op == "call_method" else getattr(node.target, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__")
    found: list[fx.Node] = []
    if in_place or node.target in _IN_PLACE or node.kwargs.get("inplace"):
        fx.node.map_arg(node.args[:1], found.append)
    fx.node.map_arg(node.kwargs.get("out"), found.append)
    return found


def _alike(value: Any, example: Any) -> bool:
    """Whether a value is of the kind that the graph has there."""
    if not isinstance(value, Tensor) or not isinstance(example, Tensor):
        return True
    return (value.shape, value.dtype, value.device.type) == (
        example.shape,
        example.dtype,
        example.device.type,
    )


def _is_list_of_integers(example: Any) -> bool:
    """Whether an index is copied to the device: one number is read on the host, and a mask is counted there."""
    whole = isinstance(example, Tensor) and not example.is_floating_point() and example.dtype != torch.bool
    return whole and example.dim() > 0


def _is_list_of_numbers(index: Any) -> bool:
    return isinstance(index, list) and bool(index) and all(type(number) is int for number in index)


def _example(value: Tensor, node: fx.Node) -> Any:
    """A tensor of Dynamo's with the shape, type and device of a value."""
    with mode_of_fakes([node.args[0].meta["example_value"]]):  # type: ignore[union-attr]
        return torch.empty(value.shape, dtype=value.dtype, device=value.device)


def _moved(node: fx.Node, device: torch.device) -> Any:
    """The value of a node that Dynamo has for it, on the device."""
    example = node.meta["example_value"]
    with mode_of_fakes([example]):
        return example.to(device)
