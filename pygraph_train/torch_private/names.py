"""The private names of torch that the library uses: what for, and what is off where this torch lacks one.

No missing name raises: a feature asks `lacking` before it begins. A name that a class or a constant of this package
needs at import is read with `private`.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from pygraph_train.problems import Problem, PyGraphError

__all__ = [
    "COMPILED",
    "DYNAMO",
    "FORWARD_AND_BACKWARD",
    "GRAPHS",
    "NAMES",
    "PROCESSES",
    "TRIED",
    "FakeTensor",
    "Feature",
    "MissingName",
    "Names",
    "TorchDispatchMode",
    "is_newer_than_tried",
    "lacking",
    "lacks",
    "private",
    "tell_if_newer",
]

_log = logging.getLogger("pygraph_train")

TRIED = ("2.11.0", "2.12.1", "2.13.0", "2.14.1", "2.15.0")
"""Versions of torch that the library was tried with, the newest one last. pyproject.toml has the same bounds."""


@dataclass(frozen=True)
class Feature:
    """What a missing name switches off.

    Attributes:
        what: it is.
        instead: what happens without it.
        works: the versions of torch that it was seen to work with.
    """

    what: str
    instead: str
    works: tuple[str, ...] = TRIED


GRAPHS = Feature("graphs", "training runs as you wrote it")
FORWARD_AND_BACKWARD = Feature(
    "graphs of whole steps and of stock loops",
    "each phase of a step has a graph of its own, and stock loops run forward and backward as you wrote them",
    works=("2.11.0", "2.13.0"),
)
DYNAMO = Feature("graphs of traced code", "such code runs as you wrote it")
COMPILED = Feature("graphs of compiled code", "compiled parts run with eager kernels and without graphs")
PROCESSES = Feature("graphs of several processes", "such steps run as you wrote them")


@dataclass(frozen=True)
class Names:
    """Private names that serve one purpose.

    Attributes:
        purpose: what they are for.
        off: what is off without one of them.
        names: each module of torch, a colon, and what is needed of it.
        cuda: whether builds of torch without CUDA lack them, and need none.
    """

    purpose: str
    off: Feature
    names: str
    cuda: bool = False

    def missing(self) -> list[str]:
        """Those that this torch lacks."""
        if self.cuda and torch.version.cuda is None:
            return []
        return [f"{module}.{name}" for module, name in self._split() if _find(module, name) is _ABSENT]

    def __iter__(self) -> Iterator[str]:
        return (f"{module}.{name}" for module, name in self._split())

    def _split(self) -> Iterator[tuple[str, str]]:
        module = ""
        for word in self.names.split():
            if word.endswith(":"):
                module = word[:-1]
            else:
                yield module, word


_ABSENT = object()


def _find(module: str, name: str) -> Any:
    try:
        found = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except Exception:  # a module of torch may fail in its own ways
        return _ABSENT
    return found


class MissingName(PyGraphError):
    """Code of the library has used a private name that this torch lacks.

    Attributes:
        problem: says so.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        super().__init__(str(problem))


class _Missing(type):
    """The class of stand-ins for missing names: to use one raises MissingName, to derive a class from one does not."""

    def _refuse(cls, *_: Any, **__: Any) -> NoReturn:
        raise MissingName(lacks(next(c.__name__ for c in cls.__mro__ if c.__name__.startswith("torch."))))

    __call__ = __instancecheck__ = __subclasscheck__ = _refuse

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):  # Python asks for some of them by itself
            raise AttributeError(name)
        cls._refuse()


def private(name: str) -> Any:
    """The object of that name, as `torch._C._storage_Use_Count`, or a stand-in where this torch has none."""
    _, _, path = name.partition(".")
    found = _find("torch", path)
    if found is _ABSENT:
        module, _, last = name.rpartition(".")
        found = _find(module, last)
    return _Missing(name, (), {}) if found is _ABSENT else found


