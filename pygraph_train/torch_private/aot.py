"""AOTAutograd: compilation by it, and what it knows of a compiled function."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch

from pygraph_train.boundary import arranged
from pygraph_train.torch_private.attention import keep_dropout_on_device

__all__ = [
    "BuildRegion",
    "CompileKernels",
    "TracedGraph",
    "compile_with_aten",
    "compiled_function",
    "compiled_function_of",
    "donates",
    "dynamic_results",
    "forget_strides_of_last_outputs",
    "grad_mode_changed",
    "mark_dynamic",
    "runs_graph_only",
    "saved_and_checked",
    "saved_for_backward",
    "suggest_memory_format",
    "tangent_places",
]


def _forward_metadata() -> Any:
    """What AOTAutograd knows of the function that is compiled now, None where it compiles none."""
    context = torch._guards.TracingContext.try_get()
    return context.fw_metadata if context is not None else None


def tangent_places() -> tuple[int, ...] | None:
    """Where the backward that belongs to the forward compiled now has its gradients of outputs from.

    Positions among what autograd gives the compiled function's node: one for each input that is written, each
    result, and each tensor that results are views of. AOTAutograd leaves out what has no gradient. (2.11, 2.13)
    """
    from torch._functorch._aot_autograd.schemas import OutputType

    metadata = _forward_metadata()
    if metadata is None:
        return None
    own = (OutputType.non_alias, OutputType.unsafe_view_alias, OutputType.custom_function_view)
    inputs = [metadata.input_info[i] for i in metadata.mutated_inp_runtime_indices]
    has_gradient = [info.mutates_data and info.requires_grad for info in inputs]
    has_gradient += [
        info.output_type in own and issubclass(info.raw_type, torch.Tensor) and info.requires_grad
        for info in metadata.output_info
    ]
    has_gradient += [True] * metadata.num_intermediate_bases
    return tuple(i for i, has in enumerate(has_gradient) if has)


def compiled_function() -> int | None:
    """A number of the function that AOTAutograd compiles now, see `compiled_function_of`. (2.11, 2.13)"""
    from torch._functorch._aot_autograd.logging_utils import get_aot_compilation_context

    names = get_aot_compilation_context()[0]  # as in "3_forward"
    number = names[0].partition("_")[0] if names else ""
    return int(number) if number.isdigit() else None


def compiled_function_of(node: Any) -> int | None:
    """The number of the compiled function that a node of an autograd graph calls, None for other nodes. (2.11, 2.13)"""
    return getattr(getattr(node, "_forward_cls", None), "_aot_id", None)


def forget_strides_of_last_outputs(number: int) -> None:
    """Let AOTAutograd take none of a compiled graph's last outputs for something that is saved. (2.11, 2.13)"""
    context = torch._guards.TracingContext.try_get()
    if number and context is not None and context.output_strides:
        del context.output_strides[-number:]


def grad_mode_changed() -> bool:
    """Whether the function that is compiled now leaves another grad mode than it found. (2.11, 2.13)"""
    metadata = _forward_metadata()
    return metadata is not None and metadata.grad_enabled_mutation is not None


def dynamic_results() -> tuple[tuple[int, set[int]], ...]:
    """Results of the function that is compiled now which have sizes that change, and these dimensions. (2.11, 2.13)"""
    metadata = _forward_metadata()
    infos = metadata.output_info if metadata is not None else ()
    return tuple((i, info.dynamic_dims) for i, info in enumerate(infos) if info.dynamic_dims)


def runs_graph_only() -> bool:
    """Whether the runtime of what is compiled now, without gradients, only runs its graph. (2.11, 2.13)

    Otherwise it writes to inputs, makes results that are views anew, changes the grad mode, or puts effects in order.
    That it gives the graph other inputs, as for subclasses, and takes other results from it, shows in them. It always
    switches off gradients and autocast around the graph, and calls `mark_dynamic` for `dynamic_results`.
    """
    metadata = _forward_metadata()
    if metadata is None or any(
        info.mutates_data or info.mutates_metadata or info.mutates_storage_metadata
        for info in metadata.input_info
    ):
        return False
    views = metadata.num_outputs_aliased or metadata.num_intermediate_bases
    return not (views or metadata.tokens or metadata.grad_enabled_mutation is not None)


def mark_dynamic(tensor: torch.Tensor, dims: set[int]) -> None:
    """Tell Dynamo that these sizes of a compiled function's result change, as AOTAutograd does. (2.11, 2.13)"""
    _marker()(tensor, dims)


@functools.cache
def _marker() -> Callable[[torch.Tensor, set[int]], None]:
    from torch._functorch._aot_autograd import runtime_wrappers

    newer = getattr(runtime_wrappers, "mark_dynamo_propagated_dynamic_indices", None)
    return newer or runtime_wrappers.maybe_mark_dynamic_helper  # type: ignore[attr-defined,no-any-return]


