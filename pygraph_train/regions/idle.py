"""Functions that compute nothing: what Dynamo makes where a graph breaks inside of a block with autocast.

Before the break a graph enters autocast and leaves it, after the block another one hands through what it is given.
AOTAutograd's runtime would look at each of their tensors for a change and for an alias, in every step.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from pygraph_train.torch_private.dispatch import has_symbols
from pygraph_train.torch_private.modes import changes_autocast

__all__ = ["handing_through"]


def handing_through(gm: fx.GraphModule) -> Callable[..., Any] | None:
    """What does the same as a graph that computes nothing, None for other graphs.

    Args:
        gm: from Dynamo.
    """
    inputs = gm.graph.find_nodes(op="placeholder")
    others = [node for node in gm.graph.nodes if node.op not in ("placeholder", "output")]
    (outputs,) = gm.graph.output_node().args
    if not all(map(changes_autocast, others)) or not set(outputs) <= set(inputs):  # type: ignore[arg-type]
        return None
    values = [node.meta.get("example_value") for node in outputs]  # type: ignore[union-attr]
    if not all(isinstance(value, torch.Tensor) for value in values) or has_symbols(values):
        return None  # AOTAutograd tells Dynamo which sizes change
    places = [inputs.index(node) for node in outputs]  # type: ignore[union-attr]

    def run(*args: Any) -> tuple[Any, ...]:
        return tuple([args[i] for i in places])

    return run
