"""Activation checkpointing in graphs of Dynamo that run with eager kernels.

Dynamo leaves it to Inductor that a recomputation draws the random numbers of the forward once more. Without Inductor
it would draw others.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from pygraph_train.problems import Problem
from pygraph_train.torch_private.dispatch import TorchDispatchMode, mode_of_fakes, operator_draws
from pygraph_train.torch_private.dynamo import (
    CHECKPOINT,
    CUSTOM_FUNCTION,
    assign_data,
    have_code,
    without_grad_mode,
    writes_to_inputs,
)
from pygraph_train.torch_private.patched_functions import call_originals
from pygraph_train.tracing.reasons import line_of

__all__ = [
    "CHANGED_AGAIN",
    "RandomDraws",
    "as_eager",
    "checkpoint_that_adds",
    "draws_numbers",
    "eager_copy",
    "has_checkpoint",
    "write_in_checkpoint",
]

CHANGED_AGAIN = (
    "a checkpoint changes tensors that outlive it (for example, statistics of a BatchNorm). Its "
    "recomputation changes them again, but compiled functions change them once"
)


def as_eager(graph: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Let checkpoints, custom functions, `x.data = y` and replaced functions do what they do in plain Python.

    Changes the graph and returns it.
    """
    call_originals(graph)
    for module in graph.modules():
        if isinstance(module, torch.fx.GraphModule):
            for node in module.graph.nodes:
                if node.target is CUSTOM_FUNCTION:
                    without_grad_mode(getattr(module, node.args[1].target))
            nodes = [node for node in module.graph.nodes if node.target is CHECKPOINT]
            for node in nodes:
                node.target = _checkpoint
            if assign_data(module.graph) or nodes:
                module.recompile()
    have_code(graph)
    return graph


def eager_copy(graph: torch.fx.GraphModule) -> torch.fx.GraphModule | None:
    """Another module like `as_eager(graph)`, and `graph` stays as it is. None for a graph that holds graphs itself."""
    if any(isinstance(child, torch.fx.GraphModule) for child in graph.children()):
        return None
    copied = as_eager(torch.fx.GraphModule(graph, copy.deepcopy(graph.graph)))
    for node in copied.graph.nodes:
        node.meta.clear()  # what the compiler knows would live as long as the copy
    return copied


def has_checkpoint(graph: torch.fx.GraphModule) -> bool:
    """Whether a graph of Dynamo's holds a checkpoint."""
    modules = [m for m in graph.modules() if isinstance(m, torch.fx.GraphModule)]
    return any(node.target is CHECKPOINT for module in modules for node in module.graph.nodes)


def write_in_checkpoint(graph: torch.fx.GraphModule) -> torch.fx.Node | None:
    """An operation in a checkpoint that changes what it is given, as batch normalisation does with its statistics.

    Eager kernels make it once more in the recomputation, and compiled functions do not.
    """
    for module in graph.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            if node.target is CHECKPOINT:
                for write, _, _ in writes_to_inputs(getattr(module, node.args[0].target)):
                    return write
    return None


def checkpoint_that_adds(graph: torch.fx.GraphModule) -> Problem | None:
    """The reason against a checkpoint with `use_reentrant=True` that shares a parameter with other operations.

    Its own backward adds to the gradient of the parameter. The gradients of the other uses are added before or after
    that, and without reentrant checkpoints all of them are summed first.
    """
    for module in graph.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            if node.target is CHECKPOINT and node.kwargs.get("use_reentrant") in (None, True):
                shared = [x for x in node.all_input_nodes if x.op == "placeholder" and len(x.users) > 1]
                if any(_is_leaf(x.meta.get("example_value")) for x in shared):
                    return Problem(
                        "a checkpoint with use_reentrant=True adds to the gradient of a parameter that the step uses "
                        "more than once",
                        line_of(node),
                        "Use checkpoint(..., use_reentrant=False), which adds gradients in the usual backward",
                    )
    return None


def draws_numbers(graph: torch.fx.GraphModule) -> bool:
    """Whether operations of a graph of Dynamo's draw random numbers. Nothing is executed.

    Changes the graph, which must not run afterwards.
    """
    for module in graph.modules():
        for node in module.graph.nodes if isinstance(module, torch.fx.GraphModule) else ():
            if node.target is CHECKPOINT:
                node.target = _body
        if isinstance(module, torch.fx.GraphModule):
            module.recompile()
    inputs = [x.meta.get("example_value") for x in graph.graph.nodes if x.op == "placeholder"]
    try:
        with mode_of_fakes(inputs), RandomDraws() as mode:
            graph(*inputs)
    except Exception:  # what cannot be followed may draw
        return True
    return mode.seen


def _body(body: torch.fx.GraphModule, *args: Any, **options: Any) -> Any:
    """A checkpoint that keeps everything."""
    return body(*args)


def _is_leaf(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.requires_grad and value.is_leaf


def _checkpoint(body: torch.fx.GraphModule, *args: Any, **options: Any) -> Any:
    """The operator of Dynamo, whose `body` is a graph of its own.

    A capture cannot put a generator back to where it was, and raises: it is asked to only where numbers are drawn.
    """
    kept: dict[str, Any] = {name: options[name] for name in ("determinism_check", "debug") if name in options}
    if "_checkpoint_context_fn" in body.meta:
        kept["context_fn"] = body.meta["_checkpoint_context_fn"]
    kept["preserve_rng_state"] = options.get("preserve_rng_state", True) and body.meta.get("draws", True)
    # what has no gradient is held as a module's buffers are in plain Python: it may change in place meanwhile, as
    # the counter of batch normalisation does
    inputs = [x for x in args if isinstance(x, torch.Tensor) and x.requires_grad]

    def run(*given: torch.Tensor) -> Any:
        of = {id(x): new for x, new in zip(inputs, given, strict=True)}
        return body(*[of.get(id(x), x) for x in args])

    if "draws" in body.meta:
        return checkpoint(run, *inputs, use_reentrant=False, **kept)
    with RandomDraws() as mode:
        result = checkpoint(run, *inputs, use_reentrant=False, **kept)
    body.meta["draws"] = mode.seen
    return result


class RandomDraws(TorchDispatchMode):
    """Sees whether operations draw random numbers.

    Attributes:
        seen: whether one did.
    """

    seen = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen |= operator_draws(func, args, kwargs or {})
        return func(*args, **(kwargs or {}))
