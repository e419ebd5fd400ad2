"""Inputs of a Dynamo graph whose history no result of it has, as the loss of an earlier step that is only detached.

Autograd's node of a compiled function knows all inputs that require a gradient. A backward goes on from there to what
they were made of, also where it has no gradient for them, and that may be a graph that was let go of. The nodes of
plain training know nothing of such inputs. So the function gets them without their history.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, fx

from pygraph_train.torch_private.autograd import nodes_behind
from pygraph_train.torch_private.dispatch import HigherOrderOperator
from pygraph_train.torch_private.dynamo import writes_to_inputs

__all__ = ["without_unused_histories"]

_Compile = Callable[[Sequence[Any]], Callable[..., Any]]


def without_unused_histories(
    gm: fx.GraphModule, example_inputs: Sequence[Any], compiling: _Compile
) -> Callable[..., Any]:
    """What `compiling` returns for these inputs, and a call of it detaches those whose history has no use."""
    unused = _unused(gm)
    if not unused:
        return compiling(example_inputs)
    examples = list(example_inputs)
    for i, example in unused.items():
        examples[i] = example.detach()
    compiled = compiling(examples)

    def run(*args: Any) -> Any:
        given = list(args)
        for i in unused:
            given[i] = given[i].detach()
        return compiled(*given)

    return run


def _unused(gm: fx.GraphModule) -> dict[int, Tensor]:
    """Places of inputs that no result of the graph is differentiated by, and what they are like."""
    inputs = [node.meta.get("example_value") for node in gm.graph.nodes if node.op == "placeholder"]
    found = {i: x for i, x in enumerate(inputs) if isinstance(x, Tensor) and x.grad_fn is not None}
    if (
        not found
        or writes_to_inputs(gm)
        or any(isinstance(n.target, HigherOrderOperator) for n in gm.graph.nodes)
    ):
        return {}
    outputs: Any = gm.graph.output_node().args[0]
    results = [x.meta.get("example_value") for x in outputs if isinstance(x, fx.Node)]
    differentiable = [x for x in results if isinstance(x, Tensor) and x.requires_grad]
    if any(x.is_leaf for x in differentiable):  # one that was made here without a history says nothing
        return {}
    used = set(nodes_behind(*(x.grad_fn for x in differentiable)))
    return {i: x for i, x in found.items() if x.grad_fn not in used}
