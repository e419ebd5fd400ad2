"""Changes of the graphs that Dynamo finds, so that they can be recorded."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.fx import GraphModule
from torch.utils.checkpoint import checkpoint

from pygraph_train.torch_private.phases import HigherOrderOperator

__all__ = ["prepared"]

_EAGER_OPERATORS = {"autograd_function_apply"}
"""Higher-order operators that eager kernels compute as plain training does."""


_OBSTACLES = {"set_", "shallow_copy_data_", "resize_", "resize_as_", "swap_tensors"}
"""What gives a tensor other memory, which a graph would not find."""


def _checkpointed(body: Any, *args: Any, **kwargs: Any) -> Any:
    """torch's own checkpoint: Dynamo's operator leaves random states to AOTAutograd."""
    return checkpoint(body, *args, use_reentrant=False, preserve_rng_state=True)


def prepared(gm: GraphModule) -> tuple[GraphModule, str | None]:
    """The graph with its higher-order operators made fit for eager kernels, and the reason why it stays plain."""
    changed = False
    for node in gm.graph.nodes:
        target = node.target
        name = target if isinstance(target, str) else getattr(target, "__name__", str(target))
        if node.op.startswith("call") and name.rpartition(".")[2] in _OBSTACLES:
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
