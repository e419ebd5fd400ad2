"""What in a region a capture still cannot record."""

from __future__ import annotations

import operator

import torch
from torch import fx

from pygraph_train.regions.passes.draft import CPU, Draft, Left, is_on, name_of, user_line, value
from pygraph_train.regions.passes.items import ITEM_OPS
from pygraph_train.regions.passes.movable import crosses_devices, has_mask_index, only_asks_size, packet

aten = torch.ops.aten

_SIZE_DEPENDS_ON_DATA = frozenset(
    {
        *(aten.nonzero, aten.masked_select, aten.repeat_interleave, aten.bincount),
        *(aten._unique2, aten.unique_consecutive, aten.unique_dim, aten.unique_dim_consecutive),
    }
)


def blockers(draft: Draft) -> tuple[Left, ...]:
    """Every kind of blocker once for each line of the user's code."""
    found: dict[Left, None] = {}
    for node in draft.graph.nodes:
        why = _why_blocked(draft, node) if node.op == "call_function" else None
        if why is not None:
            found[Left(name_of(node), user_line(node), why)] = None
    return tuple(found)


def _why_blocked(draft: Draft, node: fx.Node) -> str | None:
    because = draft.why.get(node.name)
    if node.target in ITEM_OPS:
        return f"waits for the device: {because or 'its number is read on the CPU'}"
    if (packet(node) in _SIZE_DEPENDS_ON_DATA and _size_unknown(node)) or _selects_by_mask(node):
        return "waits for the device: the size of its result depends on data"
    if crosses_devices(node):
        other = node.args[0] if is_on(value(node), draft.device) else node
        because = because or (draft.why.get(other.name) if isinstance(other, fx.Node) else None)
        return "copies between the CPU and the device" + (f": the CPU tensor {because}" if because else "")
    result = value(node)
    if is_on(result, CPU) and node.target is not operator.getitem:
        return f"runs on the CPU: it {because}" if because else "runs on the CPU"
    if is_on(result, draft.device):
        return _why_reads_cpu(draft, node)
    return None


def _size_unknown(node: fx.Node) -> bool:
    return "unbacked_bindings" in node.meta or any(
        isinstance(user.meta.get("val"), torch.SymInt) or "unbacked_bindings" in user.meta
        for user in node.users
    )


def _selects_by_mask(node: fx.Node) -> bool:
    if not has_mask_index(node):
        return False
    # with one value, a masked index_put is a `where` on the device
    stored = value(node.args[2]) if len(node.args) > 2 else None
    return stored is None or stored.dim() > 0


def _why_reads_cpu(draft: Draft, node: fx.Node) -> str | None:
    if only_asks_size(node):
        return None
    for read in node.all_input_nodes:
        if is_on(value(read), CPU):
            because = draft.why.get(read.name)
            return f"reads the CPU tensor {read.name}" + (f", which {because}" if because else "")
    return None
