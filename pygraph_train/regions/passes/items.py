"""`.item()` whose number only feeds device arithmetic stays on the device as a 0-dim tensor."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from pygraph_train.regions.passes.draft import Draft, Refused, name_of, user_line, value
from pygraph_train.torch_private.dispatch import OpOverload

aten = torch.ops.aten
prims = torch.ops.prims

ITEMS = "items"
ITEM_OPS = (aten._local_scalar_dense.default, aten.item.default)

_NUMBER_ARITHMETIC: dict[Callable[..., Any], Callable[..., Any]] = {
    operator.add: aten.add.Tensor,
    operator.sub: aten.sub.Tensor,
    operator.mul: aten.mul.Tensor,
    operator.truediv: aten.div.Tensor,
    operator.neg: aten.neg.default,
    torch.sym_float: torch.sym_float,  # these two are the casts that every argument gets
    math.trunc: math.trunc,
}
_BINARY = {
    aten.eq.Scalar: aten.eq.Tensor,
    aten.ne.Scalar: aten.ne.Tensor,
    aten.lt.Scalar: aten.lt.Tensor,
    aten.le.Scalar: aten.le.Tensor,
    aten.gt.Scalar: aten.gt.Tensor,
    aten.ge.Scalar: aten.ge.Tensor,
    **{op: op for op in (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor)},
    aten.div.Tensor_mode: aten.div.Tensor_mode,
    aten.add.Scalar: aten.add.Tensor,
    aten.sub.Scalar: aten.sub.Tensor,
    aten.mul.Scalar: aten.mul.Tensor,
    aten.div.Scalar: aten.div.Tensor,
    aten.pow.Tensor_Scalar: aten.pow.Tensor_Tensor,
    aten.pow.Scalar: aten.pow.Tensor_Tensor,
    aten.remainder.Scalar: aten.remainder.Tensor,
    aten.fmod.Scalar: aten.fmod.Tensor,
    aten.clamp_min.default: aten.clamp_min.Tensor,
    aten.clamp_max.default: aten.clamp_max.Tensor,
}
_FILLS = {aten.full.default: 1, aten.full_like.default: 1, aten.scalar_tensor.default: 0, aten.fill.Scalar: 1}
_HALF = (torch.float16, torch.bfloat16)
# aten computes these with the number as it is; others round it to the tensor's dtype first, or not
_NUMBER_NOT_ROUNDED = frozenset(
    {
        *(aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.div.Tensor),
        *(aten.add.Scalar, aten.sub.Scalar, aten.mul.Scalar, aten.div.Scalar),
    }
)


def has_items(draft: Draft) -> bool:
    return any(node.target in ITEM_OPS for node in draft.graph.nodes)


def keep_items(draft: Draft) -> None:
    """Replace every `.item()` whose readers all take a tensor as well."""
    for node in list(draft.graph.nodes):
        if node.op != "call_function" or node.target not in ITEM_OPS:
            continue
        readers = _readers(node)
        reason = draft.excluded.get(node.name) or next(
            (why for why in map(_why_not, readers) if why is not None), None
        )
        if reason is not None:
            draft.why[node.name] = reason
            continue
        where = user_line(node)
        try:
            _keep_on_device(draft, node, readers)
        except Refused as refused:
            refused.names |= {node.name}
            raise
        draft.changed(ITEMS, ".item() is kept on the device as a 0-dim tensor", where)


def _readers(item: fx.Node) -> list[fx.Node]:
    """What reads the number, or another number computed from it, in graph order."""
    numbers, found = {item}, set()
    for node in item.graph.nodes:
        if numbers.isdisjoint(node.all_input_nodes):
            continue
        found.add(node)
        if isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat, torch.SymBool, int, float)):
            numbers.add(node)
    return [node for node in item.graph.nodes if node in found]


def _why_not(reader: fx.Node) -> str | None:
    """Why a reader needs the number itself."""
    if reader.target in _NUMBER_ARITHMETIC:
        return None
    if reader.target in _FILLS:
        position = _FILLS[reader.target]  # type: ignore[index]
        others = [arg for i, arg in enumerate(reader.args) if i != position]
        return _why_not_number_in(reader, (others, reader.kwargs))
    if reader.target is aten.masked_fill.Scalar:
        return None
    if reader.target not in _BINARY:
        return f"{_what(reader)} needs the number on the CPU"
    tensors = [tensor for tensor in map(value, reader.args) if tensor is not None]
    if len(tensors) != 1 or len(reader.args) != 2:
        return f"{_what(reader)} needs the number on the CPU"
    if tensors[0].dtype in _HALF and reader.target not in _NUMBER_NOT_ROUNDED:
        return f"{_what(reader)} computes in {tensors[0].dtype}, where it matters how the number is rounded"
    return _why_not_number_in(reader, reader.kwargs)


def _why_not_number_in(reader: fx.Node, arguments: Any) -> str | None:
    """Numbers may not stand elsewhere in a call: as a size, or as `alpha`."""
    found: list[fx.Node] = []
    fx.map_arg(arguments, found.append)
    if any(isinstance(node.meta.get("val"), (torch.SymInt, torch.SymFloat)) for node in found):
        return f"{_what(reader)} needs the number for a size or a factor"
    return None


def _what(reader: fx.Node) -> str:
    if reader.op == "output":
        return "a result of the graph"
    is_operator = isinstance(reader.target, OpOverload)
    name = name_of(reader) if is_operator else getattr(reader.target, "__name__", str(reader.target))
    return f"{name} ({user_line(reader)})"


# --- the rewrite ------------------------------------------------------------------------------------


def _keep_on_device(draft: Draft, item: fx.Node, readers: list[fx.Node]) -> None:
    source = item.args[0]
    assert isinstance(source, fx.Node)
    if source.meta["val"].dim():
        source = draft.emit(aten.reshape.default, source, [], at=item)
    tensors = {item: _cast(draft, source, _number_dtype(item), at=item)}
    for reader in readers:
        if reader.target in _NUMBER_ARITHMETIC:
            tensors[reader] = _number(draft, reader, tensors)
        else:
            draft.replace(reader, _tensor(draft, reader, tensors))
    remaining = set(draft.graph.nodes)
    for node in reversed(list(tensors)):
        if node in remaining:
            draft.erase_unused(node)


def _number_dtype(node: fx.Node) -> torch.dtype:
    """The dtype that computes like Python's numbers of this kind."""
    number = node.meta["val"]
    if isinstance(number, (torch.SymFloat, float)):
        return torch.float64
    if isinstance(number, (torch.SymInt, int)) and not isinstance(number, bool):
        return torch.int64
    raise Refused(node, f"is a {type(number).__name__}")


