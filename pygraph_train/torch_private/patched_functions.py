"""Functions and methods of torch that somebody has replaced, in graphs that call the original."""

from __future__ import annotations

import inspect
import operator
import re
import sys
from collections.abc import Callable
from types import BuiltinFunctionType, CodeType, FunctionType
from typing import Any

import torch

from pygraph_train.torch_private.packages import layers_of

__all__ = ["call_originals"]


def call_originals(graph: torch.fx.GraphModule) -> bool:
    """Let a graph of Dynamo's call functions of torch as they were traced, whatever their names stand for by now.

    `F.relu = lambda x: old(x) * 2` is traced as a call of `old` and a product. The code of the graph calls `old` by the
    name that it has in torch, `torch.nn.functional.relu`. That is the replacement, so the product is made twice. Modes
    for functions of torch, which AOTAutograd traces under, go by the same name.

    A replaced method of tensors is traced in the same way where Dynamo knows where the tensor came from. For any other
    tensor the graph calls the replacement. In both cases the graph has the name of the method alone. (2.11, 2.13)

    Changes the graph. The code of each changed graph is made anew.

    Returns:
        Whether it changed anything.
    """
    changed = False
    for module in graph.modules():
        if not isinstance(module, torch.fx.GraphModule):
            continue
        calls = [(node, call) for node in module.graph.nodes if (call := _call_of(node)) is not None]
        for node, call in calls:
            node.op, node.target = "call_function", call
        if calls:
            module.recompile()
            changed = True
    return changed


def _call_of(node: torch.fx.Node) -> Callable[..., Any] | None:
    """What a node has to call in the place of what its name stands for. None where it may stay as it is."""
    target: Any = node.target
    if node.op == "call_function" and _is_replaced(target):
        return _past_modes(target)
    name = _method_of(node)
    if name is None:
        return None
    present = inspect.getattr_static(torch.Tensor, name, None)
    function: Any = present.fget if isinstance(present, property) else present
    codes = _foreign_codes(function)
    if not codes:
        return None
    original = vars(torch._C.TensorBase).get(name)
    if original is not None and any(_is_from(node, code) for code in codes):
        if node.op == "call_method":
            return _past_modes(original)
        if target is getattr:
            return _past_modes(lambda owner, name: original.__get__(owner))
    return _past_modes(present if node.op == "call_method" else target)


def _method_of(node: torch.fx.Node) -> str | None:
    """The name of the method, or property, of a tensor that a node asks for."""
    if node.op == "call_method":
        return str(node.target)
    if node.op == "call_function" and node.target is getattr:
        return str(node.args[1])
    return _OPERATORS.get(node.target) if node.op == "call_function" else None  # type: ignore[arg-type]


_OPERATORS = {operator.getitem: "__getitem__", operator.setitem: "__setitem__"}
"""Operators whose methods modes look up by name. (Those of arithmetic get the function itself.)"""


def _foreign_codes(function: Any) -> list[CodeType]:
    """The code in a function that is written in Python, and not by torch.

    Neither `functools.wraps` hides it, nor do decorators of torch.
    """
    foreign = [
        layer
        for layer, package in layers_of(function)
        if package != "torch" and (package != "builtins" or isinstance(layer, FunctionType))
    ]
    codes = [getattr(f, "__code__", None) or getattr(type(f).__call__, "__code__", None) for f in foreign]
    return [code for code in codes if code is not None]


def _is_from(node: torch.fx.Node, code: CodeType) -> bool:
    """Whether Dynamo made a node while it followed this code, or what that calls."""
    lines = [line for _, _, line in code.co_lines() if line is not None]
    for file, line, name in _FRAME.findall(node.stack_trace or ""):
        if file == code.co_filename and name == code.co_name and min(lines) <= int(line) <= max(lines):
            return True
    return False


_FRAME = re.compile(r'File "(.*)", line (\d+), in (.*)')


def _is_replaced(function: Any) -> bool:
    if not isinstance(function, (FunctionType, BuiltinFunctionType)):
        return False
    owner = function.__module__ or "torch"
    if owner.partition(".")[0] != "torch":
        return False
    place: Any = sys.modules.get(owner)
    if function.__qualname__ == f"Tensor.{function.__name__}":
        place = torch.Tensor
    return getattr(place, function.__name__, function) is not function


def _past_modes(function: Callable[..., Any]) -> Callable[..., Any]:
    """What calls the function, and is not of torch: code of graphs holds such functions themselves."""

    def called(*args: Any, **kwargs: Any) -> Any:
        with torch._C.DisableTorchFunction():  # a mode would get the replacement, which it looks up by name
            return function(*args, **kwargs)

    return called
