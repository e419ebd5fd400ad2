"""What a region holds on the CPU moves to the device: scalars, constants, index tensors, inputs, outputs.

A capture records neither CPU work nor a copy from pageable memory, and bakes the values of CPU scalars in.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from pygraph_train.regions.passes.draft import (
    CPU,
    Draft,
    description,
    is_on,
    is_written,
    name_of,
    user_line,
    value,
)
from pygraph_train.regions.passes.movable import (
    crosses_devices,
    is_constructor,
    only_asks_size,
    why_not_movable,
    why_not_readable,
)
from pygraph_train.torch_private.aot import saved_for_backward
from pygraph_train.torch_private.attributes import attribute
from pygraph_train.torch_private.dispatch import OpOverload, no_fake_mode, schema

aten = torch.ops.aten
prims = torch.ops.prims

LARGE = 4 << 20
"""Bytes from which an input that CPU operators read is not copied to the device as a whole."""

SCALARS, TENSORS, INPUTS, OUTPUTS = "cpu_scalars", "cpu_tensors", "cpu_inputs", "cpu_outputs"


def has_cpu_tensors(draft: Draft) -> bool:
    return any(is_on(value(node), CPU) or node.op == "get_attr" for node in draft.graph.nodes)


def relocate(draft: Draft) -> None:
    """Move every CPU tensor of the graph that can move."""
    why: dict[fx.Node, str] = {}
    moving = _movable_set(draft, why)
    if _give_each_reader_its_own(draft, why):
        why = {}
        moving = _movable_set(draft, why)
    draft.why.update({node.name: reason for node, reason in why.items()})
    if not moving:
        return
    _report(draft, moving)
    _redirect_outputs(draft, moving)
    to_device = [n for n in draft.graph.nodes if crosses_devices(n) and n.args[0] in moving]
    to_cpu = [node for node in moving if crosses_devices_back(node)]
    changed = {_move(draft, node) for node in moving if node not in to_cpu}
    for copy in to_cpu:
        changed |= set(copy.users)
        _replace_copy(draft, copy)
    draft.refresh(changed)
    for copy in to_device:
        _replace_copy(draft, copy)
    _freshen_handed_over(draft)


# --- what can move ----------------------------------------------------------------------------------


def _movable_set(draft: Draft, why: dict[fx.Node, str]) -> dict[fx.Node, None]:
    """The largest set of CPU nodes that can move together, in graph order; `why` gets the others' reasons."""
    moving: dict[fx.Node, None] = {}
    for node in draft.graph.nodes:
        if is_on(value(node), CPU):
            reason = _why_not_alone(draft, node)
            if reason is None:
                moving[node] = None
            else:
                why[node] = reason
    unsettled = True
    while unsettled:
        unsettled = False
        for node in list(moving):
            reason = _why_not_among(draft, node, moving, why)
            if reason is not None:
                del moving[node]
                why[node] = reason
                unsettled = True
    useful = {node for group in _connected(moving) if _needed_on_device(group) for node in group}
    return {node: None for node in moving if node in useful}


def _why_not_alone(draft: Draft, node: fx.Node) -> str | None:
    if node.name in draft.excluded:
        return draft.excluded[node.name]
    if node.op == "placeholder":
        return _why_not_staged(node)
    if node.op == "get_attr":
        return None
    if node.op != "call_function":
        return f"is a {node.op}"
    if crosses_devices(node):
        source = value(node.args[0])
        return None if is_on(source, draft.device) else "comes from another device"
    return why_not_movable(node)


def _why_not_staged(node: fx.Node) -> str | None:
    if is_written(node):
        return "is an input that the graph writes to"
    size = node.meta["val"].nbytes
    read_on_cpu = any(is_on(value(user), CPU) and not only_asks_size(user) for user in node.users)
    if read_on_cpu and isinstance(size, int) and size > LARGE:
        # an embedding table on the CPU: only the rows that a step reads should go to the device
        return f"is a large input ({size >> 20} MiB) that is first read on the CPU"
    return None


