"""Results of a captured step: static inside the graph, ordinary tensors outside."""

from __future__ import annotations

from collections.abc import Sequence
from enum import Enum
from typing import Any

import torch
from torch import Tensor

from pygraph_train.step.legality import NotLegal, Problem
from pygraph_train.step.signature import map_leaves
from pygraph_train.torch_internals import storage_key

__all__ = ["Outputs"]

# what `guard_constants` and Dynamo's own guards cover
_CONSTANTS = (type(None), bool, int, float, complex, str, bytes, Enum, torch.dtype, torch.device)


class Outputs:
    """What a captured step returned. Build it inside the capture, call it after each replay.

    Scalars of one dtype are packed into one vector as the graph's last operation: however many values a
    step logs, one copy per replay makes them ordinary tensors that nobody overwrites.

    Args:
        tree: the step's results; its tensors have fixed addresses. Guards stand for its other leaves.
        static_leaves: the leaves that the step was called with.
        state: tensors that live longer than a step (parameters, buffers): a result that is one of them,
            or a view of one, shows their present values, as it does without a graph.

    Raises:
        NotLegal: a result is an object that no guard can stand for.
    """

    def __init__(self, tree: Any, static_leaves: Sequence[Any], state: Sequence[Tensor] = ()) -> None:
        leaves: list[Any] = []
        map_leaves(leaves.append, tree)
        tensors = [leaf.detach() for leaf in leaves if isinstance(leaf, Tensor)]
        self._groups: list[tuple[Tensor, list[int], bool]] = []  # static tensor, leaf positions, packed
        # a result that is one of the arguments is taken from the call, not from the graph
        self._passed: dict[int, int] = {}
        self._alive: list[tuple[int, Tensor]] = []
        inputs = {id(leaf): k for k, leaf in enumerate(static_leaves) if isinstance(leaf, Tensor)}
        storages = {storage_key(t.untyped_storage()) for t in state if t.layout is torch.strided}
        scalars: dict[tuple[torch.dtype, torch.device], list[int]] = {}
        tensor_of: dict[int, Tensor] = {}
        iterator = iter(tensors)
        for position, leaf in enumerate(leaves):
            if isinstance(leaf, Tensor):
                tensor_of[position] = next(iterator)
            if id(leaf) in inputs:
                self._passed[position] = inputs[id(leaf)]
            elif isinstance(leaf, Tensor):
                if leaf.layout is torch.strided and storage_key(leaf.untyped_storage()) in storages:
                    self._alive.append((position, tensor_of[position]))
                elif leaf.dim() == 0:
                    scalars.setdefault((leaf.dtype, leaf.device), []).append(position)
                else:
                    self._groups.append((tensor_of[position], [position], False))
            elif not isinstance(leaf, _CONSTANTS):
                raise NotLegal(
                    Problem(
                        f"the step returns a {type(leaf).__name__}, which may be another one on every step",
                        fix="Return tensors, numbers and strings in dicts, lists or tuples",
                    )
                )
        for positions in scalars.values():
            if len(positions) == 1:
                self._groups.append((tensor_of[positions[0]], positions, False))
            else:
                self._groups.append((torch.stack([tensor_of[p] for p in positions]), positions, True))
        # without the tensors: their history would keep the nodes that accumulate gradients, on this stream
        self._tree = map_leaves(_without_tensor, tree)
        self._leaves = list(map(_without_tensor, leaves))

    def __call__(self, leaves: Sequence[Any]) -> Any:
        """The results of the last replay, as tensors of their own.

        Args:
            leaves: the leaves of the present call.
        """
        values = list(self._leaves)
        for static, positions, packed in self._groups:
            copy = static.clone()
            if packed:
                for position, value in zip(positions, copy.unbind(), strict=True):
                    values[position] = value
            else:
                values[positions[0]] = copy
        for position, tensor in self._alive:
            values[position] = tensor.detach()
        for position, source in self._passed.items():
            values[position] = leaves[source]
        iterator = iter(values)
        return map_leaves(lambda _: next(iterator), self._tree)


def _without_tensor(leaf: Any) -> Any:
    return None if isinstance(leaf, Tensor) else leaf
