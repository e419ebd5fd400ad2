"""What leads to one value in a graph of Dynamo's that is being made, and whether that can be computed before the step.

It can where it follows from tensors that the step is given by a few cheap operations, and the step has not changed
these tensors before. What the step makes itself it may change as well: the changes are made in the same order then.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, fx

from pygraph_train.torch_private.dispatch import (
    FakeTensor,
    HigherOrderOperator,
    TorchDispatchMode,
    has_symbols,
    is_expensive,
    is_operator_of_torch,
    mode_of_fakes,
    operator_draws,
)
from pygraph_train.torch_private.dynamo import placeholder_source, placeholder_value
from pygraph_train.torch_private.memory import storage_key, tensor_version
from pygraph_train.tracing.graph_calls import function_of, is_write, tensors_in, without_gradient
from pygraph_train.tracing.writes import written_arguments

__all__ = ["chain_of", "chain_with_writes"]

MOST_OPERATIONS = 64
"""That lead to one value. More are left to the step."""

_OF_TORCH = (
    *("torch", "torch.functional", "torch.nn.functional", "torch._tensor", "torch._C._nn", "torch._refs"),
    *("_operator", "builtins"),
)
"""Modules whose functions do nothing but compute. Methods of tensors have none."""

_MORE_THAN_VALUES = {"set_", "resize_", "resize_as_", "requires_grad_", "detach_", "share_memory_", "rename_"}
"""Methods that change something else of a tensor than its values. Those of `map_` and the like call Python."""


def chain_of(node: fx.Node) -> list[fx.Node] | None:
    """The nodes that lead to a value, inputs first; None where it has to be read in the step.

    That is so where it follows from something that the step has changed before, from random numbers, or by expensive
    operations: these would be made twice.
    """
    found: dict[fx.Node, None] = {}
    waiting = [(node, False)]
    while waiting:
        node, ready = waiting.pop()
        if node in found:
            continue
        if ready:
            found[node] = None
        elif not _may_follow(node) or len(found) > 2 * MOST_OPERATIONS:
            return None
        else:
            waiting += [(node, True), *((x, False) for x in node.all_input_nodes)]
    chain = list(found)
    return None if _is_long(chain) or _is_changed(chain) else chain


def chain_with_writes(node: fx.Node) -> list[fx.Node] | None:
    """Like `chain_of`, in the order of the graph, with the changes of what the step has made itself."""
    so_far = list(node.graph.nodes)
    writes = [x for x in so_far if written_arguments(x)]
    found: set[fx.Node] = set()
    waiting = [node]
    while waiting:
        node = waiting.pop()
        if not (_may_follow(node) or _may_write(node)) or len(found) > 2 * MOST_OPERATIONS:
            return None
        found.add(node)
        if not waiting:
            memory = set().union(*map(_memory, found))
            waiting += [x for x in writes if not memory.isdisjoint(_memory_written(x))]
            waiting += [x for y in found for x in y.all_input_nodes]
            waiting = [x for x in waiting if x not in found]
    chain = [x for x in so_far if x in found]
    given = set().union(*(_memory(x) for x in so_far if x.op in ("placeholder", "get_attr")))
    changes = [_memory_written(x) for x in chain if x in writes]
    if not all(changes) or not given.isdisjoint(set().union(*changes)):
        return None
    return None if _is_long(chain) or _is_changed(chain, set().union(*changes)) else chain


def _is_long(chain: list[fx.Node]) -> bool:
    operations = [x for x in chain if x.op != "placeholder"]
    return len(operations) > MOST_OPERATIONS or not all(map(_is_cheap, operations))


def _may_follow(node: fx.Node) -> bool:
    """Whether a node may be computed ahead, as far as it shows itself."""
    example = node.meta.get("example_value")
    tensors = tensors_in([example])
    if has_symbols(tensors) or any(type(x) is not FakeTensor for x in tensors):
        return False
    if node.op == "placeholder":
        return placeholder_source(node) is not None and type(placeholder_value(node)) in (
            Tensor,
            torch.nn.Parameter,
        )
    if not isinstance(example, (Tensor, tuple, int, float, bool, torch.Size)):
        return False
    return _computes(node) and not is_write(function_of(node)) and not written_arguments(node)


def _may_write(node: fx.Node) -> bool:
    """Whether a node changes values of its first argument and nothing else, as far as it shows itself."""
    if node.op not in ("call_function", "call_method") or not is_write(function_of(node)):
        return False
    tensors = tensors_in([node.meta.get("example_value")])
    plain = not has_symbols(tensors) and all(type(x) is FakeTensor for x in tensors)
    return plain and _computes(node) and node.target not in _MORE_THAN_VALUES and not node.kwargs.get("out")


def _computes(node: fx.Node) -> bool:
    fn = function_of(node)
    if node.op == "call_function":
        return is_operator_of_torch(fn) or getattr(fn, "__module__", None) in _OF_TORCH
    return node.op == "call_method"


def _is_cheap(node: fx.Node) -> bool:
    """Whether an operation draws nothing, and moves memory rather than to compute. Nothing is executed."""
    examples = tensors_in([x.meta.get("example_value") for x in (node, *node.all_input_nodes)])
    writes = is_write(function_of(node))
    try:
        with mode_of_fakes(examples), _Cost() as cost, torch.no_grad():
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), _copy if writes else without_gradient)
            function_of(node)(*args, **kwargs)
    except Exception:
        return False
    return cost.low


def _copy(node: fx.Node) -> Any:
    """A fake tensor that counts its changes apart."""
    value = without_gradient(node)
    return value.clone() if isinstance(value, Tensor) else value


class _Cost(TorchDispatchMode):
    """Sees whether operations are cheap, and pure.

    Attributes:
        low: whether they are.
    """

    low = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.low &= not (is_expensive(func) or operator_draws(func, args, kwargs or {}))
        return func(*args, **(kwargs or {}))


def _is_changed(chain: list[fx.Node], own: Collection[int] = ()) -> bool:
    """Whether the step has changed memory that one of these nodes lies in, or may have.

    Args:
        own: the memory that the chain itself changes. It has all operations that may write there.
    """
    nodes = list(chain[0].graph.nodes)
    real = set().union(*map(_real_memory, chain))
    same = [x for x in nodes if not real.isdisjoint(_real_memory(x))]  # given as another tensor as well
    memory = set().union(*map(_memory, chain), *map(_memory, same))
    for node in nodes:
        shared = [x for x in (node, *node.all_input_nodes) if not memory.isdisjoint(_memory(x))]
        for t in (t for x in shared for t in tensors_in([x.meta.get("example_value")])):
            if tensor_version(t) and storage_key(t.untyped_storage()) not in own:
                return True
        if not memory.isdisjoint(_memory_written(node)) and not (own and node in chain):
            return True  # in a list, or by an operator that does not count it
        if shared and node.op == "call_function" and not _is_known(node.target):
            return True  # a checkpoint, or an operator of somebody else
    return False


def _is_known(fn: Any) -> bool:
    """Whether what a function changes is seen at the versions of tensors."""
    if isinstance(fn, HigherOrderOperator) or fn is Tensor.set_:  # `x.data = y`, which takes its count back
        return False
    return is_operator_of_torch(fn) or not str(getattr(fn, "__module__", "")).startswith(
        ("torch._ops", "torch.ops")
    )


def _memory(node: fx.Node) -> set[int]:
    """Where tensors of a node lie in the trace."""
    return {storage_key(x.untyped_storage()) for x in tensors_in([node.meta.get("example_value")])}


def _memory_written(node: fx.Node) -> set[int]:
    return set().union(*map(_memory, written_arguments(node)))


def _real_memory(node: fx.Node) -> set[int]:
    """Where a tensor lies that the step is given."""
    value = placeholder_value(node) if node.op == "placeholder" else None
    try:
        return {value.untyped_storage().data_ptr()} if isinstance(value, Tensor) else set()
    except (NotImplementedError, RuntimeError):  # it has no memory of its own
        return set()