def _cast(draft: Draft, node: fx.Node, dtype: torch.dtype, at: fx.Node) -> fx.Node:
    if node.meta["val"].dtype == dtype:
        return node
    return draft.emit(prims.convert_element_type.default, node, dtype, at=at)


def _number(draft: Draft, node: fx.Node, tensors: dict[fx.Node, fx.Node]) -> fx.Node:
    """Arithmetic between Python numbers, as arithmetic between 0-dim float64 or int64 tensors."""
    dtype = _number_dtype(node)
    args: list[Any] = [
        _cast(draft, tensors[a], dtype, at=node) if isinstance(a, fx.Node) and a in tensors else a
        for a in node.args
    ]
    if node.target in (torch.sym_float, math.trunc):
        return args[0]
    if not isinstance(args[0], fx.Node) or value(args[0]) is None:  # the tensor overloads want a tensor first
        device = next(tensor for tensor in tensors.values()).meta["val"].device
        args[0] = draft.emit(aten.full.default, [], args[0], dtype=dtype, device=device, at=node)
    return draft.emit(_NUMBER_ARITHMETIC[node.target], *args, at=node)  # type: ignore[index]


def _tensor(draft: Draft, reader: fx.Node, tensors: dict[fx.Node, fx.Node]) -> fx.Node:
    if reader.target in _FILLS:
        return _fill(draft, reader, tensors[reader.args[_FILLS[reader.target]]])  # type: ignore[index]
    if reader.target is aten.masked_fill.Scalar:
        filled, mask, number = reader.args
        number = _cast(draft, tensors[number], reader.meta["val"].dtype, at=reader)  # type: ignore[index]
        return draft.emit(aten.where.self, mask, number, filled, at=reader)
    return _binary(draft, reader, tensors)


def _fill(draft: Draft, reader: fx.Node, number: fx.Node) -> fx.Node:
    filled = reader.meta["val"]
    number = _cast(draft, number, filled.dtype, at=reader)
    if number.meta["val"].device != filled.device:
        number = draft.emit(prims.device_put.default, number, filled.device, at=reader)
    if filled.dim() == 0:
        return number
    size = reader.args[0] if reader.target is aten.full.default else list(filled.size())
    expanded = draft.emit(aten.expand.default, number, size, at=reader)
    return draft.emit(aten.clone.default, expanded, memory_format=torch.contiguous_format, at=reader)


def _binary(draft: Draft, reader: fx.Node, tensors: dict[fx.Node, fx.Node]) -> fx.Node:
    """A Python number is weaker than a 0-dim tensor in promotion, and is not rounded to a half dtype."""
    number = next(arg for arg in reader.args if arg in tensors)
    tensor = next(t for t in map(value, reader.args) if t is not None)
    common = _promoted(tensor, number.meta["val"])  # type: ignore[union-attr]
    compute = torch.float32 if common in _HALF else common
    args = [
        _cast(draft, tensors[arg] if arg is number else arg, compute, at=reader)  # type: ignore[arg-type, index]
        if arg is number or common in _HALF
        else arg
        for arg in reader.args
    ]
    kwargs: dict[str, Any] = dict(reader.kwargs)
    result = draft.emit(_BINARY[reader.target], *args, at=reader, **kwargs)  # type: ignore[index]
    return _cast(draft, result, reader.meta["val"].dtype, at=reader)


def _promoted(tensor: torch.Tensor, number: object) -> torch.dtype:
    """The dtype in which aten computes with a tensor and a Python number."""
    like = torch.empty([1] if tensor.dim() else [], dtype=tensor.dtype, device="meta")
    return torch.result_type(like, 1.0 if isinstance(number, (torch.SymFloat, float)) else 1)
