"""The private names of torch that the library uses: what for, and what happens where this torch lacks one.

No missing name raises: where one is missing that all graphs need, `lacking` says so before anything has a graph. A name
that a class or a constant of this package needs at import is read with `private`.
"""

from __future__ import annotations

import functools
import logging
import pkgutil
from collections.abc import Iterator
from typing import Any, NoReturn

import torch

from pygraph_train.problems import Problem, PyGraphError
from pygraph_train.versions import TRIED, what_is_new

_log = logging.getLogger("pygraph_train")

GRAPHS = "steps run as you wrote them"
GROWING = "forward and backward of such steps run as you wrote them"

_ABSENT = object()


def _find(name: str) -> Any:
    try:
        return pkgutil.resolve_name(name)
    except Exception:  # a module of torch may fail in its own ways
        return _ABSENT


class _Missing(type):
    """The class of stand-ins for missing names: to use one raises PyGraphError, to derive a class from one does not."""

    def _refuse(cls, *_: Any, **__: Any) -> NoReturn:
        name = next(c.__name__ for c in cls.__mro__ if c.__name__.startswith("torch."))
        raise PyGraphError(str(_lacks(name)))

    __call__ = __instancecheck__ = __subclasscheck__ = _refuse

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):  # Python asks for some of them by itself
            raise AttributeError(name)
        cls._refuse()


def private(name: str) -> Any:
    """The object of that name, as `torch._C._storage_Use_Count`, or a stand-in where this torch has none."""
    found = _find(name)
    return _Missing(name, (), {}) if found is _ABSENT else found


def _lacks(what: str) -> Problem:
    reason = f"torch {torch.__version__} lacks {what}, which graphs need, so {GRAPHS}"
    return Problem(reason, fix=f"torch {', '.join(TRIED)} have it")


@functools.cache
def lacking() -> Problem | None:
    """Why this torch cannot have graphs, None where it has all names that they need. Looks, and logs it, once."""
    missing = [name for name, _, instead in _missing() if instead == GRAPHS]
    if not missing:
        return None
    more = f" (and {len(missing) - 1} more)" if len(missing) > 1 else ""
    problem = _lacks(f"{missing[0]}{more}")
    _log.warning("pygraph: %s", problem)
    return problem


def what_is_off() -> tuple[list[str], bool]:
    """Sentences about what this torch lacks or may lack, and whether steps can have graphs."""
    missing = _missing()
    told = [f"torch lacks {name} ({purpose}), so {instead}." for name, purpose, instead in missing]
    if new := what_is_new():
        told.append(f"{new}.")
    return told, all(instead != GRAPHS for _, _, instead in missing)


