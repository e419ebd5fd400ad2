"""Tensors that a step lets require a gradient: they have to be made by the step."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pygraph_train.problems import Problem
from pygraph_train.torch_private.second_derivatives import require_gradient, required_gradients
from pygraph_train.tracing.reasons import line_of

__all__ = ["GivenTensors"]

_MAKE = {
    *("clone", "detach", "add", "sub", "mul", "div", "neg"),
    *(operator.add, operator.sub, operator.mul, operator.truediv, operator.neg),
    *(
        torch.clone,
        torch.detach,
        torch.add,
        torch.sub,
        torch.mul,
        torch.div,
        torch.lerp,
        torch.cat,
        torch.stack,
    ),
    *(torch.rand, torch.randn, torch.rand_like, torch.randn_like, torch.zeros, torch.ones, torch.linspace),
    *(
        torch.zeros_like,
        torch.ones_like,
        torch.full,
        torch.full_like,
        torch.empty,
        torch.empty_like,
        torch.where,
    ),
}
"""Methods and functions that never return what they are given."""


class GivenTensors:
    """Looks for tensors of the caller's among those that come to require a gradient in the step.

    Without a graph the flag stays on such a tensor, and its `.grad` grows from step to step. Some functions return what
    they are given (`F.dropout` in eval mode), and Dynamo takes the result for another tensor.

    Args:
        runs: whether the graph runs in the steps that examine the loop, on the caller's tensors. It is changed so that
            it notices them, and does what plain training does. Otherwise only operations that always make a tensor
            count.

    Attributes:
        problem: the reason against a graph, None as long as there is none.
    """

    def __init__(self, *, runs: bool) -> None:
        self._runs = runs
        self._found: list[Problem] = []

    @property
    def problem(self) -> Problem | None:
        return self._found[0] if self._found else None

    def look_at(self, graph: torch.fx.GraphModule) -> None:
        """Take the graph that Dynamo has made."""
        required = required_gradients(graph)
        inputs = [node for node in graph.graph.nodes if node.op in ("placeholder", "get_attr")]
        tensors = tuple(node for node in inputs if isinstance(node.meta.get("example_value"), Tensor))
        for node in required:
            made: Any = node.args[0]
            problem = Problem(
                "a tensor that the step was given is to require a gradient, and would do so in later steps",
                line_of(node),
                "Call x.detach().requires_grad_() or x.clone().requires_grad_()",
            )
            if self._runs:
                node.target = _noticing(self._found, problem)
                node.args = (made, *tensors)
            elif made.target not in _MAKE:
                self._found.append(problem)
        if required and self._runs:
            graph.recompile()


def _noticing(found: list[Problem], problem: Problem) -> Callable[..., None]:
    def require_gradient_of_new(tensor: Tensor, *given: Any) -> None:
        if any(tensor is one for one in given):
            found.append(problem)
        require_gradient(tensor)

    return require_gradient_of_new
