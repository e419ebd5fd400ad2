"""Tensors of the host that a step copies to the device: a noise schedule, a table of weights for the classes.

The graph reads a copy on the device. Before each run of the graph the bytes of the host's tensors are compared with
those that the copies were made of, and where somebody has changed them (the user's own code, through a view or NumPy
too) what the step does with them on the host is done again. What is compared is less than what plain training copies.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from pygraph_train.torch_private.dynamo import placeholder_source, placeholder_value
from pygraph_train.tracing.reading import Read, reader
from pygraph_train.tracing.writes import maybe_written

__all__ = ["HostTables"]

_MOST = 1 << 20
"""Bytes of a tensor. To compare more in each step takes the host longer than it is worth."""


class HostTables:
    """Those of one trace.

    Args:
        takes: whether there may be any: somebody has to call `fill` before each run.

    Attributes:
        names: their expressions.
    """

    def __init__(self, *, takes: bool) -> None:
        self.names: list[str] = []
        self._takes = takes
        self._looks: list[Any] = []
        self._copies: list[Tensor] = []
        self._filled: list[bytes] = []
        self._compute: Callable[..., Any] | None = None
        self._read: Read | None = None

    @property
    def used(self) -> bool:
        """Whether the graph depends on such tensors."""
        return bool(self._copies)

    def candidates(
        self, graph: fx.GraphModule, is_of_batch: Callable[[str], bool], is_on_host: Callable[[Tensor], bool]
    ) -> dict[fx.Node, Tensor]:
        """Inputs of a graph that may be such tensors, with copies of their values."""
        if not self._takes or self.used or torch.is_autocast_enabled("cpu"):
            return {}
        nodes = {
            node: value
            for node in graph.graph.find_nodes(op="placeholder")
            if node.users
            and type(value := placeholder_value(node)) is Tensor
            and is_on_host(value)
            and _may_be_compared(value)
        }
        if not nodes:
            return {}
        names = {node: placeholder_source(node) for node in nodes}
        written = set(maybe_written(graph))
        return {
            node: value.clone()
            for node, value in nodes.items()
            if node not in written and (name := names[node]) is not None and not is_of_batch(name)
        }

    def take(
        self,
        given: Collection[fx.Node],
        made: Mapping[fx.Node, Any],
        copies: Sequence[tuple[fx.Node, Tensor]],
        device: torch.device,
    ) -> None:
        """Note what has to be done before a run.

        Args:
            given: inputs of the graph.
            made: values of what is computed on the host, in the order of the graph.
            copies: what the device gets: the node whose value it is, and the tensor that the graph reads.
            device: of the step.
        """
        tensors = [placeholder_value(node) for node in given]
        self.names = [str(placeholder_source(node)) for node in given]
        self._looks = list(map(_look, tensors))
        self._filled = list(map(_bytes, tensors))
        self._copies = [copy for _, copy in copies]
        self._compute = _function(given, made, [node for node, _ in copies], device)

    def fill(self, frame: dict[str, Any], namespace: dict[str, Any]) -> None:
        """Before a run: let the copies be those of the tensors of a call. Hot path."""
        if not self._copies:
            return
        if self._read is None:
            self._read = reader(namespace, self.names)
        try:
            tensors = self._read(frame, namespace)[0]
            if list(map(_look, tensors)) != self._looks:
                return  # the trace does not hold for them
        except (AttributeError, IndexError, KeyError):
            return
        now = list(map(_bytes, tensors))
        if now == self._filled:
            return
        assert self._compute is not None
        with torch.inference_mode(False), torch.no_grad(), torch.autocast("cpu", enabled=False):
            for copy, value in zip(self._copies, self._compute(*tensors), strict=True):
                copy.copy_(value)
        self._filled = now


def _may_be_compared(value: Tensor) -> bool:
    plain = value.layout is torch.strided and not (value.requires_grad or value.is_conj() or value.is_neg())
    return plain and value.is_contiguous() and 0 < value.nbytes <= _MOST


def _look(tensor: Any) -> tuple[Any, ...]:
    return (
        type(tensor),
        tensor.shape,
        tensor.dtype,
        tensor.is_contiguous(),
        tensor.requires_grad,
        tensor.device,
    )


def _bytes(tensor: Any) -> bytes:
    """Without an operation: this may be asked for while operations are captured."""
    return ctypes.string_at(tensor.data_ptr(), tensor.nbytes)


def _function(
    given: Collection[fx.Node], made: Mapping[fx.Node, Any], wanted: Sequence[fx.Node], device: torch.device
) -> Callable[..., Any]:
    """Computes the wanted values on the host, of the tensors that are given, and copies them to the device."""
    root, graph = torch.nn.Module(), fx.Graph()
    known: dict[fx.Node, Any] = {node: graph.placeholder(f"given_{k}") for k, node in enumerate(given)}

    def copied(node: fx.Node) -> Any:
        if node in known:
            return known[node]
        if node not in made:
            return node.meta["example_value"]  # of the device: only its type and its device are read
        if any(read in made or read in known for read in node.all_input_nodes):
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), copied)
            if node.op == "call_method" and len(args) > 1 and isinstance(args[1], Tensor):  # `x.to(other)`
                like: Any = {"device": args[1].device, "dtype": args[1].dtype}
                known[node] = graph.call_method("to", args[:1], like)
            else:
                known[node] = graph.create_node(node.op, node.target, args, kwargs)
        elif isinstance(made[node], Tensor):
            root.register_buffer(name := f"constant_{len(known)}", made[node])
            known[node] = graph.get_attr(name)
        else:
            known[node] = made[node]
        return known[node]

    graph.output(tuple(graph.call_method("to", (copied(node),), {"device": device}) for node in wanted))
    compute: Callable[..., Any] = fx.GraphModule(root, graph).forward
    return compute
