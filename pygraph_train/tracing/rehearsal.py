"""What a part of a step computes, found out by computing it once while the step is traced."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, fx

from pygraph_train.putting_back import ScratchState
from pygraph_train.torch_private.dispatch import no_fake_mode
from pygraph_train.torch_private.dynamo import placeholder_value
from pygraph_train.torch_private.island_gaps import island_of_node
from pygraph_train.torch_private.late_decisions import decided
from pygraph_train.torch_private.modes import putting_modes_back
from pygraph_train.torch_private.module_state import ModuleState
from pygraph_train.tracing.graph_calls import function_of
from pygraph_train.tracing.writes import maybe_written

__all__ = ["value_in_rehearsal"]


def value_in_rehearsal(node: fx.Node, device: torch.device) -> Any:
    """What a node of a graph of Dynamo's computes in the call that is traced. Nothing is changed.

    Raises:
        Exception: it cannot be computed alone.
    """
    nodes = [x for x in node.graph.nodes if x.target is not decided]
    nodes = nodes[: nodes.index(node) + 1]
    last = {given: x for x in nodes for given in x.all_input_nodes}
    with no_fake_mode(), torch.no_grad():
        values = {x: _alias(placeholder_value(x)) for x in nodes if x.op == "placeholder"}
        written = maybe_written(SimpleNamespace(graph=node.graph))  # type: ignore[arg-type]
        kept = [values[x] for x in written if isinstance(values.get(x), Tensor)]
        scratch, leave = ScratchState(device, kept), putting_modes_back({"cpu", device.type})
        try:
            for x in nodes:
                if x.op == "placeholder":
                    continue
                if x.op not in ("call_function", "call_method"):
                    raise ValueError(f"{x.op} is not rehearsed")
                args, kwargs = fx.node.map_arg((x.args, x.kwargs), values.__getitem__)
                one = island_of_node(x)
                state = None if one is None else ModuleState(one.present())
                values[x] = function_of(x)(*args, **kwargs)
                if state is not None and state.changed() is not None:
                    state.restore()
                    raise ValueError("a module that runs on the host changes its attributes")
                for given in x.all_input_nodes:
                    if last[given] is x:
                        values[given] = None
            return values[node]
        finally:
            leave()
            scratch.restore()


def _alias(value: Any) -> Any:
    """The same memory. What is written there is not counted as a change of the tensor, for it is put back."""
    return value.data if isinstance(value, Tensor) else value
