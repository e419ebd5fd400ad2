"""Global switches of torch that decide which kernels run, and modes that see every operation. (2.11, 2.13)"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from pygraph_train.torch_private import autocast
from pygraph_train.torch_private.names import private

__all__ = [
    "SWITCHES",
    "function_modes",
    "guarded",
    "is_dispatch_watched",
    "is_function_watched",
    "settled_switches",
    "switches",
]

_NAMES = (
    "flash_sdp_enabled",
    "mem_efficient_sdp_enabled",
    "math_sdp_enabled",
    "cudnn_sdp_enabled",
    "overrideable_sdp_enabled",
    "math_sdp_allow_fp16_bf16_reduction",
    "sdp_priority_order",
    "cudnn_enabled",
    "cudnn_benchmark",
    "cudnn_deterministic",
    "cudnn_allow_tf32",
    "cublas_allow_fp16_accumulation",
    "float32_matmul_precision",
    "mkldnn_enabled",
)
"""Besides what Dynamo's guards for global state cover: deterministic algorithms, the default dtype, TF32 and
reduced precision of cuBLAS."""


def _getters() -> dict[str, Callable[[], Any]]:
    found = {name: getattr(torch._C, f"_get_{name}", None) for name in _NAMES}
    modes: dict[str, Any] = {"function_modes": private("torch._C._len_torch_function_stack")}
    if torch.backends.cuda.is_built():
        modes["blas_preferred_backend"] = _blas_backend
    return modes | {n: f for n, f in found.items() if f is not None}


def _blas_backend() -> int:
    return torch._C._get_blas_preferred_backend().value  # type: ignore[attr-defined, no-any-return]


def _all_of(getters: dict[str, Callable[[], Any]]) -> Callable[[], tuple[Any, ...]]:
    """One expression that calls them all, each a local variable: a loop takes three times as long."""
    variables = ", ".join(f"{name}={name}" for name in getters)
    calls = ", ".join(f"{name}()" for name in getters)
    return eval(f"lambda {variables}: ({calls},)", dict(getters))  # type: ignore[no-any-return]


_GETTERS = _getters()

SWITCHES = tuple(_GETTERS)
"""Names of what `switches` returns, in its order."""

switches = _all_of(_GETTERS)
"""What the switches are set to now. Hot path."""


def settled_switches() -> tuple[Any, ...]:
    """What the switches are set to, to be compared with `switches()` later."""
    if torch.cuda.is_initialized():
        _order_attention_kernels()
    return switches()


@functools.cache
def _order_attention_kernels() -> None:
    """Let torch order its attention kernels for this GPU. (2.11, 2.13)

    It does so when it first meets attention on a GPU, by changing a switch: as if the user had done that.
    """
    query = torch.empty(1, 1, 8, 64, dtype=torch.float16, device="cuda")
    torch._fused_sdp_choice(query, query, query)


@functools.cache
def guarded() -> tuple[tuple[Any, str, Any], ...]:
    """(owner, attribute, value): with these Dynamo guards the switches in all that it traces. (2.11, 2.13)"""
    from torch._dynamo.guards import GuardBuilder

    ambient = GuardBuilder.AUTOGRAD_SAVED_TENSORS_HOOKS  # every trace has it

    @functools.wraps(ambient)
    def guard_switches(self: Any, guard: Any) -> None:
        ambient(self, guard)
        seen = settled_switches()
        said = [f"the switches of torch that choose kernels are {seen}"]
        root = self.guard_manager.root
        root.add_lambda_guard(lambda _: switches() == seen, said, guard.user_stack)
        around = autocast.around_backward()
        if around is not None:
            told = [f"autocast around the backward is {around}"]
            root.add_lambda_guard(
                lambda _: autocast.around_backward() in (None, around), told, guard.user_stack
            )

    return ((GuardBuilder, "AUTOGRAD_SAVED_TENSORS_HOOKS", guard_switches),)


is_dispatch_watched: Callable[[], int] = private("torch._C._len_torch_dispatch_stack")
"""Number of `TorchDispatchMode`s of this thread: they see every operation, and none of a replay."""

is_function_watched: Callable[[], int] = private("torch._C._len_torch_function_stack")
"""Number of `TorchFunctionMode`s of this thread."""


def function_modes() -> list[Any]:
    """Those modes, without the one that `torch.set_default_device` is."""
    from torch.utils._device import DeviceContext

    modes = [torch._C._get_function_stack_at(i) for i in range(torch._C._len_torch_function_stack())]
    return [mode for mode in modes if type(mode) is not DeviceContext]
