"""Functions of torch that somebody has replaced, in graphs that call the original."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch

__all__ = ["call_originals"]


def call_originals(graph: torch.fx.GraphModule) -> bool:
    """Let a graph of Dynamo's call functions of torch as they were traced, whatever their names stand for by now.

    `F.relu = lambda x: old(x) * 2` is traced as a call of `old` and a product. The code of the graph calls `old` by the
    name that it has in torch, `torch.nn.functional.relu`. That is the replacement, so the product is made twice. Modes
    for functions of torch, which AOTAutograd traces under, go by the same name. (2.11, 2.13)

    Changes the graph. The code of each changed graph is made anew.

    Returns:
        Whether it changed anything.
    """
    changed = False
    for module in graph.modules():
        if not isinstance(module, torch.fx.GraphModule):
            continue
        nodes = [
            node for node in module.graph.nodes if node.op == "call_function" and _is_replaced(node.target)
        ]
        for node in nodes:
            node.target = _original(node.target)
        if nodes:
            module.recompile()
            changed = True
    return changed


def _is_replaced(function: Any) -> bool:
    if not isinstance(function, (FunctionType, BuiltinFunctionType)):
        return False
    owner = function.__module__ or "torch"
    if owner.partition(".")[0] != "torch":
        return False
    return getattr(sys.modules.get(owner), function.__name__, function) is not function


@functools.cache
def _original(function: Callable[..., Any]) -> Callable[..., Any]:
    """What calls the function, and is not of torch: code of graphs holds such functions themselves."""

    def original(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():  # a mode would get the replacement, which it looks up by name
            return function(*args, **kwargs)

    return original