def _why_not_among(
    draft: Draft, node: fx.Node, moving: dict[fx.Node, None], why: dict[fx.Node, str]
) -> str | None:
    if node.op == "call_function" and not crosses_devices(node):
        for read in node.all_input_nodes:
            tensor = value(read)
            if tensor is not None and read not in moving:
                because = f", which {why[read]}" if read in why else f" of {tensor.device}"
                return f"reads {name_of(read)}{because}"
    for user in node.users:
        reason = _why_not_read_by(draft, user, node, moving)
        if reason is not None:
            return reason
    return None


def _why_not_read_by(draft: Draft, user: fx.Node, node: fx.Node, moving: dict[fx.Node, None]) -> str | None:
    if user.op == "output" or user in moving or only_asks_size(user):
        return None
    result = value(user)
    if result is None or is_on(result, CPU):
        return f"is read by {name_of(user)} on the CPU"
    if not is_on(result, draft.device):
        return f"is read on {result.device}"
    return None if crosses_devices(user) else why_not_readable(user, node)


def _connected(moving: dict[fx.Node, None]) -> Iterator[list[fx.Node]]:
    seen: set[fx.Node] = set()
    for start in moving:
        group, queue = [], [start]
        while queue:
            node = queue.pop()
            if node in seen:
                continue
            seen.add(node)
            group.append(node)
            queue += [other for other in (*node.all_input_nodes, *node.users) if other in moving]
        if group:
            yield group


def _needed_on_device(group: list[fx.Node]) -> bool:
    """An input or constant that is only returned, or asked for its size, stays where it is."""
    return any(
        node.op not in ("placeholder", "get_attr")
        or any(user.op != "output" and not only_asks_size(user) for user in node.users)
        for node in group
    )


def _give_each_reader_its_own(draft: Draft, why: dict[fx.Node, str]) -> bool:
    """Clone constructors that stay for one reader's sake, so that the other readers' can move."""
    shared = [
        node
        for node in draft.graph.nodes
        if is_constructor(node) and node in why and len(node.users) > 1 and why_not_movable(node) is None
    ]
    for node in shared:
        for user in list(node.users)[1:]:
            with draft.graph.inserting_after(node):
                own = draft.graph.node_copy(node, lambda n: n)
            user.replace_input_with(node, own)
    return bool(shared)


# --- the move ---------------------------------------------------------------------------------------


def _move(draft: Draft, node: fx.Node) -> fx.Node:
    """Move one node; returns the node that stands for it."""
    if node.op == "placeholder":
        draft.staged += (node.name,)
        node.meta["val"] = draft.fake(node.meta["val"], draft.device)
    elif node.op == "get_attr":
        return _move_constant(draft, node)
    else:
        _set_device(draft, node)
    return node


def crosses_devices_back(node: fx.Node) -> bool:
    """Whether a call is a copy from a device to the CPU."""
    return crosses_devices(node) and is_on(value(node), CPU)


def _set_device(draft: Draft, node: fx.Node) -> None:
    assert isinstance(node.target, OpOverload)
    arguments = schema(node.target).arguments
    for i, argument in enumerate(arguments):
        if argument.name != "device":
            continue
        if i < len(node.args):
            node.update_arg(i, draft.device)
        elif is_constructor(node) or node.kwargs.get("device") is not None:
            node.update_kwarg("device", draft.device)
    if node.kwargs.get("pin_memory"):
        node.update_kwarg("pin_memory", False)


def _move_constant(draft: Draft, node: fx.Node) -> fx.Node:
    target = str(node.target)
    constant = attribute(draft.gm, target)
    if constant.dim() == 0:
        number = scalar_value(constant)
        moved = draft.emit(aten.full.default, [], number, dtype=constant.dtype, device=draft.device, at=node)
    else:
        name = f"{target.replace('.', '_')}_on_{draft.device.type}"
        draft.gm.register_buffer(name, on_device(constant, draft.device), persistent=False)
        with draft.graph.inserting_before(node):
            moved = draft.graph.get_attr(name)
        moved.meta = {**node.meta, "val": draft.fake(node.meta["val"], draft.device)}
    draft.replace(node, moved)
    return moved


