"""`x ** n` with a number that changes from run to run: each value gets a compiled function of its own.

Dynamo makes such a number an input of the graph, and autograd's formula for the gradient of a power then fails (torch
2.11 and 2.13: "NYI SymInt equality"). A graph computes with one value of a number in any case.
"""

from __future__ import annotations

import operator

import torch
from torch import fx

__all__ = ["fix_exponents"]

_POWERS = frozenset({operator.pow, operator.ipow, torch.pow, torch.float_power})
_METHODS = frozenset({"pow", "pow_", "float_power", "float_power_"})


def fix_exponents(gm: fx.GraphModule) -> None:
    """Have Dynamo guard the numbers that tensors with gradients are raised to, and trace anew for other ones.

    Args:
        gm: from Dynamo. It stays as it is.
    """
    for node in gm.graph.nodes:
        if node.target not in (_METHODS if node.op == "call_method" else _POWERS):
            continue
        given = {**dict(zip(("input", "exponent"), node.args, strict=False)), **node.kwargs}
        base, exponent = _value(given.get("input")), _value(given.get("exponent"))
        if isinstance(base, torch.Tensor) and base.requires_grad and isinstance(exponent, torch.SymInt):
            int(exponent)


def _value(argument: object) -> object:
    return argument.meta.get("example_value") if isinstance(argument, fx.Node) else None
