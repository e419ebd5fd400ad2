"""Global switches of torch that decide which kernels run, and modes and hooks that see what runs. (2.11, 2.13)"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

from pygraph_train.torch_private.names import private

_NAMES = [f"{kernel}_sdp_enabled" for kernel in ("flash", "mem_efficient", "math", "cudnn", "overrideable")]
_NAMES += [f"cudnn_{what}" for what in ("enabled", "benchmark", "deterministic", "allow_tf32")]
_NAMES += ["math_sdp_allow_fp16_bf16_reduction", "cublas_allow_fp16_accumulation"]
_NAMES += ["float32_matmul_precision", "mkldnn_enabled"]
_ORDER: Callable[[], list[int]] = getattr(torch._C, "_get_sdp_priority_order", list)
_CALL: Callable[[Any], Any] = getattr(operator, "call", lambda read: read())  # Python 3.10 has none
_READ = [read for name in _NAMES if (read := getattr(torch._C, f"_get_{name}", None)) is not None]


def kernel_switches() -> tuple[Any, ...]:
    """What decides, besides the shapes, which kernels run. (2.11 to 2.15) Hot path.

    Dynamo guards further ones: deterministic algorithms, the default dtype, TF32 and reduced precision of cuBLAS.
    """
    return (*map(_CALL, _READ), *_ORDER())


is_dispatch_watched: Callable[[], int] = private("torch._C._len_torch_dispatch_stack")
"""Number of `TorchDispatchMode`s of this thread: they see every operation, and none of a replay."""

_DeviceContext: Any = private("torch.utils._device.DeviceContext")


def function_modes() -> bool:
    """Whether this thread has a `TorchFunctionMode` besides the one that `torch.set_default_device` is. Hot path."""
    modes = map(torch._C._get_function_stack_at, range(torch._C._len_torch_function_stack()))
    return not {_DeviceContext}.issuperset(map(type, modes))


has_hooks_on_all_modules: Callable[[], Any] = private("torch.nn.modules.module._has_any_global_hook")
"""Whether there are hooks that every module runs. (2.11 to 2.15)"""


def saved_tensors_hooks_active(*, checkpoints: bool = True) -> bool:
    """Whether hooks get what is saved for a backward just now. (2.11 to 2.15) Hot path.

    `checkpoints` says whether those of `torch.utils.checkpoint` count.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and (checkpoints or hooks[0].__module__ != "torch.utils.checkpoint")
