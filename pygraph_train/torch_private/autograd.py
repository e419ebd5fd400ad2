"""Private APIs of autograd's engine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.autograd import forward_ad

from pygraph_train.torch_private.hooks import saved_tensors_hooks_active
from pygraph_train.torch_private.traces_of_threads import no_other_trace

__all__ = [
    "arrival_of",
    "autograd_is_traced",
    "autograd_is_watched",
    "backward_ends_at",
    "backward_keeps_graph",
    "backwards_called_again",
    "compiled_autograd_wanted",
    "compiled_kernels_refuse",
    "detects_anomalies",
    "differentiated_inside",
    "edges_in_order",
    "entries_into_forward_mode",
    "is_cast",
    "is_function_in_python",
    "is_transformed",
    "leaves_of",
    "nodes_behind",
    "operations_behind",
    "refuse_retaining",
    "refuse_second_backward",
]


def backward_keeps_graph() -> bool:
    """Whether the backward that runs in this thread was called with retain_graph=True. (2.11, 2.13)"""
    return torch._C._autograd._get_current_graph_task_keep_graph()


@contextmanager
def differentiated_inside(look: Callable[[], None], *, again: bool) -> Iterator[None]:
    """Call `look` where this thread differentiates something inside. (2.11, 2.13)

    Transforms of `torch.func` do not count, which can be traced.

    Args:
        again: only `create_graph=True` counts.
    """
    run, thread = getattr(torch.autograd, "_engine_run_backward", None), threading.get_ident()
    if run is None:
        yield
        return

    def looked_at(outputs: Any, gradients: Any, retain: bool, create: bool, *args: Any, **kwargs: Any) -> Any:
        if (create or not again) and threading.get_ident() == thread and not is_transformed():
            look()
        return run(outputs, gradients, retain, create, *args, **kwargs)

    vars(torch.autograd)["_engine_run_backward"] = looked_at
    try:
        yield
    finally:
        vars(torch.autograd)["_engine_run_backward"] = run


def backward_ends_at(tensor: torch.Tensor) -> bool:
    """Whether the backward that runs in this thread computes nothing of what a tensor was made of. (2.11, 2.13)"""
    sources = [node for node, _ in tensor.grad_fn.next_functions if node is not None]  # type: ignore[union-attr]
    inner = [node for node in sources if not hasattr(node, "variable")]  # a leaf's may not be asked for
    return bool(inner) and not any(map(torch._C._will_engine_execute_node, inner))


def nodes_behind(*nodes: Any, until: Iterable[Any] = ()) -> Iterator[Any]:
    """These nodes of an autograd graph and all those that they are computed from, each once. (2.11, 2.13)

    Args:
        nodes: to begin with.
        until: neither these nodes nor what leads to them only.
    """
    seen, left = set(until), list(nodes)
    while left:
        node = left.pop()
        if node is not None and node not in seen:
            seen.add(node)
            yield node
            left += [source for source, _ in node.next_functions]


_OPERATIONS_PER_NODE = 3
"""One forward, and two for the gradients of what it computes with. For six models (BERT, GPT-2, XLNet, ViT-S,
MobileNetV3, an MLP) under autocast, graphs of whole steps with eager kernels held 2.2 to 4.4 for each node."""

_VIEWS = {
    *("Alias", "AsStrided", "Diagonal", "Expand", "Permute", "ReshapeAlias", "Select", "Slice", "Split"),
    *(
        "SplitWithSizes",
        "Squeeze",
        "T",
        "Transpose",
        "Unbind",
        "Unflatten",
        "Unfold",
        "UnsafeSplit",
        "UnsafeView",
    ),
    *("Unsqueeze", "View"),
}
"""What begins the names of nodes whose operators compute nothing."""


def operations_behind(results: Iterable[torch.Tensor], inputs: Iterable[torch.Tensor]) -> int:
    """About how many operations a device makes for a forward that has ended, and for its backward. (2.11, 2.13)

    Args:
        results: of the forward.
        inputs: whatever led to them is not counted.
    """
    nodes = nodes_behind(*(x.grad_fn for x in results), until=(x.grad_fn for x in inputs))
    computed = [node for node in nodes if not hasattr(node, "variable")]  # which those of parameters have
    count = sum(node.name().partition("Backward")[0] not in _VIEWS for node in computed)
    return _OPERATIONS_PER_NODE * count


def arrival_of(tensor: torch.Tensor) -> tuple[Any, int]:
    """Where a tensor's gradient arrives: a node of an autograd graph, and which of its results. (2.11, 2.13)"""
    edge = torch.autograd.graph.get_gradient_edge(tensor)
    return edge.node, edge.output_nr