def lacks(what: str, off: Feature = GRAPHS) -> Problem:
    """The sentence for a feature that is off because this torch lacks something."""
    reason = f"torch {torch.__version__} lacks {what}, which {off.what} need, so {off.instead}"
    return Problem(reason, fix=f"torch {', '.join(off.works)} have it")


@functools.cache
def lacking(off: Feature) -> Problem | None:
    """Why this torch cannot have a feature, None where it has every name that this needs.

    Looks once in a process, and logs what it finds.
    """
    missing = [name for names in NAMES if names.off is off for name in names.missing()]
    if not missing:
        return None
    more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
    problem = lacks(f"{missing[0]}{more}", off)
    _log.warning("pygraph: %s", problem)
    return problem


def is_newer_than_tried(version: str) -> bool:
    """Whether a torch is of a minor version that the library was not tried with."""
    return _minor(version) > _minor(TRIED[-1])


def _minor(version: str) -> list[int]:
    return [int(part) for part in version.split(".")[:2]]


@functools.cache
def tell_if_newer() -> None:
    """Log a line where this torch is newer than every one that the library was tried with, once in a process."""
    if is_newer_than_tried(torch.__version__):
        told = "pygraph: torch %s is newer than every version that pygraph-train was tried with (%s to %s)"
        _log.warning(told, torch.__version__, TRIED[0], TRIED[-1])


