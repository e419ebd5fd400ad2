"""What phases of a step that are replayed on their own need of torch."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.nn.parallel import DistributedDataParallel

from pygraph_train.boundary import FORWARD, surely
from pygraph_train.torch_private.names import private

HigherOrderOperator: Any = private("torch._ops.HigherOrderOperator")

hooks_of: Callable[[Tensor], Any] = operator.attrgetter("_backward_hooks")
"""Hooks on the gradient of a tensor; None or empty without any. (2.11 to 2.15)"""

accumulation_hooks_of: Callable[[Tensor], Any] = operator.attrgetter("_post_accumulate_grad_hooks")
"""Hooks that run when a leaf has got its gradient; None or empty without any. (2.11 to 2.15)"""

set_grad_mode: Callable[[bool], None] = private("torch._C._set_grad_enabled")
"""What graphs of Dynamo call where a step switches gradients off and on. (2.11 to 2.15)"""

zero_all: Callable[[Sequence[Tensor]], None] = private("torch._foreach_zero_")
negate_all: Callable[[Sequence[Tensor]], None] = private("torch._foreach_neg_")
add_all: Callable[[Sequence[Tensor], Sequence[Tensor]], None] = private("torch._foreach_add_")
"""Add to each of these in place. (2.11 to 2.15)"""

backward_keeps_graph: Callable[[], bool] = private("torch._C._autograd._get_current_graph_task_keep_graph")
"""Whether the backward that runs in this thread was called with retain_graph=True. (2.11, 2.13)"""

present_backward: Callable[[], int] = private("torch._C._current_graph_task_id")
"""What tells the backward that runs in this thread from others; -1 where none does. (2.11 to 2.15)"""

at_end_of_backward: Callable[..., None] = private("torch.autograd.Variable._execution_engine.queue_callback")
"""Have something called when the present backward has ended without an exception. (2.11 to 2.15)"""

transforms: Callable[[], int] = private("torch._C._functorch.get_dynamic_layer_stack_depth")
end_transform: Callable[[], object] = private("torch._C._functorch.pop_dynamic_layer_stack")
"""How many transforms of `torch.func` are active, and what ends the innermost one. (2.11 to 2.15)"""


def is_transformed() -> bool:
    """Whether operations are for something else than training now. (2.11, 2.13)

    Transforms of `torch.func`, derivatives in forward mode, and `torch.jit.trace` take the operations of eager kernels.
    """
    tracing = forward_ad._current_level >= 0 or torch.jit.is_tracing()  # type: ignore[attr-defined]
    return tracing or transforms() > 0


def compiled_autograd_wanted() -> bool:
    """Whether backwards of what is compiled now will be traced. (2.11 to 2.15)"""
    wanted = torch._dynamo.config.compiled_autograd  # type: ignore[attr-defined]
    return bool(wanted or torch._dynamo.compiled_autograd.compiled_autograd_enabled)


def reaches(node: Any, *, asked: bool = False) -> bool:
    """Whether the present backward runs this node: `autograd.grad` and `backward(inputs=...)` run a part of the graph.

    `asked` is the answer for a leaf that `autograd.grad` was asked for. (2.11 to 2.15)
    """
    try:
        return bool(torch._C._will_engine_execute_node(node))
    except RuntimeError:
        return asked


@contextmanager
def around_forward(ddp: DistributedDataParallel) -> Iterator[None]:
    """What `ddp(...)` does before and after it calls its module, without inputs and outputs (torch 2.11, 2.13)."""
    ddp._pre_forward(None)
    yield
    ddp._post_forward(None)


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