NAMES = {
    GRAPHS: {
        "tensors and their memory: counts of changes and of holders, addresses, views": """
            torch: Tensor._version _foreach_copy_
            torch._C: _construct_storage_from_data_pointer _storage_Use_Count
            torch.autograd.grad_mode: _unsafe_preserve_version_counter
        """,
        "operators as the emulated engine and dispatch modes see them": """
            torch._C: DisableTorchFunction _AutoDispatchBelowAutograd _TorchDispatchModeKey.FAKE
                _get_dispatch_mode _set_grad_enabled
            torch._ops: HigherOrderOperator
            torch._subclasses.fake_tensor: FakeTensor
            torch.utils._python_dispatch: TorchDispatchMode
        """,
        "Dynamo, which traces steps, and autograd, which asks for their backwards": """
            torch: _GLOBAL_DEVICE_CONTEXT _foreach_add_ _foreach_neg_ _foreach_zero_
            torch._C._dynamo.eval_frame: reset_code set_code_exec_strategy
            torch._dynamo: OptimizedModule config.patch graph_break lookup_backend maybe_mark_dynamic
            torch._dynamo.callback: callback_handler.register_start_callback callback_handler.start_callbacks
            torch._dynamo.compiled_autograd: compiled_autograd_enabled
            torch._dynamo.config: compiled_autograd ignore_logging_functions
            torch._dynamo.convert_frame: ConvertFrame
            torch._dynamo.types: FrameAction.SKIP FrameExecStrategy
            torch._dynamo.variables: TensorVariable.method_backward TensorVariable.method_requires_grad_
            torch._functorch.config: patch
            torch.autograd: Variable._execution_engine.queue_callback
        """,
        "modes, hooks and switches that a replay would pass by": """
            torch._C: _current_graph_task_id _get_function_stack_at
                _len_torch_dispatch_stack _len_torch_function_stack _will_engine_execute_node
            torch._C._autograd: _get_current_graph_task_keep_graph _top_saved_tensors_default_hooks
            torch._C._functorch: get_dynamic_layer_stack_depth pop_dynamic_layer_stack
            torch._functorch.eager_transforms: enable_inplace_requires_grad
            torch.autograd.forward_ad: _current_level
            torch.nn: Module._call_impl Module._compiled_call_impl
            torch.nn.parallel: DistributedDataParallel._active_ddp_module
            torch.nn.modules.module: _has_any_global_hook
            torch.optim.optimizer: _global_optimizer_post_hooks _global_optimizer_pre_hooks
            torch.utils._device: DeviceContext
        """,
        "memory pools and streams of CUDA": """
            torch._C: _accelerator_setAllocatorSettings _cuda_clearCublasWorkspaces
                _cuda_beginAllocateCurrentStreamToPool _cuda_endAllocateToPool _cuda_memorySnapshot
                _cuda_releasePool
        """,
    },
    GROWING: {
        "lists that grow from step to step": """
            torch._dynamo.guards: GuardBuilder.TYPE_MATCH
            torch._dynamo.variables: UserDefinedObjectVariable
            torch._dynamo.variables.builder: VariableBuilder._wrap VariableBuilder.wrap_symint
            torch._dynamo.variables.optimizer: OptimizerVariable._set_capturable
        """,
    },
    "the first steps take longer": {
        "what Dynamo does for its logs alone": "torch._dynamo.symbolic_convert: get_funcname",
        "what it does where a graph breaks": """
            torch._dynamo.exc: Unsupported
            torch._dynamo.output_graph: GraphCompileReason OutputGraph._get_stack_values_to_restore
            torch._dynamo.symbolic_convert: InliningInstructionTranslator.inline_call
                InstructionTranslatorBase.speculate InstructionTranslatorBase._format_value
            torch._dynamo.variables.lazy: LazySymNodeFormatString LazyVariableTracker.create
                LazyVariableTracker.realize_all torch._dynamo.variables.tensor: SymNodeVariable
        """,
        "what recurrent layers give": "torch._decomp.decompositions: one_layer_lstm one_layer_rnn",
    },
    "attention of transformers gets masks that it does not need": {
        "what a model asks while it is traced": """
            torch._dynamo.variables: ConstantVariable.create UserFunctionVariable.call_function
            torch._dynamo.variables.torch: tracing_state_functions
        """,
    },
    "models of fully_shard run as you wrote them": {
        "what stands in the place of FSDP's hooks": "torch.utils._pytree: tree_flatten tree_unflatten",
    },
    "the CPU emulation records no collective that writes in place": {
        "what such a collective returns": "torch._C._distributed_c10d: FakeWork Work.boxed Work.unbox",
    },
    "explanations name fewer lines": {
        "what Dynamo tells of its traces": """
            torch._dynamo.convert_frame: input_codes
            torch._dynamo.utils: get_compilation_metrics
        """,
    },
}
"""What happens without one of them, what they are for, and the names: each module of torch, a colon, and what is
needed of it. Without one of those under `GRAPHS` nothing has a graph."""


def listed() -> Iterator[tuple[str, str, str]]:
    """Each name, what it is for, and what happens without it."""
    for instead, purposes in NAMES.items():
        for purpose, names in purposes.items():
            module = ""
            for word in names.split():
                if word.endswith(":"):
                    module = word[:-1]
                else:
                    yield f"{module}.{word}", purpose, instead


def _missing() -> list[tuple[str, str, str]]:
    """Those that this torch lacks. Builds without CUDA need none that are for CUDA."""
    needed = (row for row in listed() if torch.version.cuda or "CUDA" not in row[1])
    return [row for row in needed if _find(row[0]) is _ABSENT]
