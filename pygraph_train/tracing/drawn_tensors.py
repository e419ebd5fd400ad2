"""Tensors of a graph that hold what a step draws on the host: they are filled before each run of the graph.

`torch.randperm(n).to(device)`, `torch.tensor(random.sample(range(n), k))`: the numbers are drawn before a replay, in
their turn, and what the step makes of them on the host is made there. What the device gets is copied to a tensor that
the graph reads.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import Tensor, fx

from pygraph_train.torch_private.dispatch import has_symbols, mode_of_fakes, no_fake_mode
from pygraph_train.torch_private.dynamo import hold_constant, placeholder_value
from pygraph_train.torch_private.memory import tensor_version

__all__ = ["copied_by", "fill", "hold_copy", "is_drawn_on_device", "is_read", "static_tensor", "was_written"]


def is_drawn_on_device(device: torch.device) -> bool:
    """Whether what torch draws on the host comes from the generator that a step on this device draws from."""
    return device.type == "cpu"


def static_tensor(value: Tensor, like: Tensor | None = None, device: torch.device | None = None) -> Tensor:
    """A tensor for a graph, which holds the value now.

    Args:
        value: on the host.
        like: what the graph has there, which may have another type and be on another device.
        device: where it is to be, without `like`.
    """
    with no_fake_mode(), torch.inference_mode(False), torch.no_grad():
        if like is None:
            return value.detach().to(device=device, copy=True)
        return value.detach().to(device=like.device, dtype=like.dtype, copy=True)


def fill(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Before a run, in the order of the device's work. Hot path."""
    with torch.inference_mode(False), torch.no_grad():
        for tensor, value in zip(tensors, values, strict=True):
            if not value.dim() and value.is_floating_point():
                tensor.fill_(value.item())
            elif (
                tensor.is_cuda and not value.is_cuda
            ):  # from memory that is not pinned, it would wait for the device
                tensor.copy_(value.to(tensor.dtype).pin_memory(), non_blocking=True)
            else:
                tensor.copy_(value)


def copied_by(node: fx.Node, device: torch.device) -> list[fx.Node | None]:
    """What an operation of the device may copy there from the host by itself: inputs of it.

    None stands for the first argument where the operation does nothing else.
    """
    example = node.meta.get("example_value")
    if not isinstance(example, Tensor) or not is_of_device(node, device) or has_symbols([example]):
        return []
    first = node.args[0] if node.args else None
    if node.op == "call_method" and node.target in ("to", "cuda", "type_as"):
        return [None] if isinstance(first, fx.Node) and not node.kwargs.get("memory_format") else []
    if node.target in (operator.getitem, operator.setitem):
        index = node.args[1]
        parts = index if isinstance(index, (tuple, list)) else [index]
        return [x for x in parts if isinstance(x, fx.Node) and _is_list_of_integers(x)]
    if node.target in _ARITHMETIC and len(node.args) == 2 and not node.kwargs:
        numbers = [x for x in node.args if isinstance(x, fx.Node) and _is_number_for(x, example)]
        return list(numbers) if len(numbers) == 1 else []
    return []


def is_of_device(node: fx.Node, device: torch.device) -> bool:
    """Whether an operation computes on the device of a step."""
    return bool(node.meta["example_value"].device.type == device.type)


_ARITHMETIC = {
    *(operator.mul, operator.add, operator.sub, operator.imul, operator.iadd, operator.isub),
    *(torch.mul, torch.add, torch.sub),
}
"""Kernels that get the same bits from a number as from a tensor of the device that holds it. Quotients do not."""


def _is_number_for(node: fx.Node, example: Tensor) -> bool:
    number = node.meta.get("example_value")
    return (
        isinstance(number, Tensor)
        and number.dim() == 0
        and number.dtype == example.dtype
        and number.dtype in (torch.float32, torch.float64)
    )


def _is_list_of_integers(node: fx.Node) -> bool:
    """One number is read on the host, and a mask is counted there."""
    example = node.meta.get("example_value")
    if not isinstance(example, Tensor):
        return False
    return not example.is_floating_point() and example.dtype != torch.bool and example.dim() > 0


def hold_copy(
    graph: fx.GraphModule, number: int, node: fx.Node, read: fx.Node | None, value: Tensor
) -> Tensor | None:
    """Let a graph read a tensor of its own where it copies something from the host. None where it is another one.

    Args:
        graph: is changed.
        number: of the tensor, for its name.
        node, read: see `copied_by`.
        value: of what is copied, in the traced call.
    """
    example = node.meta["example_value"]
    if read is not None:
        with mode_of_fakes([example]):
            example = read.meta["example_value"].to(example.device)
    tensor = static_tensor(value, example)
    if tensor.shape != example.shape or tensor.stride() != example.stride():
        return None
    name = f"drawn_on_host_{number}"
    hold_constant(graph, name, tensor)
    with graph.graph.inserting_before(node):
        held = graph.graph.get_attr(name)
        fresh = graph.graph.call_method("clone", (held,))  # the step may write to it
    held.meta = {**node.meta, "example_value": example}
    fresh.meta = dict(held.meta)
    if read is None:
        node.replace_all_uses_with(fresh)
        graph.graph.erase_node(node)
    else:
        node.replace_input_with(read, fresh)
    graph.recompile()
    return tensor


def is_read(graph: fx.GraphModule, tensor: Tensor) -> bool:
    """Whether a graph reads a tensor that was made to be its input."""
    given = graph.graph.find_nodes(op="placeholder")
    return any(node.users and placeholder_value(node) is tensor for node in given)


def was_written(node: fx.Node) -> bool:
    """Whether the trace so far has changed the tensor of a node in place."""
    example = node.meta.get("example_value")
    return isinstance(example, Tensor) and bool(tensor_version(example))
