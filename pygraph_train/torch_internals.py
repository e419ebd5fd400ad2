"""Every private torch API that the library uses, one function each, with the versions it was tried on."""

from __future__ import annotations

import functools
import logging
import sys
import traceback
import types
import warnings
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal, NamedTuple, TypeVar

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.hooks import RemovableHandle

from pygraph_train.torch_private import autocast, checkpoints, host_numbers, switches


def optimizer_step_hook_tables(optimizer: torch.optim.Optimizer) -> tuple[Mapping[int, Any], ...]:
    """The live tables of step hooks that `step()` runs: global and own (torch 2.11, 2.13)."""
    from torch.optim import optimizer as module

    return (
        module._global_optimizer_pre_hooks,
        optimizer._optimizer_step_pre_hooks,
        optimizer._optimizer_step_post_hooks,
        module._global_optimizer_post_hooks,
    )


def optimizer_step_override(optimizer: torch.optim.Optimizer) -> Any:
    """What someone put over `optimizer.step`, but for the schedulers' call counter (torch 2.11, 2.13)."""
    step = vars(optimizer).get("step")
    return None if step is None or getattr(step, "_wrapped_by_lr_sched", False) else step


def count_optimizer_step(optimizer: Any) -> None:
    """Note a `step()` that did not run, as schedulers have it do: they warn where it never did (torch 2.11, 2.13)."""
    step = vars(optimizer).get("step")
    if step is not None and getattr(step, "_wrapped_by_lr_sched", False):
        optimizer._opt_called = True


