"""Conditions on values that a step computes, under Dynamo: `if loss.item() > 100`, `if torch.isnan(loss)`. (2.11, 2.13)

Dynamo ends a graph there. Where somebody knows the answer for the call that is traced, the trace goes on with it, and
the graph has a node that asks again.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from pygraph_train.torch_private.changes import Around
from pygraph_train.torch_private.dispatch import symbols_of
from pygraph_train.torch_private.jumps import conditional_jumps

__all__ = ["QUESTIONS", "OtherWay", "bounds_bool", "changes", "decided"]


class OtherWay(Exception):
    """A value that the step computes leads another way than that of the graph.

    Args:
        where: `file:line` of the question.
    """

    def __init__(self, where: str) -> None:
        super().__init__("a value that the step computes leads another way than that of its graph")
        self.where = where


QUESTIONS: dict[str, Callable[[Any], bool]] = {
    "bool": bool,
    "isfinite": math.isfinite,
    "isnan": math.isnan,
    "isinf": math.isinf,
}
"""What may be asked of a value, by name."""

Decide = Callable[[fx.Node, str, str], "bool | None"]
"""Of a node, a question about its value, and `file:line`: the answer in the call that is traced; None if not known."""


def decided(value: Any, question: str, answer: bool, where: str) -> None:
    """In a graph of Dynamo's: a question, and its answer in the call that is traced. No such graph is run."""
    raise AssertionError("a question was left in a graph")


def bounds_bool(node: fx.Node) -> bool:
    """Whether a node is Dynamo's assertion that a bool, as a number, is 0 or 1. (2.13)"""
    if node.target is not torch.ops.aten._assert_scalar.default:
        return False
    bound = node.args[0]
    return isinstance(bound, fx.Node) and getattr(bound.args[0], "target", None) is torch.sym_ite


def changes(decide: Decide) -> tuple[list[tuple[Any, str, Any]], list[tuple[Any, str, Any]]]:
    """(owner, attribute, value), for one trace: changes that come before all others, and those that come after."""
    from torch._dynamo.exc import Unsupported, UserError
    from torch._dynamo.variables.builtin import BuiltinVariable
    from torch._dynamo.variables.constant import ConstantVariable
    from torch._dynamo.variables.tensor import SymNodeVariable, TensorVariable
    from torch._dynamo.variables.torch import TorchInGraphFunctionVariable

    from pygraph_train.torch_private.past_obstacles import user_place

    def answer(output: Any, variable: Any, question: str = "bool") -> bool | None:
        variable = variable.realize()
        if output.current_tracer is not output.root_tracer:
            return None
        if isinstance(variable, SymNodeVariable) and _is_computed(variable.sym_num):
            node: fx.Node = variable.proxy.node
        elif type(variable) is TensorVariable:
            node = variable.as_proxy().node
            example = node.meta.get("example_value")
            if not isinstance(example, Tensor) or example.numel() != 1:
                return None
        else:
            return None
        if node.graph is not output.root_tracer.graph:
            return None
        where = user_place(output.current_tx)
        found = decide(node, question, where)
        if found is not None:
            output.create_node("call_function", decided, (node, question, found, where), {})
        return found

    def of_numbers(call_function: Callable[..., Any]) -> Callable[..., Any]:
        def called(variable: Any, tx: Any, args: Any, kwargs: Any) -> Any:
            name = getattr(variable.value, "__name__", "")
            if variable.value is QUESTIONS.get(name) and len(args) == 1 and not kwargs:
                found = (
                    answer(tx.output, args[0], name)
                    if isinstance(args[0].realize(), SymNodeVariable)
                    else None
                )
                if found is not None:
                    return ConstantVariable.create(found)
            return call_function(variable, tx, args, kwargs)

        return called

    def evaluating(evaluate_expr: Callable[..., Any]) -> Callable[..., Any]:
        def evaluated(variable: Any, output: Any = None) -> Any:
            asks = output is not None and isinstance(variable.sym_num, torch.SymBool)
            found = answer(output, variable) if asks else None
            return evaluate_expr(variable, output) if found is None else found

        return evaluated

    def of_python(call_function: Callable[..., Any]) -> Callable[..., Any]:
        def called(variable: Any, tx: Any, args: Any, kwargs: Any) -> Any:
            try:
                return call_function(variable, tx, args, kwargs)
            except (Unsupported, UserError):
                asks = variable.fn in (bool, operator.not_) and len(args) == 1
                found = answer(tx.output, args[0]) if asks else None
                if found is None:
                    raise
                return ConstantVariable.create(found is (variable.fn is bool))

        return called

    before = conditional_jumps(lambda tx, variable: answer(tx.output, variable))
    return before, [
        (SymNodeVariable, "evaluate_expr", Around(evaluating)),
        (TorchInGraphFunctionVariable, "call_function", Around(of_numbers)),
        (BuiltinVariable, "call_function", Around(of_python)),
    ]


def _is_computed(number: Any) -> bool:
    """Whether a symbol stands for what a tensor holds, and not for a size."""
    names = [str(symbol) for symbol in symbols_of([number])]
    return bool(names) and all(name.startswith(("u", "zuf")) for name in names)
