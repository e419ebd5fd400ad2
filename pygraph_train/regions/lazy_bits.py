"""Tensors that are conjugated or negated lazily: a bit says so, and their memory has the numbers of before.

Operators of PyTorch heed the bit. Kernels that were compiled for tensors without it read the memory, and compute
something else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from pygraph_train.torch_private.dispatch import OpOverload, conjugates_lazily

__all__ = ["is_lazy", "resolved_before_views_as_real", "without_lazy_bits"]


def is_lazy(x: Any) -> bool:
    """Whether something is such a tensor."""
    return isinstance(x, torch.Tensor) and (x.is_conj() or x.is_neg())


def without_lazy_bits(gradients: Sequence[Any]) -> tuple[Any, ...]:
    """The same numbers in memory."""
    return tuple([x.resolve_conj().resolve_neg() if is_lazy(x) else x for x in gradients])


def resolved_before_views_as_real(gm: fx.GraphModule) -> None:
    """Write out what is conjugated before `view_as_real`, which refuses the bit.

    AOTAutograd traces without such bits, and leaves out the `resolve_conj` of autograd and of the user. When the graph
    runs, its `_conj` sets them.

    Args:
        gm: from AOTAutograd; changed.
    """
    operators, changed = torch.ops.aten, False
    for node in gm.graph.find_nodes(op="call_function", target=operators.view_as_real.default):
        source = node.args[0]
        if _views_something_conjugated(source):
            with gm.graph.inserting_before(node):
                resolved = gm.graph.call_function(operators.resolve_conj.default, (source,))
            resolved.meta.update(source.meta)
            node.replace_input_with(source, resolved)
            changed = True
    if changed:
        gm.recompile()


def _views_something_conjugated(node: fx.Node) -> bool:
    """Whether it is a view of what `_conj` returns, or that itself."""
    while not conjugates_lazily(node.target):
        if not isinstance(node.target, OpOverload) or not node.target.is_view:
            return False
        source = node.args[0]
        if not isinstance(source, fx.Node):
            return False
        node = source
    return True
