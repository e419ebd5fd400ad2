"""Private APIs of the dispatcher: operators, keys, fake tensors."""

from __future__ import annotations

import functools
import types
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from pygraph_train.torch_private.names import FakeTensor, TorchDispatchMode, private

__all__ = [
    "FakeTensor",
    "HigherOrderOperator",
    "OpOverload",
    "TorchDispatchMode",
    "autocast_enabled",
    "below_autograd",
    "bounds_bool",
    "conjugates_lazily",
    "fake_evaluation",
    "has_no_memory",
    "has_symbols",
    "is_expensive",
    "is_operator",
    "is_operator_of_torch",
    "mode_of_fakes",
    "no_autocast",
    "no_fake_mode",
    "no_torch_function",
    "operator_draws",
    "packet_name",
    "replaces_memory",
    "schema",
    "set_grad_mode",
    "symbols_of",
    "writes_arguments",
    "written_by_schema",
]


_ATTENTION = {
    private("torch.ops.aten._scaled_dot_product_flash_attention"),
    private("torch.ops.aten._scaled_dot_product_flash_attention_for_cpu"),
    private("torch.ops.aten._scaled_dot_product_efficient_attention"),
}
"""These move no generator where they drop nothing (torch 2.11, 2.13)."""


def operator_draws(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an operator moves a generator of random numbers (torch 2.11, 2.13)."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    if func.overloadpacket not in _ATTENTION:
        return True
    names = [argument.name for argument in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    return bool(given.get("dropout_p", 0.0) != 0.0)


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


def has_no_memory(tensor: torch.Tensor) -> bool:
    """Whether a tensor is one of the zeros of forward-mode differentiation, or the shape of one (torch 2.11, 2.13)."""
    return tensor.is_meta or tensor._is_zerotensor()


OpOverload = private("torch._ops.OpOverload")
HigherOrderOperator = private("torch._ops.HigherOrderOperator")


def schema(op: torch._ops.OpOverload) -> Any:
    """Name, arguments and returns of an operator (torch 2.11, 2.13)."""
    return op._schema


def packet_name(func: torch._ops.OpOverload) -> str:
    """The name of an operator without its namespace and overload (torch 2.11, 2.13)."""
    return func._schema.name.partition("::")[2]


def no_torch_function() -> AbstractContextManager[None]:
    """Calls inside are not shown to `TorchFunctionMode`s and `__torch_function__` (torch 2.13)."""
    return torch._C.DisableTorchFunction()


def is_operator(func: object) -> bool:
    """Whether what a dispatch mode was given is an ordinary operator, not a higher-order one (torch 2.13)."""
    return isinstance(func, torch._ops.OpOverload)


def is_operator_of_torch(func: object) -> bool:
    """Whether something is an operator that torch itself defines, and no higher-order one. (2.11, 2.13)"""
    return isinstance(func, torch._ops.OpOverload | torch._ops.OpOverloadPacket) and str(func).startswith(
        ("aten.", "prims.")
    )


_EXPENSIVE = (
    *(
        "mm",
        "addmm",
        "bmm",
        "baddbmm",
        "addbmm",
        "mv",
        "addmv",
        "dot",
        "vdot",
        "linear",
        "einsum",
        "_scaled_mm",
    ),
    *("convolution", "_convolution", "cudnn_convolution", "mkldnn_convolution", "_slow_conv2d_forward"),
    *("lstm", "gru", "rnn_tanh", "rnn_relu", "_cudnn_rnn", "miopen_rnn", "mkldnn_rnn_layer"),
)
_EXPENSIVE_KINDS = (
    "_scaled_dot_product",
    "_flash_attention",
    "_efficient_attention",
    "linalg_",
    "_linalg_",
    "_fft_",
)


def is_expensive(func: torch._ops.OpOverload) -> bool:
    """Whether an operator computes more than it moves: products, convolutions, attention, recurrent networks,
    decompositions. (2.11, 2.13)"""
    name = packet_name(func)
    return name in _EXPENSIVE or name.startswith(_EXPENSIVE_KINDS)


def conjugates_lazily(func: object) -> bool:
    """Whether this is the operator that sets the bit for conjugation. (2.11, 2.13)"""
    return func is torch.ops.aten._conj.default


def writes_arguments(func: torch._ops.OpOverload) -> bool:
    """Whether an operator's schema declares that it mutates an argument (torch 2.13)."""
    return func._schema.is_mutable


@functools.cache
def written_by_schema(fn: Any) -> tuple[tuple[int | None, str], ...] | None:
    """The arguments that an operator, or a function of torch with an operator of its name, writes to, in any overload:
    place (None for those that have only a name) and name. None where there is no schema. (2.11, 2.13)"""
    if isinstance(fn, torch._ops.OpOverload):
        schemas = [fn._schema]
    else:
        name = getattr(fn, "__name__", "")
        of_c = isinstance(fn, types.BuiltinFunctionType) and name.isidentifier()
        packet = getattr(torch.ops.aten, name, None) if of_c else fn
        if not isinstance(packet, torch._ops.OpOverloadPacket):
            return None
        schemas = [getattr(packet, overload)._schema for overload in packet.overloads()]
    written = [
        (None if argument.kwarg_only else place, argument.name)
        for schema in schemas
        for place, argument in enumerate(schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]
    return tuple(dict.fromkeys(written))


def replaces_memory(func: torch._ops.OpOverload) -> bool:
    """Whether an operator gives a tensor other memory, or memory of another size (torch 2.11, 2.13)."""
    packet = func._schema.name
    return packet == "aten::set_" or packet.startswith(("inductor::resize_storage_bytes_", "aten::resize_"))


def has_symbols(values: Iterable[Any]) -> bool:
    """Whether the size of a tensor is not a number. (2.11, 2.13)"""
    tensors = (x for x in values if isinstance(x, torch.Tensor))
    return any(not isinstance(n, int) for x in tensors for n in (*x.size(), *x.stride()))


def bounds_bool(node: torch.fx.Node) -> bool:
    """Whether a node is Dynamo's assertion that a bool, as a number, is 0 or 1. (2.13)"""
    if node.target is not torch.ops.aten._assert_scalar.default:
        return False
    bound = node.args[0]
    return isinstance(bound, torch.fx.Node) and getattr(bound.args[0], "target", None) is torch.sym_ite


def symbols_of(values: Iterable[Any]) -> set[Any]:
    """Symbols in numbers, and in sizes, strides and offsets of tensors. (2.11, 2.13)"""
    from torch.fx.experimental.symbolic_shapes import free_symbols

    return set().union(*map(free_symbols, values))


def autocast_enabled() -> bool:
    """Whether operations are cast, on any device, in this thread. (2.11, 2.13)"""
    return torch._C._is_any_autocast_enabled()


def set_grad_mode(on: bool) -> None:
    """What `torch.set_grad_enabled` does, which takes longer. (2.11, 2.13)"""
    torch._C._set_grad_enabled(on)


def no_autocast() -> AbstractContextManager[Any]:
    """Context in which no operation is cast. (2.11, 2.13)"""
    return torch._C._DisableAutocast()


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


def mode_of_fakes(values: Iterable[Any]) -> AbstractContextManager[Any]:
    """Calls inside compute fake tensors, with the mode of the first one among values; nothing changes without any."""
    return next((value.fake_mode for value in values if isinstance(value, FakeTensor)), nullcontext())


def no_fake_mode() -> AbstractContextManager[Any]:
    """Calls inside compute real tensors, whatever traces around them. (2.11, 2.13)"""
    from torch._subclasses.fake_tensor import unset_fake_temporarily

    return unset_fake_temporarily()