def donates() -> bool:
    """Whether the backward that is compiled now may write to what was saved for it. (2.11, 2.13)"""
    metadata = _forward_metadata()
    return metadata is not None and bool(metadata.bw_donated_idxs)


def suggest_memory_format(tensor: torch.Tensor) -> torch.memory_format:
    """The order of dimensions that AOTAutograd gives gradients of such a tensor where its sizes change. (2.11, 2.13)"""
    return torch._prims_common.suggest_memory_format(tensor)


class TracedGraph(NamedTuple):
    """What AOTAutograd knows of a forward or backward graph. Indices count flat inputs and outputs."""

    phase: Literal["forward", "backward", "inference"]
    static: frozenset[int]
    mutated: frozenset[int]
    mutations: int
    saved_from: int


CompileKernels = Callable[[torch.fx.GraphModule, Sequence[Any]], Callable[[list[Any]], Any]]


BuildRegion = Callable[..., Callable[[list[Any]], Any]]


def _dropout(input: torch.Tensor, p: float, train: bool | None) -> Any:
    """Dropout as eager PyTorch computes it on a CPU: the factor is rounded to the tensor's type. (2.11, 2.13)

    AOTAutograd traces the operator that eager uses on GPUs only, which does not round it.
    """
    if input.device.type != "cpu" or train is False or not 0 < p <= 1:
        return NotImplemented
    if p == 1:  # draws nothing
        return input * torch.zeros((), dtype=input.dtype), torch.zeros_like(input, dtype=torch.bool)
    # numbers are drawn in the order in which they lie in memory, for which the functional operator has no strides
    like = torch.empty_like(input)
    strides = like.stride()
    order = sorted(range(like.dim()), key=lambda dim: (-strides[dim], dim))
    drawn = torch.ops.aten.bernoulli.p(like.permute(order), 1 - p)
    kept = drawn.permute([order.index(dim) for dim in range(like.dim())])
    return input * kept.div(1 - p), kept.to(torch.bool)


def _dropout_backward(gradient: torch.Tensor, kept: torch.Tensor, scale: float) -> Any:
    """See `_dropout`; the scale is 1 / (1 - p). (2.11, 2.13)"""
    if gradient.device.type != "cpu" or not scale:
        return NotImplemented
    return gradient * kept.to(gradient.dtype).div(1 / scale)