def is_cast(node: Any) -> bool:
    """Whether a node of an autograd graph is that of a change of type. (2.11, 2.13)"""
    return str(node.name()).startswith("ToCopyBackward")


def is_function_in_python(node: Any) -> bool:
    """Whether a node of an autograd graph is that of a `torch.autograd.Function`. (2.11, 2.13)"""
    return hasattr(node, "_forward_cls")


def edges_in_order(roots: Sequence[torch.Tensor]) -> Iterator[tuple[Any, Any, int]]:
    """Where gradients come from, where they arrive, and at which result there: as a backward from `roots` makes them.

    Of nodes that one thread has made, the engine calls the latest first. (2.11, 2.13)
    """
    nodes = [node for node in nodes_behind(*(x.grad_fn for x in roots)) if not hasattr(node, "variable")]
    for node in sorted(nodes, key=lambda node: node._sequence_nr(), reverse=True):
        for target, place in node.next_functions:
            if target is not None:
                yield node, target, place


def leaves_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Tensors whose `.grad` a backward from this one writes to. (2.11, 2.13)"""
    nodes = nodes_behind(tensor.grad_fn)
    return [node.variable for node in nodes if node.name() == "torch::autograd::AccumulateGrad"]


def compiled_kernels_refuse(error: RuntimeError) -> bool:
    """Whether the backward of a compiled function cannot do what eager kernels do. (2.11, 2.13)"""
    known = (
        "does not currently support double backward",
        "compiled with non-empty donated buffers",
        "appears to not have been used in the graph",
    )
    return any(part in str(error) for part in known)


def autograd_is_watched() -> bool:
    """Whether somebody wants to see what is saved for a backward, or transforms it. (2.11, 2.13)"""
    return saved_tensors_hooks_active() or autograd_is_traced()


def compiled_autograd_wanted() -> bool:
    """Whether backwards of what is compiled now will be traced. (2.11, 2.13)"""
    import torch._dynamo.config as config

    return config.compiled_autograd or torch._dynamo.compiled_autograd.compiled_autograd_enabled


def autograd_is_traced() -> bool:
    """Whether autograd works for something else than the gradients of tensors. (2.11, 2.13)"""
    return (
        torch._C._functorch.peek_interpreter_stack() is not None
        or torch._dynamo.compiled_autograd.compiled_autograd_enabled
    )


def is_transformed() -> bool:
    """Whether operations are for something else than training now. (2.11, 2.13)

    Transforms of `torch.func`, derivatives in forward mode, and `torch.jit.trace` take the operations of eager kernels.
    """
    return (
        torch._C._functorch.peek_interpreter_stack() is not None
        or forward_ad._current_level >= 0
        or torch.jit.is_tracing()  # type: ignore[attr-defined]
    )


def entries_into_forward_mode(gm: torch.fx.GraphModule) -> list[torch.fx.Node]:
    """Where a graph of Dynamo begins to differentiate forward (`torch.func.jvp`, `forward_ad`). (2.11, 2.13)"""
    calls = (node for node in gm.graph.nodes if node.op == "call_function")
    return [node for node in calls if getattr(node.target, "__name__", "") == "_enter_dual_level"]


def refuse_retaining() -> None:
    """What AOTAutograd says where a backward that may write to what was saved has to keep it. (2.11, 2.13)"""
    if torch._functorch.config.donated_buffer:
        raise RuntimeError(
            "This backward function was compiled with non-empty donated buffers which requires create_graph=False "
            "and retain_graph=False. Please keep backward(create_graph=False, retain_graph=False) across all "
            "backward() function calls, or set torch._functorch.config.donated_buffer=False to disable donated "
            "buffer."
        )


def refuse_second_backward(
    gradients: Sequence[Any],
    message: str = "torch.compile with aot_autograd does not currently support double backward",
) -> Any:
    """Gradients that raise when they are differentiated, as those of every compiled function. (2.11, 2.13)"""
    given = [g if g is None else g.detach().requires_grad_() for g in gradients]
    return torch._C._functions.DelayedError(message.encode(), len(given))(*given)  # type: ignore[arg-type]


def detects_anomalies() -> bool:
    """Whether anomaly detection is on. AOTAutograd has it on while it traces, and so have all threads then."""
    if not torch.is_anomaly_enabled():
        return False
    with no_other_trace():
        return torch.is_anomaly_enabled()


def backwards_called_again() -> AbstractContextManager[None]:
    """Context: the backward of what is compiled leaves alone what was saved for it. (2.11, 2.13)

    By default it may write there, and `retain_graph=True` is refused.
    """
    return torch._functorch.config.patch(donated_buffer=False)  # type: ignore[no-any-return]
