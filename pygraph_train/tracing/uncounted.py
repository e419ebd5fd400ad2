"""In-place changes that eager kernels do not count, and compiled code does: of statistics, and through `.data`.

The backward of an eager operation may have saved the tensor. With a call that runs as it is (a method, or one whose
inputs require a gradient) before a compiled one, and its backward after it, autograd would refuse that backward.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

from pygraph_train.torch_private.dynamo import writes_to_inputs
from pygraph_train.torch_private.memory import keep_versions, tensor_version

__all__ = ["changed_inputs", "counted_as_eager", "uncounted_changes"]

_ARGUMENTS = ("input", "running_mean", "running_var", "weight", "bias", "training")


def uncounted_changes(graph: torch.fx.GraphModule) -> list[int]:
    """Positions of the inputs that a graph of Dynamo changes so. To be asked before it is compiled."""
    changed = {source for _, source, rebinds in writes_to_inputs(graph) if not rebinds}
    found = {
        source for source in changed if tensor_version(source.meta["example_value"]) == 0
    }  # through `.data`
    return _places(graph, found | _statistics(graph))


def changed_inputs(graph: torch.fx.GraphModule) -> list[int]:
    """Positions of all inputs that a graph of Dynamo changes. To be asked before it is compiled."""
    return _places(graph, {source for _, source, _ in writes_to_inputs(graph)} | _statistics(graph))


def _statistics(graph: torch.fx.GraphModule) -> set[torch.fx.Node]:
    """Inputs that batch normalisation changes."""
    inputs, found = set(graph.graph.find_nodes(op="placeholder")), set[torch.fx.Node]()
    for node in graph.graph.find_nodes(op="call_function", target=functional.batch_norm):
        given = dict(zip(_ARGUMENTS, node.args, strict=False)) | node.kwargs
        if given.get("training", False) is not False:
            found |= {given.get("running_mean"), given.get("running_var")} & inputs
    return found


def _places(graph: torch.fx.GraphModule, found: set[torch.fx.Node]) -> list[int]:
    inputs = {node: index for index, node in enumerate(graph.graph.find_nodes(op="placeholder"))}
    return sorted(inputs[source] for source in found)


def counted_as_eager(compiled: Callable[..., Any], places: list[int]) -> Callable[..., Any]:
    """`compiled`, which does not count in-place changes of its inputs at these places."""
    if not places:
        return compiled

    def run(*args: Any) -> Any:
        with keep_versions([args[place] for place in places]):
            return compiled(*args)

    return run