def compile_with_aten(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    build: BuildRegion,
    look: Callable[[torch.fx.GraphModule], None] | None = None,
) -> Callable[..., Any]:
    """AOTAutograd over aten operations as eager runs them: their kernels, in their order. (2.11, 2.13)

    What is saved for the backward is what autograd saves: `default_partition` leaves to the backward all that was
    traced there. Each input is let go of after its last use, as autograd does with what it has saved.

    Args:
        gm, example_inputs: from Dynamo.
        build: makes what runs a forward or backward graph.
        look: is shown the graph of both, before it is taken apart.
    """
    from functorch.compile import default_partition
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.compile_fx import get_static_input_idxs
    from torch._inductor.utils import count_tangents, num_fw_fixed_arguments
    from torch.fx._lazy_graph_module import _LazyGraphModule
    from torch.fx.graph import _BoxedCodeGen

    def compile_kernels(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
        keep_dropout_on_device(gm.graph)
        gm.graph.set_codegen(_BoxedCodeGen())
        gm.recompile()
        # before that `forward` calls the module, and hooks of all modules
        _LazyGraphModule.force_recompile(gm)
        kernels = gm.forward

        def run(arguments: list[Any]) -> Any:
            return kernels(arguments)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run

    given = len(example_inputs)  # the compilers live on, and must not keep the inputs

    def compiler(phase: Any) -> Callable[..., Any]:
        def compile(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
            static: Sequence[int] = range(count_tangents(gm))
            _note_what_is_donated()
            if phase != "backward":
                static = get_static_input_idxs(num_fw_fixed_arguments(given, len(inputs)))
            return build(compile_kernels, gm, inputs, _traced(gm, phase, frozenset(static)))

        def compiled(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
            """A region, or its eager kernels where the library fails."""
            return arranged(lambda: compile(gm, inputs), within_dynamo=True) or compile_kernels(gm, inputs)

        return compiled

    def partition(joint: torch.fx.GraphModule, *args: Any, **options: Any) -> Any:
        if look is not None:
            look(joint)
        _keep_checks_in_forward(joint)
        return default_partition(joint, *args, **options)

    with torch._functorch.config.patch(enable_autograd_cache=False), _operators_of_eager():
        return aot_autograd(
            fw_compiler=compiler("forward"),
            bw_compiler=compiler("backward"),
            inference_compiler=compiler("inference"),
            decompositions={
                torch.ops.aten.native_dropout.default: _dropout,
                torch.ops.aten.native_dropout_backward.default: _dropout_backward,
            },
            partition_fn=partition,
            keep_inference_input_mutations=True,
        )(gm, example_inputs)


@contextmanager
def _operators_of_eager() -> Iterator[None]:
    """Inside, a trace holds operators that torch otherwise rewrites in Python while it traces. (2.11, 2.13)

    It computes resized images from indices and weights, and takes its own batch normalisation for that of cuDNN.
    """
    keys = (torch._C.DispatchKey.Autograd, torch._C.DispatchKey.CompositeImplicitAutograd)
    packets = [name for name in dir(torch.ops.aten) if name.startswith(("upsample_", "_upsample_"))]
    found = [
        getattr(packet, name)
        for packet in (torch.ops.aten.cudnn_batch_norm, *(getattr(torch.ops.aten, name) for name in packets))
        for name in packet.overloads()
    ]
    kept = [(operator, dict(operator.py_kernels)) for operator in found]
    try:
        for operator, _ in kept:
            for key in keys:
                operator.py_kernels.pop(key, None)
            operator._dispatch_cache.clear()
        yield
    finally:
        for operator, kernels in kept:
            operator.py_kernels.update(kernels)
            operator._dispatch_cache.clear()


def _keep_checks_in_forward(joint: torch.fx.GraphModule) -> None:
    """Let a backward repeat no assertion of its forward: it would read what forward has changed since. (2.11, 2.13)

    `default_partition` has assertions in both, and all that they are computed from, buffers included.
    """
    assertions = (torch.ops.aten._assert_async.default, torch.ops.aten._assert_async.msg)
    of_backward: set[torch.fx.Node] = set()
    for node in joint.graph.nodes:
        if ("tangents" in node.name and node.op == "placeholder") or not of_backward.isdisjoint(
            node.all_input_nodes
        ):
            of_backward.add(node)
        elif node.target in assertions:
            node.meta["partitioner_tag"] = "must_be_in_forward"


def _traced(gm: torch.fx.GraphModule, phase: Any, static: frozenset[int]) -> TracedGraph:
    outputs = next(n for n in gm.graph.nodes if n.op == "output").args[0]
    saved_from, mutations = len(outputs), 0
    metadata = _forward_metadata()
    if phase != "backward" and metadata is not None:
        mutations = metadata.num_mutated_inp_runtime_indices
    if phase == "forward" and metadata is not None:
        saved_from = metadata.num_forward_returns
    return TracedGraph(phase, static, _mutated_inputs(gm), mutations, saved_from)


def _note_what_is_donated() -> None:
    """Under `backwards_called_again`: say that nothing is, or `retain_graph=True` is refused outside of it."""
    metadata = _forward_metadata()
    if not torch._functorch.config.donated_buffer and metadata is not None:
        metadata.bw_donated_idxs = []


_CHANGE_STATISTICS = (torch.ops.aten.cudnn_batch_norm.default, torch.ops.aten.miopen_batch_norm.default)
"""Operators that write to the statistics that they are given, and whose schemas do not say so. (2.11, 2.13)"""

_STATISTICS = ("running_mean", "running_var")


def _mutated_inputs(gm: torch.fx.GraphModule) -> frozenset[int]:
    placeholders = {n: i for i, n in enumerate(gm.graph.nodes) if n.op == "placeholder"}
    mutated = set()
    for node in gm.graph.nodes:
        if not isinstance(node.target, torch._ops.OpOverload):
            continue
        hidden = _STATISTICS if node.target in _CHANGE_STATISTICS else ()
        for argument, value in zip(node.target._schema.arguments, node.args, strict=False):
            if (argument.alias_info is not None and argument.alias_info.is_write) or argument.name in hidden:
                values = value if isinstance(value, (list, tuple)) else [value]
                mutated |= {placeholders[v] for v in values if v in placeholders}
    return frozenset(mutated)


def saved_for_backward(gm: torch.fx.GraphModule) -> frozenset[int]:
    """Indices of a forward graph's outputs that only its backward reads. (2.11, 2.13)"""
    from torch._functorch._aot_autograd import descriptors

    kinds = (descriptors.SavedForBackwardsAOTOutput, descriptors.SavedForBackwardsNoVcCheckAOTOutput)
    described = gm.graph.output_node().meta.get("desc") or ()
    return frozenset(i for i, desc in enumerate(described) if isinstance(desc, kinds))


def saved_and_checked(gm: torch.fx.GraphModule) -> frozenset[int]:
    """Of the outputs that are `saved_for_backward` those that nobody may change before. (2.11, 2.13)"""
    from torch._functorch._aot_autograd.descriptors import SavedForBackwardsAOTOutput

    described = gm.graph.output_node().meta.get("desc") or ()
    return frozenset(i for i, desc in enumerate(described) if isinstance(desc, SavedForBackwardsAOTOutput))