def optimizer_step_function(optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """The function that `step()` of its class runs between the hooks of the optimizer (torch 2.11, 2.13)."""
    step: Any = type(optimizer).step
    return step.__wrapped__ if getattr(step, "__code__", None) is _hooked_step() else step


@functools.cache
def _hooked_step() -> types.CodeType:
    hooked: Any = torch.optim.Optimizer.profile_hook_step(_hooked_step)
    code: types.CodeType = hooked.__code__
    return code


_OPTIMIZER_ATTRIBUTES = ("_step_supports_amp_scaling", "_need_device_dtype_check_for_fused")


def optimizer_private_attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The optimizer's attributes that fused steps set or need, as they are now (torch 2.11, 2.13)."""
    return {name: vars(optimizer)[name] for name in _OPTIMIZER_ATTRIBUTES if name in vars(optimizer)}


def restore_optimizer_private_attributes(optimizer: torch.optim.Optimizer, saved: Mapping[str, Any]) -> None:
    """Undo changes since `optimizer_private_attributes` (torch 2.11, 2.13)."""
    for name in _OPTIMIZER_ATTRIBUTES:
        if name in saved:
            setattr(optimizer, name, saved[name])
        else:
            vars(optimizer).pop(name, None)


def set_step_supports_amp_scaling(optimizer: torch.optim.Optimizer, supported: bool) -> None:
    """Tell GradScaler that `step()` takes grad_scale and found_inf (torch 2.11, 2.13)."""
    optimizer._step_supports_amp_scaling = supported  # type: ignore[attr-defined]


@functools.cache
def fused_adagrad_on_cuda() -> bool:
    """Whether fused Adagrad runs on CUDA (torch 2.11: no, 2.13: yes)."""
    # The version that brought the CUDA kernel also made Adagrad take GradScaler's tensors.
    optimizer = torch.optim.Adagrad([torch.zeros(1, requires_grad=True)], fused=True)
    return getattr(optimizer, "_step_supports_amp_scaling", False)


def tensor_version(tensor: torch.Tensor) -> int:
    """Counter of the in-place changes of a tensor (torch 2.11, 2.13)."""
    return int(tensor._version)


@contextmanager
def below_autograd() -> Iterator[None]:
    """Call operators as a dispatch mode sees them: no autograd, autocast or function modes (torch 2.13)."""
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
    with (
        torch._C.DisableTorchFunction(),
        torch._C._AutoDispatchBelowAutograd(),
        torch._C._ExcludeDispatchKeyGuard(keys),
    ):
        yield


def no_torch_function() -> AbstractContextManager[None]:
    """Calls inside are not shown to `TorchFunctionMode`s and `__torch_function__` (torch 2.13)."""
    return torch._C.DisableTorchFunction()


def storage_key(storage: torch.UntypedStorage) -> int:
    """Identity of a storage while it is alive, also when its memory moves or is empty (torch 2.13)."""
    return storage._cdata


def is_operator(func: object) -> bool:
    """Whether what a dispatch mode was given is an ordinary operator, not a higher-order one (torch 2.13)."""
    return isinstance(func, torch._ops.OpOverload)


def writes_arguments(func: torch._ops.OpOverload) -> bool:
    """Whether an operator's schema declares that it mutates an argument (torch 2.13)."""
    return func._schema.is_mutable


def replaces_memory(func: torch._ops.OpOverload) -> bool:
    """Whether an operator gives a tensor other memory, or memory of another size (torch 2.11, 2.13)."""
    packet = func._schema.name
    return packet == "aten::set_" or packet.startswith(("inductor::resize_storage_bytes_", "aten::resize_"))


def global_module_hook_tables() -> tuple[Mapping[int, Any], ...]:
    """The live tables of hooks that every module runs (torch 2.11, 2.13)."""
    from torch.nn.modules import module

    return (
        module._global_forward_hooks,
        module._global_forward_pre_hooks,
        module._global_backward_hooks,
        module._global_backward_pre_hooks,
    )


# --- Dynamo -----------------------------------------------------------------------------------------


def dynamo_cache_entries(code: types.CodeType) -> list[Any]:
    """Compiled variants of a frame, each with `.guard_manager` (tried on torch 2.11, 2.13)."""
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list

    return list(_debug_get_cache_entry_list(code))


def forget_compiled(code: types.CodeType) -> None:
    """Free the compiled variants of a code object. Its garbage collection does not see them: where they hold what
    holds it, nothing is ever freed. (2.11, 2.13)"""
    torch._C._dynamo.eval_frame.reset_code(code)


def tracing_notes(graph: torch.fx.GraphModule) -> list[tuple[Any, str]]:
    """Where the compilation of a frame keeps weak references to real tensors: (owner, attribute).

    To be called inside a backend with the graph it is given. (2.11, 2.13)
    """
    context = torch._guards.TracingContext.try_get()
    values = [node.meta.get("example_value") for node in graph.graph.nodes]
    modes: list[Any] = [value.fake_mode for value in values if isinstance(value, FakeTensor)]
    found: list[tuple[Any, str]] = []
    if context is not None:
        found.append((context, "tensor_to_context"))
        modes.append(context.fake_mode)
    for mode in {id(m): m for m in modes if m is not None}.values():
        found.append((mode.fake_tensor_converter.meta_converter.describer, "lookup_tensor"))
    return found


def forget_notes(notes: list[tuple[Any, str]]) -> None:
    """Once all is compiled: empty these. `swap_tensors` refuses tensors with weak references, and what is compiled
    keeps its fake tensors, which keep the notes. (2.11, 2.13)"""
    for owner, attribute in notes:
        setattr(owner, attribute, type(getattr(owner, attribute))())
    notes.clear()


@contextmanager
def _changed(changes: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Context: (owner, attribute, value), as many as there are.

    The `patch` of torch's config modules leaves a variable in the thread's context each time that it is called,
    and this is for every step.
    """
    before = []
    try:
        for owner, name, value in changes:
            # of a class what it holds itself: a static method is not the function that it gives
            old = vars(owner)[name] if isinstance(owner, type) else getattr(owner, name)
            before.append((owner, name, old))
            setattr(owner, name, value)
        yield
    finally:
        for owner, name, value in reversed(before):
            setattr(owner, name, value)


def _tracing(**settings: Any) -> AbstractContextManager[None]:
    """Dynamo with these settings, and with what it lacks.

    Numbers of the host are as eager has them, and it has no ideas of its own of optimizers.
    """
    import torch._dynamo.config as config

    settings["trace_numpy"] = False  # `host_numbers` has the reasons
    settings["enable_dynamo_decompositions"] = False  # `a.add_(b, alpha=c)` is rounded once, not twice
    settings["invalidate_compile_context_weakrefs"] = True  # `torch.utils.swap_tensors` refuses what has any
    changes = [(config, name, value) for name, value in settings.items()]
    mends = [*host_numbers.mends(), *checkpoints.mends(), *_mends(), *_quiet(), _forgetful()]
    return _changed([*changes, *mends, _optimizers_as_they_are(), _tracer()])


@functools.cache
def _forgetful() -> tuple[Any, str, Any]:
    """Let traces that Dynamo gives up hold no weak references to real tensors. (2.11, 2.13)

    `swap_tensors` refuses tensors with weak references, and traces are reference cycles. The guards hold some.
    So do two tables that Dynamo of 2.13 empties itself, and that of 2.11 only for traces that it takes.
    """
    from torch._dynamo.output_graph import DynamoTracerOutput

    made = DynamoTracerOutput.__init__

    def make(self: Any, tracer: Any, error: Any = None) -> None:
        made(self, tracer, error)
        if error:
            context = tracer.output.tracing_context
            describer = context.fake_mode.fake_tensor_converter.meta_converter.describer
            guards = (context.guards_context, "dynamo_guards")
            forget_notes([guards, (context, "tensor_to_context"), (describer, "lookup_tensor")])

    return DynamoTracerOutput, "__init__", make


@functools.cache
def _quiet() -> tuple[tuple[Any, str, Any], ...]:
    """Dynamo without its advice on graph breaks, for loops that never asked for it: the report has that. (2.11, 2.13)

    What it warns of only once it has not warned of then, and does when the user's own code is compiled.
    """
    import torch._dynamo.utils as utils
    from torch._dynamo.variables.tensor import TensorVariable

    warn_once = utils.warn_once

    def warn(msg: str, stacklevel: int = 1) -> None:
        if not msg.startswith("Dynamo does not know how to trace"):
            warn_once(msg, stacklevel + 1)

    return (
        (utils, "warn_once", warn),
        (TensorVariable, "_warn_capture_scalar_outputs", staticmethod(lambda: None)),
    )


@functools.cache
def _mends() -> tuple[tuple[Any, str, Any], ...]:
    """Methods of Dynamo's that set too few guards in torch 2.11, or fail for some; 2.13 needs none."""
    if torch.__version__ >= "2.13":  # compares versions, not text
        return ()
    from torch._dynamo.variables.user_defined import UserDefinedClassVariable
    from torch._guards import Guard

    return (
        (UserDefinedClassVariable, "var_getattr", _guarding(UserDefinedClassVariable.var_getattr)),
        (Guard, "set_export_info", _for_new_objects(Guard.set_export_info)),
    )


def _guarding(var_getattr: Callable[..., Any]) -> Callable[..., Any]:
    """Let guards stand for numbers, strings, enums and lists of them that are read from a class.

    As in `type(self).scale`. (2.11: pytorch #176851)
    """
    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._dynamo.source import AttrSource
    from torch._dynamo.variables import ConstantVariable, EnumVariable  # type: ignore[attr-defined]
    from torch._dynamo.variables.base import VariableTracker

    def guarded(self: Any, tx: Any, name: str) -> Any:
        found = var_getattr(self, tx, name)
        if self.source is None or found.source is not None or name.startswith("__"):
            return found
        source = AttrSource(self.source, name)
        if isinstance(found, ConstantVariable):
            install_guard(source.make_guard(GuardBuilder.CONSTANT_MATCH))
        elif isinstance(found, EnumVariable):
            install_guard(source.make_guard(GuardBuilder.ID_MATCH))
        elif ConstantVariable.is_literal(value := getattr(self.value, name, None)):  # a list, tuple or set
            return VariableTracker.build(tx, value, source)
        return found

    return guarded


def _for_new_objects(set_export_info: Callable[..., None]) -> Callable[..., None]:
    """Let guards be for a property that returns a new object each time, as some of transformers' configs have.

    With a filter guards are made twice, and torch wants the same object then. (2.11)
    """

    def set_anew(self: Any, *args: Any) -> None:
        self.obj_weakref = None
        set_export_info(self, *args)

    return set_anew


def dynamo_step_config() -> AbstractContextManager[None]:
    """Trace with every Python number specialised, so that a guard stands for it (torch 2.11, 2.13)."""
    import torch._dynamo.config as config

    return _tracing(
        specialize_int=True,
        specialize_float=True,
        allow_unspec_int_on_nn_module=False,
        automatic_dynamic_shapes=False,
        assume_static_by_default=True,
        capture_scalar_outputs=False,
        capture_dynamic_output_shape_ops=False,
        skip_nnmodule_hook_guards=True,  # `ModuleWatch` notices hooks registered in mid-run
        skip_tensor_guards_with_matching_dict_tags=False,  # and requires_grad_()
        side_effect_replay_policy="info",  # keeps the user's stack of every mutation
        recompile_limit=32,
        suppress_errors=False,
        # `warning_once` and its like (transformers puts them on Logger) say nothing the second time
        ignore_logging_functions=_Functions.of(
            *config.ignore_logging_functions,
            *[getattr(logging.Logger, name) for name in dir(logging.Logger) if name.endswith("_once")],
        ),
    )


@functools.cache
def _optimizers_as_they_are() -> tuple[Any, str, Any]:
    """Let an optimizer be traced as any other object. (2.11, 2.13)

    Otherwise Dynamo runs `_init_group` for real and sets few guards for what it does, takes `capturable` for
    True, moves step counts to the GPU, and loses what is written to the optimizer's attributes.
    """
    import torch._dynamo.variables.builder as builder
    from torch._dynamo.symbolic_convert import InstructionTranslator
    from torch._dynamo.variables.user_defined import UserDefinedObjectVariable

    def any_object(value: Any, *, source: Any, **kwargs: Any) -> Any:
        made = UserDefinedObjectVariable(value, source=source)
        return InstructionTranslator.current_tx().output.side_effects.track_object_existing(value, made)

    return builder, "OptimizerVariable", any_object


class _Functions(str):
    """Functions to iterate over, in a value that `json.dumps` takes: torch 2.11 logs Dynamo's options."""

    functions: tuple[Any, ...]

    @classmethod
    def of(cls, *functions: Any) -> _Functions:
        made = cls(", ".join(str(f) for f in functions))
        made.functions = functions
        return made

    def __iter__(self) -> Iterator[Any]:
        return iter(self.functions)

    def __contains__(self, function: object) -> bool:
        return function in self.functions


def dynamo_side_effects() -> list[tuple[str, str, traceback.StackSummary | None]]:
    """Python objects that the frame being compiled writes to; call inside a backend (torch 2.11, 2.13).

    Returns:
        One (source expression, attribute or "", user stack) for each write to an object that existed
        before the frame.
    """
    from torch._dynamo.symbolic_convert import InstructionTranslator
    from torch._dynamo.variables.base import AttributeMutationNew, ValueMutationNew

    output = InstructionTranslator.current_tx().output
    effects = output.side_effects
    found: list[tuple[str, str, traceback.StackSummary | None]] = []
    for variable in effects._get_modified_vars():
        if isinstance(variable.mutation_type, (AttributeMutationNew, ValueMutationNew)):
            continue
        source = variable.source.name if variable.source is not None else type(variable).__name__
        if callable(source):  # a method in older versions
            source = source()
        writes = effects.store_attr_mutations.get(variable, {})
        changed = [name for name, value in writes.items() if not _puts_back(output, source, name, value)]
        if writes and not changed:
            continue
        stacks: Any = effects.mutation_user_stacks.get(variable) or [None]
        found += [(source, attribute, stacks[0]) for attribute in changed or [""]]
    return found


def _puts_back(output: Any, source: str, attribute: str, value: Any) -> bool:
    """Whether an attribute holds, after the frame, the constant that it held before (torch 2.11, 2.13).

    Context variables are set at the start of a forward and reset at its end: nothing remains to be done.
    """
    try:
        owner = eval(source, {**output.global_scope, "L": output.local_scope, "G": output.global_scope})
        before = getattr(owner, attribute)
        after = value.as_python_constant()
    except Exception:  # Dynamo raises many kinds for values that are no constants
        return False
    return type(before) is type(after) and bool(before == after)


def dynamo_error_place(error: BaseException) -> str | None:
    """`file:line` of the user's code that Dynamo was tracing when it raised this, if it says so (torch 2.11, 2.13)."""
    frame = getattr(error, "innermost_user_frame_summary", None)
    return None if frame is None else f"{frame.filename}:{frame.lineno}"


def dynamo_asked_whether_compiling() -> bool:
    """Whether the frame being compiled has asked `torch.compiler.is_compiling()` or the like, which is False
    without Dynamo; call inside a backend (torch 2.11, 2.13)."""
    from torch._dynamo.symbolic_convert import InstructionTranslator

    return bool(InstructionTranslator.current_tx().inconsistent_side_effects)


def placeholder_source(node: torch.fx.Node) -> str | None:
    """Python expression over the frame's locals `L` that a graph input was read from (torch 2.11, 2.13)."""
    grapharg = node.meta.get("grapharg")
    source = getattr(grapharg, "source", None)
    if source is None:
        return None
    name = source.name
    return name() if callable(name) else name


def writes_to_inputs(graph: torch.fx.GraphModule) -> list[tuple[torch.fx.Node, torch.fx.Node, bool]]:
    """What a graph of Dynamo does to its inputs: (operation, input, whether it gets other memory). (2.11, 2.13)

    `x.data = y` is `torch.Tensor.set_` there. `x.data` is an operation whose result shares the memory of `x`, and
    counts the changes in place on its own. For these the operation is the first one that may be meant.
    """
    found = []
    for node in graph.graph.nodes:
        if node.target is torch.Tensor.set_:
            found.append((node, node.args[0], True))
            continue
        value = node.meta.get("example_value")
        is_data = node.target is torch._C._autograd._get_data_attr  # type: ignore[attr-defined]
        if isinstance(value, torch.Tensor) and (node.op == "placeholder" or is_data) and value._version > 0:
            users = [u for u in node.users if str(getattr(u.target, "__name__", u.target)).endswith("_")]
            found.append((next(iter(users or node.users), node), node.args[0] if is_data else node, False))
    return [(node, source, rebinds) for node, source, rebinds in found if source.op == "placeholder"]


def guarded_expression(guard: Any) -> str:
    """Python expression over `L` and `G` of what a `GuardFilterEntry` guards (torch 2.11, 2.13)."""
    name = guard.orig_guard.originating_source.name
    return name() if callable(name) else name


def guard_failures(guards: Any, frame_locals: dict[str, Any]) -> list[str]:
    """The guards of a cache entry's manager that do not hold, with their source lines (torch 2.11, 2.13)."""
    return [str(part) for part in guards.check_verbose(frame_locals).verbose_code_parts or ()]


# --- CUDA allocator and generators ------------------------------------------------------------------


def abandon_pool(device: int, pool: tuple[int, int]) -> None:
    """End an allocation to a graph pool that a failed capture left open (torch 2.11, 2.13)."""
    try:
        torch._C._cuda_endAllocateToPool(device, pool)
    except RuntimeError:
        return  # it was closed after all
    torch._C._cuda_releasePool(device, pool)


def clear_cublas_workspaces() -> None:
    """Free cuBLAS workspaces of all streams; the next product allocates its own (torch 2.11, 2.13)."""
    torch._C._cuda_clearCublasWorkspaces()


def refresh_scaler_state(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> None:
    """Forget that this optimizer's gradients were unscaled in this step (torch 2.11, 2.13)."""
    if scaler.is_enabled():  # else it has no such thing
        scaler._per_optimizer_states.pop(id(optimizer), None)


def cuda_graph_nodes(graph: torch.cuda.CUDAGraph) -> int:
    """Number of nodes of a captured graph, -1 without cuda-bindings (torch 2.11, cuda-bindings 13)."""
    try:
        from cuda.bindings import driver
    except ImportError:
        return -1
    answer: Any = driver.cuGraphGetNodes(driver.CUgraph(graph.raw_cuda_graph()))
    return int(answer[-1]) if int(answer[0]) == 0 else -1  # (status, nodes, count)


class _WithoutGeneratorState(TorchDispatchMode):
    """Leaves out what torch writes to the random generator's state on the device when a capture begins."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is torch.ops.aten.fill_.Scalar else func(*args, **(kwargs or {}))


def begin_capture(graph: torch.cuda.CUDAGraph, pool: tuple[int, int] | None) -> None:
    """Begin a capture in the current stream, in which nothing is launched.

    torch launches two kernels there that set the generator's seed and offset (2.11). Nothing reads them before
    a replay, which sets them itself.
    """
    with _WithoutGeneratorState():
        graph.capture_begin(pool, capture_error_mode="thread_local")  # type: ignore[arg-type]


def gradient_accumulators(leaves: Iterable[torch.Tensor]) -> list[Any]:
    """What adds to the gradients of these tensors; of the current stream, where it did not exist yet. (2.11, 2.13)"""
    wanted = [t for t in leaves if t.requires_grad and t.is_leaf and t.is_cuda]
    return [torch.autograd.graph.get_gradient_edge(t).node for t in wanted]


@contextmanager
def accumulators_of_other_streams() -> Iterator[None]:
    """Context without the warning that gradients are accumulated in another stream. (2.11, 2.13)"""
    before = list(warnings.filters)
    warnings.filterwarnings("ignore", "The AccumulateGrad node's stream does not match")
    ours = warnings.filters[0]
    try:
        yield
    finally:
        if ours not in before and ours in warnings.filters:  # the user's own changes stay
            warnings.filters.remove(ours)  # type: ignore[attr-defined]


def current_cuda_stream(device: int) -> int:
    """The cudaStream_t of this thread's current stream (torch 2.11)."""
    return torch._C._cuda_getCurrentRawStream(device)


def scaler_tensors(scaler: torch.amp.GradScaler) -> list[torch.Tensor]:
    """Scale and growth counter on the device, once they exist (torch 2.11, 2.13)."""
    tensors = (scaler._scale, scaler._growth_tracker) if scaler.is_enabled() else ()
    return [t for t in tensors if t is not None]


def module_hook_tables(module: torch.nn.Module) -> tuple[dict[int, Any], ...]:
    """The live tables of hooks that calling a module, or its backward, runs (torch 2.11, 2.13)."""
    return (
        module._forward_pre_hooks,
        module._forward_hooks,
        module._backward_pre_hooks,
        module._backward_hooks,
    )


def hook_registrations() -> int:
    """A number that grows with every hook registered on any tensor, module or optimizer (torch 2.11, 2.13)."""
    return RemovableHandle.next_id


def tensor_looks(tensors: Sequence[torch.Tensor]) -> Callable[..., bool]:
    """What tensors look like: type, dtype, device, shape, strides, requires_grad. (2.11, 2.13)

    Args:
        tensors: of any kind that has a shape.

    Returns:
        Whether as many other tensors, given as arguments, look the same. It is one call in C.
    """
    from torch._C._dynamo.guards import TensorGuards

    if not tensors:
        return lambda: True
    sizes: list[Any] = [list(t.shape) for t in tensors]
    strides: list[Any] = [
        list(t.stride()) if t.layout is torch.strided else [None] * t.dim() for t in tensors
    ]
    guards = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
    return guards.check


def parameters_go_unguarded() -> bool:
    """Whether what Dynamo compiles now misses a parameter that gets another shape or other strides.

    torch 2.11 skips guards of parameters while the dict of a module that holds them is as it was.
    """
    import torch._dynamo.config as config

    # compares versions, not text
    return torch.__version__ < "2.13" and config.skip_tensor_guards_with_matching_dict_tags


def hooks_on_accumulation(leaf: torch.Tensor) -> list[Any]:
    """Hooks that somebody registered on the node that adds to a leaf's gradient. (2.11, 2.13)

    Nothing tells them, but the handle of one more hook knows the table that it is in. That hook does not count
    among the `hook_registrations`.
    """
    if not leaf.requires_grad or not leaf.is_leaf:
        return []
    node = torch.autograd.graph.get_gradient_edge(leaf).node
    found: list[Any] = []
    for register in (node.register_hook, node.register_prehook):
        before = RemovableHandle.next_id
        handle = register(_no_hook)
        table = handle.hooks_dict_ref() or {}  # type: ignore[attr-defined]
        found += [hook for hook in table.values() if hook is not _no_hook]
        handle.remove()
        if RemovableHandle.next_id == before + 1:
            RemovableHandle.next_id = before
    return found


def _no_hook(*_: Any) -> None:
    """A hook that changes nothing."""


def saved_tensors_hooks_active() -> bool:
    """Whether hooks get what is saved for a backward just now. (2.11, 2.13)"""
    return torch._C._autograd._top_saved_tensors_default_hooks(True) is not None


storage_use_count: Callable[[int], int] = torch._C._storage_Use_Count
"""References to the storage whose `_cdata` is given. (2.11, 2.13)"""


def borrow_memory(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor over the same memory that does not own it. (2.11, 2.13)"""
    storage = tensor.untyped_storage()
    borrowed = torch._C._construct_storage_from_data_pointer(
        storage.data_ptr(), tensor.device, storage.nbytes()
    )
    empty = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return empty.set_(borrowed, tensor.storage_offset(), tensor.size(), tensor.stride())


def storages(values: Sequence[Any]) -> list[Hashable]:
    """What tells whether tensors share memory. It keeps none alive, but its place is not taken. (2.11, 2.13)"""
    from torch.multiprocessing.reductions import StorageWeakRef

    strided = [x for x in values if isinstance(x, torch.Tensor) and x.layout == torch.strided]
    return [StorageWeakRef(x.untyped_storage()) for x in strided]


def reinterpret_tensor(
    tensor: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int
) -> torch.Tensor:
    """A tensor over the same storage that autograd does not take for a view; `offset` counts from the
    tensor's own first element. (2.11, 2.13)"""
    reinterpret = torch._C._dynamo.guards._reinterpret_tensor  # type: ignore[attr-defined]
    return reinterpret(tensor, tuple(size), tuple(stride), offset)


def backward_keeps_graph() -> bool:
    """Whether the backward that runs in this thread was called with retain_graph=True. (2.11, 2.13)"""
    return torch._C._autograd._get_current_graph_task_keep_graph()


def backward_ends_at(tensor: torch.Tensor) -> bool:
    """Whether the backward that runs in this thread computes nothing of what a tensor was made of. (2.11, 2.13)"""
    sources = [node for node, _ in tensor.grad_fn.next_functions if node is not None]  # type: ignore[union-attr]
    inner = [node for node in sources if not hasattr(node, "variable")]  # a leaf's may not be asked for
    return bool(inner) and not any(map(torch._C._will_engine_execute_node, inner))


def compiled_kernels_refuse(error: RuntimeError) -> bool:
    """Whether the backward of a compiled function cannot do what eager kernels do. (2.11, 2.13)"""
    known = (
        "does not currently support double backward",
        "compiled with non-empty donated buffers",
        "appears to not have been used in the graph",
    )
    return any(part in str(error) for part in known)


def no_view(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory, as a tensor that autograd takes for no view. (2.11, 2.13)"""
    return torch.ops.aten._unsafe_view(tensor, tensor.size())  # type: ignore[no-any-return]


def autograd_is_watched() -> bool:
    """Whether somebody wants to see what is saved for a backward, or transforms it. (2.11, 2.13)"""
    return saved_tensors_hooks_active() or autograd_is_traced()


def compiled_autograd_wanted() -> bool:
    """Whether backwards of what is compiled now will be traced. (2.11, 2.13)"""
    import torch._dynamo.config as config

    return config.compiled_autograd or torch._dynamo.compiled_autograd.compiled_autograd_enabled


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


def autograd_is_traced() -> bool:
    """Whether autograd works for something else than the gradients of tensors. (2.11, 2.13)"""
    return (
        torch._C._functorch.peek_interpreter_stack() is not None
        or torch._dynamo.compiled_autograd.compiled_autograd_enabled
    )


def forget_strides_of_last_outputs(number: int) -> None:
    """Let AOTAutograd take none of a compiled graph's last outputs for something that is saved. (2.11, 2.13)"""
    context = torch._guards.TracingContext.try_get()
    if number and context is not None and context.output_strides:
        del context.output_strides[-number:]


def grad_mode_changed() -> bool:
    """Whether the function that is compiled now leaves another grad mode than it found. (2.11, 2.13)"""
    metadata = _forward_metadata()
    return metadata is not None and metadata.grad_enabled_mutation is not None


def refuse_retaining() -> None:
    """What AOTAutograd says where a backward that may write to what was saved has to keep it. (2.11, 2.13)"""
    if torch._functorch.config.donated_buffer:
        raise RuntimeError(
            "This backward function was compiled with non-empty donated buffers which requires create_graph=False "
            "and retain_graph=False. Please keep backward(create_graph=False, retain_graph=False) across all "
            "backward() function calls, or set torch._functorch.config.donated_buffer=False to disable donated "
            "buffer."
        )


def donates() -> bool:
    """Whether the backward that is compiled now may write to what was saved for it. (2.11, 2.13)"""
    metadata = _forward_metadata()
    return metadata is not None and bool(metadata.bw_donated_idxs)


def has_symbols(values: Iterable[Any]) -> bool:
    """Whether the size of a tensor is not a number. (2.11, 2.13)"""
    tensors = (x for x in values if isinstance(x, torch.Tensor))
    return any(not isinstance(n, int) for x in tensors for n in (*x.size(), *x.stride()))


def refuse_second_backward(
    gradients: Sequence[Any],
    message: str = "torch.compile with aot_autograd does not currently support double backward",
) -> Any:
    """Gradients that raise when they are differentiated, as those of every compiled function. (2.11, 2.13)"""
    given = [g if g is None else g.detach().requires_grad_() for g in gradients]
    return torch._C._functions.DelayedError(message.encode(), len(given))(*given)  # type: ignore[arg-type]


def autocast_enabled() -> bool:
    """Whether operations are cast, on any device, in this thread. (2.11, 2.13)"""
    return torch._C._is_any_autocast_enabled()


def no_autocast() -> AbstractContextManager[Any]:
    """Context in which no operation is cast. (2.11, 2.13)"""
    return torch._C._DisableAutocast()


def backwards_called_again() -> AbstractContextManager[None]:
    """Context: the backward of what is compiled leaves alone what was saved for it. (2.11, 2.13)

    By default it may write there, and `retain_graph=True` is refused.
    """
    return torch._functorch.config.patch(donated_buffer=False)  # type: ignore[no-any-return]


class TracedGraph(NamedTuple):
    """What AOTAutograd knows of a forward or backward graph. Indices count flat inputs and outputs."""

    phase: Literal["forward", "backward", "inference"]
    static: frozenset[int]
    mutated: frozenset[int]
    mutations: int
    saved_from: int


CompileKernels = Callable[[torch.fx.GraphModule, Sequence[Any]], Callable[[list[Any]], Any]]
BuildRegion = Callable[..., Callable[[list[Any]], Any]]


def inductor_settings() -> list[str]:
    """Names of Inductor's settings, as its `options` have them. (2.11, 2.13)"""
    import torch._inductor.config as config

    return list(config.get_config_copy())


def products_take_neighbours_in() -> bool:
    """Whether Inductor may write matrix products itself, and element-wise neighbours into them. (2.11, 2.13)"""
    import torch._inductor.config as config

    return bool(config.max_autotune or config.max_autotune_gemm)


_SMALL = 1 << 20  # bytes that a kernel reads and writes: it is over before the next one can start
_TOGETHER = 16  # kernels made into one
# The caches of Inductor and AOTAutograd know a compilation by its graph and these settings; what else is done
# to the graph here they don't see. The number is nobody's default, so that nobody else's entries are taken.
_TOGETHER_KEY: dict[str, Any] = {"combo_kernel_max_num_args": 240}
_ONE_WAY = ("OUTER", "OUTER_TINY")  # names of `ReductionHint`


@contextmanager
def small_ends_together() -> Iterator[None]:
    """Inductor makes one kernel of small ones that only write results of the graph. (2.11, 2.13)

    It has that for whatever can run side by side ("combo kernels"), which makes large kernels slower. Where
    that was asked for, it stays as it is.
    """
    import torch._inductor.config as config
    from torch._inductor.scheduler import ForeachKernelSchedulerNode as Together

    if config.combo_kernels:
        yield
        return
    before = Together.__dict__["group_algorithm_for_combo_kernels"]
    Together.set_group_algorithm_for_combo_kernels(small_ends)
    try:
        with config.patch(combo_kernels=True, **_TOGETHER_KEY):
            yield
    finally:
        Together.group_algorithm_for_combo_kernels = before


def small_ends(scheduler: Any, device_type: str = "cuda") -> list[list[Any]]:
    """Groups of small kernels whose results no other kernel reads: nothing depends on when they run. (2.11, 2.13)

    Among sums only those that Inductor knows one way to compute, the last steps of large ones: where it tries
    several ways, it might choose another one for the group, and the sum would be rounded in another way.
    """
    from torch._inductor.scheduler import FusedMixOrderReductions

    special = set()  # what reads their results is written into them
    for node in scheduler.nodes:
        if isinstance(node, FusedMixOrderReductions):
            special |= set(node.get_buffer_names())
    alike: dict[Any, list[Any]] = {}
    for node in scheduler.nodes:
        device = node.get_device()
        if device is not None and device.type == device_type and _is_small_end(node, special):
            alike.setdefault((device, str(node.group)), []).append(node)
    return [nodes[i : i + _TOGETHER] for nodes in alike.values() for i in range(0, len(nodes), _TOGETHER)]


def _is_small_end(node: Any, special: set[str]) -> bool:
    from torch._inductor.codegen.simd_kernel_features import SIMDKernelFeatures
    from torch._inductor.scheduler import FusedSchedulerNode, OutputNode, SchedulerNode

    if type(node) not in (SchedulerNode, FusedSchedulerNode) or special & set(node.used_buffer_names()):
        return False
    own = set(node.get_nodes())
    sums = [step for step in own if step.is_reduction()]
    if any(SIMDKernelFeatures.reduction_hint(step).name not in _ONE_WAY for step in sums):
        return False
    return node.get_read_write_buffers_sizes() <= _SMALL and all(
        not made.get_aliases()
        and not made.get_mutations()
        and all(isinstance(user.node, OutputNode) or user.node in own for user in made.users)
        for made in node.get_outputs()
    )


def compile_with_inductor(
    gm: torch.fx.GraphModule,
    example_inputs: Sequence[Any],
    build: BuildRegion | None,
    settings: Mapping[str, Any],
    *,
    cached: bool = False,
) -> Callable[..., Any]:
    """`compile_fx` under `settings`, with `build(compile_kernels, gm, inputs, traced)` as its inner compiler.

    AOTAutograd's own cache hands back callables that never went through `build`. It is off, unless `build`
    only rewrites graphs (`cached`): then it is not shared with those who do not. Inductor's cache of
    compiled graphs, where the time goes, is on. (2.11, 2.13)
    """
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    if build is None:
        return compile_fx(gm, list(example_inputs), config_patches=dict(settings))  # type: ignore[arg-type,return-value]

    def inner_compile(gm: torch.fx.GraphModule, inputs: Sequence[Any], **kwargs: Any) -> Any:
        static = frozenset(kwargs.get("static_input_idxs") or ())
        kwargs["cudagraphs"] = None

        def compile_kernels(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
            return compile_fx_inner(gm, inputs, **kwargs)  # type: ignore[arg-type, return-value]

        backward, inference = kwargs.get("is_backward", False), kwargs.get("is_inference", False)
        phase: Any = "backward" if backward else "inference" if inference else "forward"
        _note_what_is_donated()
        return build(compile_kernels, gm, inputs, _traced(gm, phase, static))

    cached = cached and torch._functorch.config.enable_autograd_cache
    if cached:
        settings = {**settings, **_TOGETHER_KEY}
    keys: Any = torch.compiler.config
    tag = keys.cache_key_tag
    if cached:  # what AOTAutograd makes of attention depends on the switches, and its key does not
        tag = f"{tag}{switches.settled_switches()}"
    with torch._functorch.config.patch(enable_autograd_cache=cached), keys.patch(cache_key_tag=tag):
        return compile_fx(  # type: ignore[return-value]
            gm,
            list(example_inputs),  # type: ignore[arg-type]
            inner_compile=inner_compile,  # type: ignore[arg-type]
            config_patches=dict(settings),
        )


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
    gm: torch.fx.GraphModule, example_inputs: Sequence[Any], build: BuildRegion
) -> Callable[..., Any]:
    """AOTAutograd over aten operations as eager runs them, for the emulation. (2.11, 2.13)"""
    from functorch.compile import default_partition, make_boxed_func
    from torch._dynamo.backends.common import aot_autograd
    from torch._inductor.compile_fx import get_static_input_idxs
    from torch._inductor.utils import count_tangents, num_fw_fixed_arguments
    from torch.fx._lazy_graph_module import _LazyGraphModule

    def compile_kernels(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[[list[Any]], Any]:
        _LazyGraphModule.force_recompile(
            gm
        )  # before that `forward` calls the module, and hooks of all modules
        return make_boxed_func(gm.forward)

    given = len(example_inputs)  # the compilers live on, and must not keep the inputs

    def compiler(phase: Any) -> Callable[..., Any]:
        def compile(gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Any:
            static: Sequence[int] = range(count_tangents(gm))
            _note_what_is_donated()
            if phase != "backward":
                static = get_static_input_idxs(num_fw_fixed_arguments(given, len(inputs)))
            return build(compile_kernels, gm, inputs, _traced(gm, phase, frozenset(static)))

        return compile

    with torch._functorch.config.patch(enable_autograd_cache=False):
        return aot_autograd(
            fw_compiler=compiler("forward"),
            bw_compiler=compiler("backward"),
            inference_compiler=compiler("inference"),
            decompositions={
                torch.ops.aten.native_dropout.default: _dropout,
                torch.ops.aten.native_dropout_backward.default: _dropout_backward,
            },
            partition_fn=default_partition,
            keep_inference_input_mutations=True,
        )(gm, example_inputs)


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


def _mutated_inputs(gm: torch.fx.GraphModule) -> frozenset[int]:
    placeholders = {n: i for i, n in enumerate(gm.graph.nodes) if n.op == "placeholder"}
    mutated = set()
    for node in gm.graph.nodes:
        if not isinstance(node.target, torch._ops.OpOverload):
            continue
        for argument, value in zip(node.target._schema.arguments, node.args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                values = value if isinstance(value, (list, tuple)) else [value]
                mutated |= {placeholders[v] for v in values if v in placeholders}
    return frozenset(mutated)


# --- graphs of AOTAutograd --------------------------------------------------------------------------


@contextmanager
def fake_evaluation(gm: torch.fx.GraphModule) -> Iterator[None]:
    """Calls inside compute fake tensors, in the mode that the graph's own metas belong to. (2.11, 2.13)"""
    from torch._dispatch.python import enable_python_dispatcher

    values = (node.meta.get("val") for node in gm.graph.nodes)
    mode = next((value.fake_mode for value in values if isinstance(value, FakeTensor)), None)
    if mode is None:
        raise ValueError("the graph carries no fake tensors")
    with mode, enable_python_dispatcher():
        yield


def no_fake_mode() -> AbstractContextManager[Any]:
    """Calls inside compute real tensors, whatever traces around them. (2.11, 2.13)"""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    return unset_fake_temporarily()


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


def attribute(gm: torch.fx.GraphModule, target: str) -> torch.Tensor:
    """The tensor that a `get_attr` node names. (2.11, 2.13)"""
    owner: Any = gm
    for part in target.split("."):
        owner = getattr(owner, part)
    return owner


@contextmanager
def expandable_segments() -> Iterator[None]:
    """New memory segments of the CUDA caching allocator grow and shrink instead of being kept in pieces.

    The setting of before comes back. (2.11, 2.13)
    """
    settings = torch.cuda.memory._snapshot()["allocator_settings"]
    if settings.get("expandable_segments", True):
        yield
        return
    torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    try:
        yield
    finally:
        torch._C._accelerator_setAllocatorSettings("expandable_segments:False")


# --- modules and scalers of somebody else's loop ------------------------------------------------------


def compiled_call(module: torch.nn.Module) -> Callable[..., Any] | None:
    """What a call of `module` runs instead of its hooks and forward, as `Module.compile` sets it. (2.11, 2.13)"""
    return module._compiled_call_impl


def set_compiled_call(module: torch.nn.Module, call: Callable[..., Any] | None) -> None:
    """Have calls of `module` run `call`; None undoes it. (2.11, 2.13)"""
    if call is None:
        module.__dict__.pop("_compiled_call_impl", None)  # the class has None
    else:
        module.__dict__["_compiled_call_impl"] = call


def uncompiled_call(module: torch.nn.Module) -> Callable[..., Any]:
    """The module's hooks and forward, as they run without a `compiled_call`. (2.11, 2.13)"""
    return module._call_impl


def scaler_unscaled(scaler: torch.amp.GradScaler, optimizer: torch.optim.Optimizer) -> bool:
    """Whether this optimizer's gradients were unscaled in the present step. (2.11, 2.13)"""
    state = scaler._per_optimizer_states.get(id(optimizer)) if scaler.is_enabled() else None
    return bool(state and state["found_inf_per_device"])


def cached_tensors(tensors: Sequence[torch.Tensor]) -> None:
    """Let autograd ignore one reference to each of these, its holder's, when it asks whether a gradient
    is nobody else's. (2.11, 2.13)"""
    keep_cached_tensors()
    for tensor in tensors:
        torch._C._add_cached_tensor(tensor)


def keep_cached_tensors() -> None:
    """Switch the mechanism of `cached_tensors` on again: a reset of torch's CUDA graph trees, also one of
    dead objects at any time, switches it off for all. (2.11, 2.13)"""
    torch._C._set_cached_tensors_enabled(True)


def uncached_tensors(tensors: Sequence[torch.Tensor]) -> None:
    """Undo `cached_tensors`, also where torch has switched the mechanism off since. (2.11, 2.13)"""
    keep_cached_tensors()
    for tensor in tensors:
        torch._C._remove_cached_tensor(tensor)


tensor_use_count: Callable[[torch.Tensor], int] = torch.Tensor._use_count  # type: ignore[attr-defined]
"""References to the tensor from C++, its Python object being one. (2.11, 2.13)"""


@contextmanager
def dynamo_region_config(**settings: Any) -> Iterator[list[BaseException]]:
    """Compile so that it is noticed when hooks of modules or methods of classes change later (torch 2.11, 2.13).

    A function for which Dynamo itself fails runs as it is, because half of the step may
    have been made by then.

    All of it is switched on when Dynamo traces, which few steps do.

    Args:
        **settings: further ones of Dynamo.

    Yields:
        These failures, for which torch would log pages.
    """
    failures: list[BaseException] = []
    tracer, call, trace = _tracer()

    def traced(self: Any, *args: Any) -> Any:
        with _tracing_regions(failures, settings):
            return trace(self, *args)

    with autocast.backward_comes_here(), _changed([(tracer, call, traced)]):
        yield failures


@functools.cache
def _tracer() -> tuple[Any, str, Any]:
    """What is called for a frame without compiled code. (2.11, 2.13)"""
    from torch._dynamo.convert_frame import CatchErrorsWrapper

    return CatchErrorsWrapper, "__call__", CatchErrorsWrapper.__call__


@contextmanager
def _tracing_regions(failures: list[BaseException], settings: dict[str, Any]) -> Iterator[None]:
    def take(record: logging.LogRecord) -> bool:
        if "recompile_limit" in str(record.msg) or "recompile_limit" in map(str, record.args or ()):
            return False
        if record.levelno != logging.WARNING or not record.exc_info or record.exc_info[1] is None:
            return True
        failures.append(record.exc_info[1])
        return False

    log = logging.getLogger("torch._dynamo.convert_frame")
    log.addFilter(take)
    settings = {
        "skip_nnmodule_hook_guards": False,
        "skip_tensor_guards_with_matching_dict_tags": False,  # `p.data = p.data[:n]` changes no dict
        "skip_no_tensor_aliasing_guards_on_parameters": False,  # two weights may become one
        "suppress_errors": True,
        **settings,
    }
    try:
        mends = _changed([*_guarded_methods(), *switches.guarded()])
        with mends, autocast.as_around_backward(), _tracing(**settings):
            yield
    finally:
        log.removeFilter(take)


@functools.cache
def _guarded_methods() -> tuple[tuple[Any, str, Any], ...]:
    """Dynamo guards that no object has a method of its own, and not which one its class has. (2.11, 2.13)"""
    from torch._dynamo.guards import GuardBuilder, install_guard
    from torch._dynamo.source import AttrSource, TypeSource
    from torch._dynamo.variables import nn_module
    from torch._dynamo.variables.user_defined import UserDefinedObjectVariable

    called = "guard_to_detect_forward_monkeypatching"
    guard_forward: Callable[..., None] = getattr(nn_module, called)
    read: Callable[..., Any] = UserDefinedObjectVariable.var_getattr

    def guard(source: Any, value: object, name: str) -> None:
        if source is not None and isinstance(getattr(type(value), name, None), types.FunctionType):
            install_guard(AttrSource(TypeSource(source), name).make_guard(GuardBuilder.ID_MATCH))

    def forward(source: Any, module: torch.nn.Module) -> None:
        guard_forward(source, module)
        guard(source, module, "forward")

    def var_getattr(self: Any, tx: Any, name: str) -> Any:
        found = read(self, tx, name)
        if not name.startswith("_"):
            guard(self.source, self.value, name)
        return found

    return (nn_module, called, forward), (UserDefinedObjectVariable, "var_getattr", var_getattr)


CHECKPOINT: Any = torch.ops.higher_order.tag_activation_checkpoint
"""What Dynamo makes of `torch.utils.checkpoint.checkpoint`, with `use_reentrant` and the like. (2.11, 2.13)"""


def raised_while_tracing(error: BaseException) -> bool:
    """Whether Dynamo raised this before anything of what it traced was executed. (2.11, 2.13)"""
    import torch._dynamo.convert_frame as convert_frame

    if isinstance(error, torch._dynamo.exc.TorchDynamoException):  # the frames of Dynamo are cut out of it
        return True
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_code.co_filename == convert_frame.__file__ for frame, _ in frames)


_F = TypeVar("_F", bound=Callable[..., Any])


def untraced(fn: _F) -> _F:
    """`fn`, so that Dynamo traces neither it nor what it calls: autograd calls it from traced frames.

    `torch.compiler.disable` does the same, and takes the host longer. (2.11, 2.13)
    """

    @functools.wraps(fn)
    def outside(*args: Any) -> Any:
        before = torch._C._dynamo.eval_frame.set_eval_frame(None)
        try:
            return fn(*args)
        finally:
            torch._C._dynamo.eval_frame.set_eval_frame(before)

    if "torch._dynamo" in sys.modules:
        torch._dynamo.eval_frame.skip_code(_code(outside))
    return outside  # type: ignore[return-value]


def _code(fn: Any) -> types.CodeType:
    return fn.__code__  # type: ignore[no-any-return]


@functools.cache
def start_untraced() -> None:
    """Before anything is compiled: what was made by `untraced` without Dynamo, whose import takes a second."""
    import torch._dynamo.eval_frame as eval_frame

    eval_frame.skip_code(_code(untraced(_code)))  # they have their code in common


def leave_to_python(method: Callable[..., Any]) -> None:
    """Dynamo traces neither a function, where Python calls it, nor what it calls. (2.11, 2.13)"""
    from torch._C._dynamo.eval_frame import set_code_exec_strategy
    from torch._dynamo.types import FrameAction, FrameExecStrategy  # type: ignore[attr-defined]

    set_code_exec_strategy(_code(method), FrameExecStrategy(FrameAction.SKIP, FrameAction.SKIP))


def end_trace_here() -> None:
    """Where Dynamo traces the caller: end its graph before the call."""
    torch._dynamo.graph_break(msg="a graphed step is called inside of another one")


def dynamo_restart() -> type[BaseException]:
    """What a compile backend lets pass so that Dynamo traces again with what was learned (torch 2.11, 2.13)."""
    return torch._dynamo.exc.RestartAnalysis
