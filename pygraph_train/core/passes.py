"""Changes of the graphs that Dynamo finds, so that they can be recorded."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.fx import Graph, GraphModule, Node
from torch.utils.checkpoint import checkpoint

from pygraph_train.torch_private.phases import HigherOrderOperator

__all__ = ["halves", "prepared"]

_EAGER_OPERATORS = {"autograd_function_apply"}
"""Higher-order operators that eager kernels compute as plain training does."""


_OBSTACLES = {"set_", "shallow_copy_data_", "resize_", "resize_as_", "swap_tensors"}
"""What gives a tensor other memory, which a graph would not find."""

_WAIT = {"bincount", "nonzero", "unique", "unique_consecutive", "masked_select", "argwhere"}
"""What makes the host wait for the size of a result."""

_ALIASES = {"detach", "_get_data_attr"}
_GRAD_MODE = "_set_grad_enabled"
_AUTOCAST = {"_enter_autocast": 1, "_exit_autocast": -1}


def _checkpointed(body: Any, *args: Any, **kwargs: Any) -> Any:
    """torch's own checkpoint: Dynamo's operator leaves random states to AOTAutograd."""
    return checkpoint(body, *args, use_reentrant=False, preserve_rng_state=True)


def _name(node: Node) -> str:
    target = node.target
    name = target if isinstance(target, str) else getattr(target, "__name__", str(target))
    return name.rpartition(".")[2] if node.op.startswith("call") else ""


def halves(gm: GraphModule) -> tuple[GraphModule, GraphModule] | None:
    """The graph up to what no recording can hold, and the rest, which takes all inputs and what the first half makes.

    None where nothing is in the way, or where autocast begins or ends in only one of the halves.
    """
    nodes = list(gm.graph.nodes)
    place = next((i for i, n in enumerate(nodes) if _name(n) in _OBSTACLES | _WAIT), None)
    if place is None:
        return None
    first, rest = nodes[:place], nodes[place:]
    if sum(_AUTOCAST.get(_name(n), 0) for n in first):
        return None
    sunk = {n for n in first if _name(n) in _ALIASES and all(u in rest for u in n.users)}
    rest = [n for n in first if n in sunk] + rest
    first = [n for n in first if n not in sunk]
    inputs = [n for n in first if n.op == "placeholder"]
    handed = [n for n in first if n.op.startswith("call") and any(u in rest for u in n.users)]
    modes = [n.args[0] for n in first if _name(n) == _GRAD_MODE]
    off = bool(modes) and modes[-1] is False

    def graph(taken: list[Node], body: list[Node]) -> tuple[Graph, dict[Node, Node]]:
        made, copy = Graph(), {}
        for n in taken:
            copy[n] = made.placeholder(n.name)
        if body is rest and off:
            made.call_function(torch._C._set_grad_enabled, (False,))
        for n in body:
            if n.op != "placeholder":
                copy[n] = made.node_copy(n, copy.__getitem__)
        return made, copy

    head, copy = graph(inputs, first)
    if off:
        head.call_function(torch._C._set_grad_enabled, (True,))
    head.output(tuple(copy[n] for n in handed))
    tail, _ = graph(inputs + handed, rest)
    return GraphModule(gm, head), GraphModule(gm, tail)


def prepared(gm: GraphModule) -> tuple[GraphModule, str | None]:
    """The graph with its higher-order operators made fit for eager kernels, and the reason why it stays plain."""
    changed = False
    for node in gm.graph.nodes:
        target = node.target
        if (name := _name(node)) in _OBSTACLES:
            return gm, f"it gives a tensor other memory ({name})"
        if node.op != "call_function" or not isinstance(target, HigherOrderOperator):
            continue
        if target.name() == "tag_activation_checkpoint":
            node.target, changed = _checkpointed, True
        elif target.name() not in _EAGER_OPERATORS:
            return gm, f"eager kernels cannot compute {target.name()}"
    if changed:
        gm.recompile()
        bodies = [m for m in gm.modules() if isinstance(m, GraphModule) and m is not gm]
        if any(map(_draws, bodies)):
            return gm, "a checkpoint in it draws random numbers"
    return gm, None


def _draws(body: GraphModule) -> bool:
    if any(isinstance(m, nn.Dropout) and m.p for m in body.modules()):
        return True
    names = [str(n.target) for n in body.graph.nodes if n.op.startswith("call")]
    return any(word in name for name in names for word in ("drop", "rand", "bernoulli", "normal"))
