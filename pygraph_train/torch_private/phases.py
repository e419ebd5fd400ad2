"""What phases of a step that are replayed on their own need of torch."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from pygraph_train.boundary import FORWARD, surely
from pygraph_train.torch_private.names import private

HigherOrderOperator: Any = private("torch._ops.HigherOrderOperator")

hooks_of: Callable[[Tensor], Any] = operator.attrgetter("_backward_hooks")
"""Hooks on the gradient of a tensor; None or empty without any. (2.11 to 2.15)"""

accumulation_hooks_of: Callable[[Tensor], Any] = operator.attrgetter("_post_accumulate_grad_hooks")
"""Hooks that run when a leaf has got its gradient; None or empty without any. (2.11 to 2.15)"""

set_grad_mode: Callable[[bool], None] = private("torch._C._set_grad_enabled")
"""What graphs of Dynamo call where a step switches gradients off and on. (2.11 to 2.15)"""

add_all: Callable[[Sequence[Tensor], Sequence[Tensor]], None] = private("torch._foreach_add_")
"""Add to each of these in place. (2.11 to 2.15)"""

backward_keeps_graph: Callable[[], bool] = private("torch._C._autograd._get_current_graph_task_keep_graph")
"""Whether the backward that runs in this thread was called with retain_graph=True. (2.11, 2.13)"""

present_backward: Callable[[], int] = private("torch._C._current_graph_task_id")
"""What tells the backward that runs in this thread from others; -1 where none does. (2.11 to 2.15)"""

at_end_of_backward: Callable[[Callable[[], None]], None] = private(
    "torch.autograd.Variable._execution_engine.queue_callback"
)
"""Have something called when the present backward has ended without an exception. (2.11 to 2.15)"""


def is_transformed() -> bool:
    """Whether operations are for something else than training now. (2.11, 2.13)

    Transforms of `torch.func`, derivatives in forward mode, and `torch.jit.trace` take the operations of eager kernels.
    """
    return (
        torch._C._functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
        or torch.jit.is_tracing()  # type: ignore[attr-defined]
    )


def compiled_autograd_wanted() -> bool:
    """Whether backwards of what is compiled now will be traced. (2.11 to 2.15)"""
    import torch._dynamo.config as config

    return bool(config.compiled_autograd or torch._dynamo.compiled_autograd.compiled_autograd_enabled)


def restoring_modes(run: Callable[..., Any]) -> Callable[..., Any]:
    """A graph of Dynamo's that leaves no mode behind where an operation of it fails.

    Nodes of the graph begin and end `no_grad`, autocast and the choice of attention's kernels. (2.11 to 2.15)
    """
    sdp = torch.backends.cuda
    kinds = ("flash_sdp", "mem_efficient_sdp", "math_sdp", "cudnn_sdp")

    def nesting() -> int:
        torch.autocast_increment_nesting()
        return int(torch.autocast_decrement_nesting())

    def running(*given: Any) -> Any:
        gradients, depth = torch.is_grad_enabled(), nesting()
        casts = [(d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")]
        attention = [getattr(sdp, f"{kind}_enabled")() for kind in kinds]
        try:
            return run(*given)
        except BaseException:
            torch.set_grad_enabled(gradients)
            while nesting() > depth:
                torch.autocast_decrement_nesting()
                torch.clear_autocast_cache()
            for device, enabled, dtype in casts:
                torch.set_autocast_enabled(device, enabled)
                torch.set_autocast_dtype(device, dtype)
            for kind, enabled in zip(kinds, attention, strict=True):
                getattr(sdp, f"enable_{kind}")(enabled)
            raise

    return running


def accumulation_of(leaf: Tensor) -> Any:
    """The node that adds to the gradient of a leaf. (2.11 to 2.15)"""
    return torch.autograd.graph.get_gradient_edge(leaf).node


def reaches(node: Any, *, asked: bool = False) -> bool:
    """Whether the present backward runs this node: `autograd.grad` and `backward(inputs=...)` run a part of the graph.

    Args:
        node: of the graph.
        asked: the answer for a leaf that `autograd.grad` was asked for. (2.11 to 2.15)
    """
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:
        return asked


def is_asked_for(tensor: Tensor) -> bool:
    """Whether somebody wants the gradient of this result itself, as it is seen in a backward. (2.11 to 2.15)

    Hooks that Fabric registers on results do not count: they look where a backward comes from.
    """
    hooks = [getattr(hook, "func", hook) for hook in (hooks_of(tensor) or {}).values()]
    if tensor.retains_grad or any(not hook.__module__.startswith("lightning.") for hook in hooks):
        return True
    node = tensor.grad_fn
    if node is None or not reaches(node):
        return False
    return not any(reaches(behind, asked=True) for behind, _ in node.next_functions if behind is not None)


def autocast_now(device: str) -> torch.dtype | None:
    """What operations of this kind of device compute in under the present autocast, None without one."""
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def is_static(tensor: Tensor) -> bool:
    """Whether Dynamo has found a tensor in a module, or was told that it keeps its address. (2.11 to 2.15)"""
    return hasattr(tensor, "_dynamo_static_input_type")


def compiled_by(
    name: str, gm: torch.fx.GraphModule, examples: Sequence[Any], **options: Any
) -> Callable[..., Any]:
    """A graph of Dynamo's, compiled so that backwards leave alone what was saved for them. (2.11 to 2.15)

    Args:
        name: a backend of torch: "inductor", or "aot_eager_default_partitioner" for eager kernels under AOTAutograd.
        gm, examples: from Dynamo.
        **options: of that backend.
    """
    compiler: Any = torch._dynamo.lookup_backend(name)  # type: ignore[attr-defined]
    with torch._functorch.config.patch(donated_buffer=False):
        compiled = compiler(gm, list(examples), **options)

    def run(*given: Any) -> Any:
        made = compiled(*given)
        for output in made:
            if isinstance(output, Tensor) and output.grad_fn is not None:
                surely(partial(_say_nothing_is_donated, output.grad_fn), FORWARD)
        return made

    return run


def _say_nothing_is_donated(node: Any) -> None:
    """AOTAutograd takes buffers that it was not to look for as donated, and refuses `retain_graph`."""
    while node is not None:
        metadata = getattr(getattr(node, "_forward_cls", None), "metadata", None)
        if metadata is not None:
            metadata.bw_donated_idxs = []
            return
        node = next((further for further, _ in node.next_functions), None)
