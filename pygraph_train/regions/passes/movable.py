"""Which CPU operators compute the same on the device."""

from __future__ import annotations

import torch
from torch import fx

from pygraph_train.regions.passes.draft import CPU, is_on, value
from pygraph_train.torch_private.dispatch import OpOverload, schema

aten = torch.ops.aten
prims = torch.ops.prims

COPIES = frozenset({prims.device_put.default, aten._to_copy.default})

_CONSTRUCTORS = frozenset(
    {
        *(aten.full, aten.ones, aten.zeros, aten.eye, aten.scalar_tensor, aten.arange, prims.iota),
        *(aten.tril_indices, aten.triu_indices),
        *(aten.full_like, aten.ones_like, aten.zeros_like, aten.new_full, aten.new_ones, aten.new_zeros),
    }
)
_DATA_MOVEMENT = frozenset(
    {
        *(aten.clone, aten.lift_fresh_copy, aten._to_copy, prims.device_put, prims.convert_element_type),
        *(aten.cat, aten.stack, aten.index, aten.index_select, aten.gather, aten.embedding, aten.repeat),
        *(aten.tril, aten.triu, aten.flip, aten.roll, aten.constant_pad_nd, aten.masked_fill, aten.copy),
        *(aten._unsafe_view, aten.where, aten.slice_scatter, aten.select_scatter, aten.diagonal_copy),
        *(aten.fill, aten.permute_copy, aten.view_copy, aten.expand_copy, aten._unsafe_index),
    }
)
_EXACT = frozenset(
    {
        *(aten.add, aten.sub, aten.rsub, aten.mul, aten.div, aten.neg, aten.abs, aten.sqrt, aten.sign),
        *(aten.floor, aten.ceil, aten.round, aten.trunc, aten.maximum, aten.minimum),
        *(aten.clamp, aten.clamp_min, aten.clamp_max, aten.isnan, aten.isinf),
        *(aten.eq, aten.ne, aten.lt, aten.le, aten.gt, aten.ge),
        *(aten.logical_and, aten.logical_or, aten.logical_xor, aten.logical_not),
    }
)
_EXACT_FOR_INTEGERS = frozenset({aten.sum, aten.cumsum, aten.any, aten.all, aten.amax, aten.amin, aten.prod})
_RANDOM = ("inductor_seeds", "inductor_lookup_seed", "inductor_random", "inductor_randint")
_SIZE_QUERIES = frozenset({aten.sym_size, aten.sym_stride, aten.sym_numel, aten.sym_storage_offset})
_TAKES_CPU_INDICES = frozenset({aten.index, aten.index_put, aten._unsafe_index, aten._unsafe_index_put})
_TAKES_CPU_SCALARS = frozenset({aten.index_put, aten.masked_fill, aten.fill, aten.rsub, aten.where})
_TAKES_CPU_SOURCE = frozenset({aten.copy, aten.copy_, aten.slice_scatter, aten.select_scatter})


def packet(node: fx.Node) -> object:
    """An operator without its overload."""
    return getattr(node.target, "overloadpacket", None)


def only_asks_size(node: fx.Node) -> bool:
    return packet(node) in _SIZE_QUERIES


def is_constructor(node: fx.Node) -> bool:
    return packet(node) in _CONSTRUCTORS


def crosses_devices(node: fx.Node) -> bool:
    """Whether a call is a copy between the CPU and another device."""
    source, result = value(node.args[0] if node.args else None), value(node)
    return (
        node.target in COPIES
        and source is not None
        and result is not None
        and is_on(source, CPU) != is_on(result, CPU)
    )


def why_not_movable(node: fx.Node) -> str | None:
    """Why a CPU operator must stay on the CPU; None where the device computes the same.

    Copies between devices and what the operator reads are the caller's business.
    """
    op = node.target
    if not isinstance(op, OpOverload):
        return "is not an operator of aten or prims"
    if torch.Tag.nondeterministic_seeded in op.tags or schema(op).name.split("::")[-1] in _RANDOM:
        return "draws from the CPU's random generator"
    if schema(op).is_mutable:
        return "writes to a CPU tensor"
    if op is aten.as_strided.default:
        return "depends on the memory layout of a CPU tensor"
    if is_constructor(node):
        return _why_not_constructor(node)
    if packet(node) in _DATA_MOVEMENT:
        return "synchronises on the device (boolean index)" if has_mask_index(node) else None
    if op.is_view:
        return None
    return _why_not_arithmetic(node, op)


def has_mask_index(node: fx.Node) -> bool:
    """Whether a call indexes with a boolean mask, so that its result's size depends on data."""
    if packet(node) not in _TAKES_CPU_INDICES:
        return False
    indices = node.args[1]
    return isinstance(indices, (list, tuple)) and any(
        t is not None and t.dtype in (torch.bool, torch.uint8) for t in map(value, indices)
    )


def _why_not_constructor(node: fx.Node) -> str | None:
    if packet(node) is not aten.arange:
        return None
    # a floating range is summed in another order, unless every element is an integer
    return None if all(isinstance(arg, (int, fx.Node)) for arg in node.args) else "rounds differently"


def _why_not_arithmetic(node: fx.Node, op: OpOverload) -> str | None:
    tensors = [t for t in map(value, [node, *node.all_input_nodes]) if t is not None]
    integers = all(not t.dtype.is_floating_point and not t.dtype.is_complex for t in tensors)
    pointwise = torch.Tag.pointwise in op.tags or op is aten.rsub.Tensor
    if packet(node) in _EXACT:
        return None
    if pointwise and (integers or all(t.dim() == 0 for t in tensors)):
        return None
    if integers and packet(node) in _EXACT_FOR_INTEGERS:
        return None
    if pointwise:
        return "rounds differently on the device"
    return "is not known to compute the same on the device"


def why_not_readable(reader: fx.Node, read: fx.Node) -> str | None:
    """Why a device operator that reads a CPU tensor would not read the same from the device."""
    tensor = value(read)
    kind = packet(reader)
    if kind in _TAKES_CPU_INDICES and reader.args[0] is not read and not has_mask_index(reader):
        return None
    if kind in _TAKES_CPU_SOURCE and reader.args[0] is not read:
        return None
    pointwise = isinstance(reader.target, OpOverload) and torch.Tag.pointwise in reader.target.tags
    if tensor is not None and tensor.dim() == 0 and (pointwise or kind in _TAKES_CPU_SCALARS):
        return None
    return f"{reader.target} reads it from the CPU"