NAMES = (
    Names(
        "tensors and their memory: counts of changes and of holders, addresses, views",
        GRAPHS,
        """
        torch: Tensor._use_count Tensor._version _foreach_copy_
        torch._C: _add_cached_tensor _construct_storage_from_data_pointer _remove_cached_tensor
            _set_cached_tensors_enabled _storage_Use_Count
        torch._C._dynamo.guards: TensorGuards _reinterpret_tensor
        torch.autograd.grad_mode: _unsafe_preserve_version_counter
        torch.ops: aten._unsafe_view
        """,
    ),
    Names(
        "operators as the emulated engine and dispatch modes see them",
        GRAPHS,
        """
        torch._C: DisableTorchFunction DispatchKey.AutocastCPU DispatchKeySet TensorBase
            _AutoDispatchBelowAutograd _DisableAutocast _ExcludeDispatchKeyGuard _set_grad_enabled
        torch._dispatch.python: enable_python_dispatcher
        torch._ops: HigherOrderOperator OpOverload OpOverloadPacket
        torch._subclasses.fake_tensor: FakeTensor unset_fake_temporarily
        torch.ops: aten._conj.default aten._scaled_dot_product_efficient_attention
            aten._scaled_dot_product_flash_attention aten._scaled_dot_product_flash_attention_for_cpu
            aten._to_copy.default
        torch.utils._python_dispatch: TorchDispatchMode
        """,
    ),
    Names(
        "phases of a step that are replayed on their own",
        GRAPHS,
        """
        torch: _foreach_add_
        torch._dynamo: config.patch lookup_backend
        torch._dynamo.callback: callback_handler.register_start_callback callback_handler.start_callbacks
        torch.autograd: Variable._execution_engine.queue_callback
        """,
    ),
    Names(
        "modes, hooks and switches that a replay would pass by",
        GRAPHS,
        """
        torch: _fused_sdp_choice
        torch._C: _autocast_supported_devices _current_graph_task_id _functions.DelayedError _get_blas_preferred_backend
            _get_function_stack_at _get_sdp_priority_order _is_any_autocast_enabled
            _len_torch_dispatch_stack _len_torch_function_stack _set_sdp_priority_order
            _will_engine_execute_node
        torch._C._autograd: _get_current_graph_task_keep_graph _top_saved_tensors_default_hooks
        torch._C._functorch: peek_interpreter_stack
        torch.amp.autocast_mode: _enter_autocast _exit_autocast
        torch.autograd.forward_ad: _current_level
        torch.nn: Module._call_impl Module._compiled_call_impl
        torch.nn.attention: _cur_sdpa_kernel_backends _sdpa_kernel
        torch.nn.modules.module: _global_backward_hooks _global_backward_pre_hooks _global_forward_hooks
            _global_forward_pre_hooks
        torch.optim.optimizer: _global_optimizer_post_hooks _global_optimizer_pre_hooks
        torch.utils._device: DeviceContext
        """,
    ),
    Names(
        "memory pools and streams of CUDA",
        GRAPHS,
        """
        torch._C: _accelerator_setAllocatorSettings _cuda_clearCublasWorkspaces _cuda_endAllocateToPool
            _cuda_getCurrentRawStream _cuda_releasePool
        torch.cuda.memory: _snapshot
        """,
        cuda=True,
    ),
    Names(
        "Dynamo, which traces steps: its entry, its errors, its guards",
        DYNAMO,
        """
        torch: _check_tensor_all _check_tensor_all_with
        torch._C._autograd: _get_data_attr
        torch._C._dynamo.eval_frame: reset_code set_code_exec_strategy set_eval_frame
        torch._dynamo: OptimizedModule graph_break maybe_mark_dynamic
        torch._dynamo.bytecode_transformation: create_call_function
        torch._dynamo.codegen: PyCodegen
        torch._dynamo.compiled_autograd: compiled_autograd_enabled
        torch._dynamo.config: capture_dynamic_output_shape_ops capture_scalar_outputs compiled_autograd
            ignore_logging_functions skip_tensor_guards_with_matching_dict_tags trace_autograd_ops
        torch._dynamo.convert_frame: CatchErrorsWrapper compile_lock
        torch._dynamo.eval_frame: _debug_get_cache_entry_list innermost_fn skip_code
        torch._dynamo.exc: ObservedException RestartAnalysis SkipFrame TorchDynamoException Unsupported
            unimplemented
        torch._dynamo.external_utils: is_compiling
        torch._dynamo.guards: GuardBuilder.AUTOGRAD_SAVED_TENSORS_HOOKS GuardBuilder.CONSTANT_MATCH
            GuardBuilder.HASATTR GuardBuilder.ID_MATCH GuardBuilder.TYPE_MATCH get_verbose_code_part
            install_guard
        torch._dynamo.output_graph: DynamoTracerOutput OutputGraph.create_proxy
        torch._dynamo.source: AttrSource ConstantSource GlobalSource TensorProperty.SIZE
            TensorPropertySource TypeSource
        torch._dynamo.symbolic_convert: InstructionTranslator.current_tx
            InstructionTranslatorBase._format_value
            InstructionTranslatorBase.inline_user_function_return InstructionTranslatorBase.step
            compare_op_handlers
        torch._dynamo.types: FrameAction.SKIP FrameExecStrategy
        torch._dynamo.utils: iter_contains warn_once
        torch._functorch.config: donated_buffer patch
        torch._guards: Guard.set_export_info TracingContext.extract_stack TracingContext.get
            TracingContext.try_get
        torch._utils: is_compiling
        torch.compiler: _is_compiling_flag
        torch.fx._lazy_graph_module: _LazyGraphModule.force_recompile
        torch.nn._reduction: get_enum
        torch.ops: aten._assert_scalar.default
        torch.utils._pytree: tree_leaves
        """,
    ),
    Names(
        "what stands for values of Python in a trace",
        FORWARD_AND_BACKWARD,
        """
        torch._dynamo.variables: ConstantVariable.create ConstantVariable.is_literal GetAttrVariable
            SuperVariable.call_method TensorVariable.method_attr_requires_grad
            TensorVariable.method_backward TensorVariable.method_requires_grad_
            UserDefinedClassVariable.call_obj_hasattr UserFunctionVariable UserMethodVariable nn_module
        torch._dynamo.variables.base: AttributeMutationNew ValueMutationNew VariableTracker.build
        torch._dynamo.variables.builder: OptimizerVariable SourcelessBuilder.create
            VariableBuilder._wrap get_fake_value is_dynamic_source
        torch._dynamo.variables.builtin: BuiltinVariable._call_min_max_binary
            BuiltinVariable.call_function
        torch._dynamo.variables.constant: ConstantVariable.create
        torch._dynamo.variables.ctx_manager: ContextWrappingVariable
        torch._dynamo.variables.dicts: ConstDictVariable
        torch._dynamo.variables.functions: SkipFunctionVariable
        torch._dynamo.variables.higher_order_ops: CheckpointHigherOrderVariable._call_function
        torch._dynamo.variables.lazy: LazyConstantVariable.create LazyVariableTracker
        torch._dynamo.variables.lists: BaseListVariable.call_method ListIteratorVariable ListVariable
            TupleVariable iter_contains
        torch._dynamo.variables.misc: CellVariable DeletedVariable GetAttrVariable NewGlobalVariable
            NumpyVariable.call_function PythonModuleVariable.var_getattr StringFormatVariable.create
            call_random_fn
        torch._dynamo.variables.tensor: TensorVariable._warn_capture_scalar_outputs
            TensorVariable.call_method TensorVariable.method_item TensorVariable.method_tolist
            get_fake_value
        torch._dynamo.variables.torch: TorchInGraphFunctionVariable.call_function
            tracing_state_functions
        torch._dynamo.variables.user_defined: UserDefinedObjectVariable.var_getattr
            UserDefinedTupleVariable call_random_fn
        """,
    ),
    Names(
        "AOTAutograd and Inductor",
        COMPILED,
        """
        torch._C: DispatchKey.Autograd DispatchKey.CompositeImplicitAutograd
        torch._dynamo.backends.common: aot_autograd
        torch._functorch._aot_autograd.descriptors: SavedForBackwardsAOTOutput
            SavedForBackwardsNoVcCheckAOTOutput
        torch._functorch._aot_autograd.logging_utils: get_aot_compilation_context
        torch._functorch._aot_autograd.schemas: MutationType.MUTATED_IN_GRAPH
            OutputType.custom_function_view OutputType.is_input OutputType.non_alias
            OutputType.unsafe_view_alias
        torch._functorch.config: enable_autograd_cache
        torch._inductor.codegen.simd_kernel_features: SIMDKernelFeatures.reduction_hint
        torch._inductor.compile_fx: compile_fx compile_fx_inner get_static_input_idxs
        torch._inductor.config: combo_kernels get_config_copy max_autotune max_autotune_gemm patch
        torch._inductor.fx_passes.pad_mm: is_mm_compute_bound
        torch._inductor.runtime.triton_heuristics: CachingAutotuner.benchmark_all_configs
        torch._inductor.scheduler: ForeachKernelSchedulerNode.group_algorithm_for_combo_kernels
            ForeachKernelSchedulerNode.set_group_algorithm_for_combo_kernels FusedMixOrderReductions
            FusedSchedulerNode OutputNode SchedulerNode
        torch._inductor.sizevars: SizeVarAllocator.guard_or_false
        torch._inductor.utils: count_tangents num_fw_fixed_arguments
        torch._prims_common: suggest_memory_format
        torch.fx.graph: _BoxedCodeGen
        torch.ops: aten._assert_async.default aten._assert_async.msg
        torch.utils._sympy.functions: Mod
        """,
    ),
    Names(
        "reducers, communication hooks, the store of a process group",
        PROCESSES,
        """
        torch._C._distributed_c10d: _create_work_from_future
        torch._dynamo.backends.distributed: DDPOptimizer has_higher_order_op
        torch._guards: Source
        torch.distributed: _DEFAULT_FIRST_BUCKET_BYTES _register_comm_hook
        torch.distributed.distributed_c10d: _get_default_store
        torch.ops: _c10d_functional.wait_tensor
        """,
    ),
)

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import FakeTensor
    from torch.utils._python_dispatch import TorchDispatchMode
else:
    FakeTensor = private("torch._subclasses.fake_tensor.FakeTensor")
    TorchDispatchMode = private("torch.utils._python_dispatch.TorchDispatchMode")