def on_device(constant: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A constant of the graph, copied once, when the region is compiled."""
    with no_fake_mode():
        return constant.to(device)


def scalar_value(constant: torch.Tensor) -> bool | int | float | complex:
    with no_fake_mode():
        return constant.item()


def _replace_copy(draft: Draft, node: fx.Node) -> None:
    """Both sides of a copy are on the device now: it is a cast, a clone, or nothing."""
    source = node.args[0]
    assert isinstance(source, fx.Node)
    result = source
    dtype = node.meta["val"].dtype
    if dtype != source.meta["val"].dtype:
        result = draft.emit(prims.convert_element_type.default, source, dtype, at=node)
    layout = node.kwargs.get("memory_format")
    if layout not in (None, torch.preserve_format):
        result = draft.emit(aten.clone.default, result, memory_format=layout, at=node)
    strided = description(result.meta["val"]) != description(node.meta["val"])
    if strided or (result is source and _must_be_fresh(source, node)):
        result = draft.emit(aten.clone.default, result, at=node)
    draft.replace(node, result)


def _must_be_fresh(source: fx.Node, copy: fx.Node) -> bool:
    """Whether a copy has to stay one, as its result outlives the source or the source is written to."""
    if is_written(source):
        return True
    static = source.op != "call_function"
    return (static or len(source.users) > 1 or _is_view(source)) and _reaches_output(copy)


def _freshen_handed_over(draft: Draft) -> None:
    """A backward may run after the next forward, when the buffers of staged inputs hold other values."""
    output = draft.graph.output_node()
    results = list(draft.outputs)
    for i in draft.handed_over:
        base = results[i]
        while _is_view(base):
            base = base.args[0]
        if base.op == "placeholder":
            results[i] = draft.emit(aten.clone.default, results[i], at=output, like=results[i])
    output.args = (tuple(results),)


def _is_view(node: fx.Node) -> bool:
    return isinstance(node.target, OpOverload) and node.target.is_view


def _reaches_output(node: fx.Node) -> bool:
    return any(user.op == "output" or (_is_view(user) and _reaches_output(user)) for user in node.users)


# --- outputs and the report -------------------------------------------------------------------------


def _redirect_outputs(draft: Draft, moving: dict[fx.Node, None]) -> None:
    inputs = {node: i for i, node in enumerate(draft.placeholders)}
    saved = saved_for_backward(draft.gm) if draft.hand_over else frozenset()
    for i, output in enumerate(draft.outputs):
        if output not in moving:
            continue
        if output in inputs:
            draft.passthrough[i] = inputs[output]
        elif i in saved:
            draft.handed_over += (i,)
        else:
            draft.late += (i,)


def _report(draft: Draft, moving: dict[fx.Node, None]) -> None:
    for group in _connected(moving):
        scalar = all(node.meta["val"].dim() == 0 for node in group)
        for node in group:
            tensor = node.meta["val"]
            kind = f"{tensor.dtype}{list(tensor.size())}".removeprefix("torch.")
            if node.op == "placeholder":
                what = f"the CPU input {node.name} ({kind}) is read from the device"
                draft.changed(SCALARS if tensor.dim() == 0 else INPUTS, what, user_line(node))
            elif node.op == "get_attr":
                what = f"a CPU constant ({kind}) is kept on the device"
                draft.changed(SCALARS if scalar else TENSORS, what, user_line(node))
            elif is_constructor(node):
                what = f"{name_of(node)} is built on the device"
                draft.changed(SCALARS if scalar else TENSORS, what, user_line(node))
            elif crosses_devices_back(node):
                draft.changed(OUTPUTS, _what_of_output(node), user_line(node))


def _what_of_output(copy: fx.Node) -> str:
    if _reaches_output(copy):
        return "the copy to the CPU is made after the region"
    return "the copy to the CPU is gone: its readers moved to the device"
