"""Small element-wise operations that do not depend on each other run in one launch.

Mixed precision casts every weight before its matrix product and every gradient after it, one kernel each, and a
norm counts its batches with a kernel of its own. Such a kernel takes less time than the pause between two kernels.
As `_foreach` operations Inductor makes one kernel of many, with the same bits.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import fx

from pygraph_train.regions.passes.draft import Draft, Refused, description, is_on, value
from pygraph_train.torch_private.dispatch import OpOverload, has_symbols
from pygraph_train.torch_private.inductor import products_take_neighbours_in

aten = torch.ops.aten
prims = torch.ops.prims

BATCHED = "batched"

LARGE = 16 << 20
"""Bytes of tensors that wait for each other: what a batch may add to the memory that is in use."""
MANY = 64
"""Operations in one batch: a kernel takes the addresses of all their tensors as arguments."""

_CASTS = (prims.convert_element_type.default, aten._to_copy.default)
_HALF = (torch.float16, torch.bfloat16)
_PRODUCTS = (
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten.baddbmm.default,
    aten.convolution.default,
    aten.convolution_backward.default,
)
_BIAS = {aten.addmm.default: 0, aten.baddbmm.default: 0, aten.convolution.default: 2}


def may_batch(draft: Draft) -> bool:
    if products_take_neighbours_in():
        return False  # where a cast may cost nothing
    return any(_is_cast(draft, node) or _is_counter(draft, node) for node in draft.graph.nodes)


def batch(draft: Draft) -> None:
    """Batch casts of inputs for matrix products, casts of products that are returned, and counters."""
    casts = [node for node in draft.graph.nodes if _is_cast(draft, node)]
    early = [cast for cast in casts if _feeds_products(cast)]
    late = [cast for cast in casts if _returns_product(cast)]
    counters = [node for node in draft.graph.nodes if _is_counter(draft, node)]
    for what, nodes, size, rewrite in (
        ("casts of inputs", early, _result_bytes, _cast_early),
        ("casts of results", late, _source_bytes, _cast_late),
        ("counters", counters, _result_bytes, _count),
    ):
        groups = list(_groups(nodes, size))
        for group in groups:
            rewrite(draft, group)
        if groups:
            launches = f"{len(groups)} launch{'es' if len(groups) > 1 else ''}"
            draft.changed(BATCHED, f"{sum(map(len, groups))} {what} run in {launches}", None)


# --- what can be batched ----------------------------------------------------------------------------


def _is_cast(draft: Draft, node: fx.Node) -> bool:
    if node.target not in _CASTS or node.name in draft.excluded:
        return False
    if not set(node.kwargs) <= {"dtype", "layout", "device"}:
        return False
    return all(_is_plain(draft, tensor) for tensor in (value(node), value(node.args[0])))


def _is_plain(draft: Draft, tensor: torch.Tensor | None) -> bool:
    """On the device, of a known size, and not empty."""
    return (
        tensor is not None
        and is_on(tensor, draft.device)
        and not has_symbols([tensor])
        and tensor.numel() > 0
    )


def _feeds_products(cast: fx.Node) -> bool:
    """Whether an input is cast for kernels that cannot do it on the way: the result is in memory in any case."""
    source = cast.args[0]
    readers = list(_readers(cast))
    return (
        isinstance(source, fx.Node)
        and source.op == "placeholder"
        and any(reader.op != "output" for reader, _ in readers)
        and all(_reads_memory(reader, read) for reader, read in readers)
    )


def _returns_product(cast: fx.Node) -> bool:
    """Whether what is cast is written by such a kernel, and the result is only returned. Exact casts only."""
    source = _base(cast.args[0])
    if source.target is operator.getitem:
        source = source.args[0]  # type: ignore[assignment]
    before, after = cast.args[0].meta["val"].dtype, cast.meta["val"].dtype  # type: ignore[union-attr]
    return (
        source.target in _PRODUCTS
        and torch.promote_types(before, after) == after
        and all(reader.op == "output" for reader, _ in _readers(cast))
    )


def _is_counter(draft: Draft, node: fx.Node) -> bool:
    """Whether an input of the graph is counted up in place, as `num_batches_tracked` is."""
    if node.target is not aten.add.Tensor or node.kwargs or node.name in draft.excluded:
        return False
    source, number = node.args
    return bool(
        isinstance(source, fx.Node)
        and source.op == "placeholder"
        and number == 1
        and _is_plain(draft, value(source))
        and value(source).dtype == value(node).dtype == torch.int64  # type: ignore[union-attr]
        and [(u.target, *u.args) for u in node.users] == [(aten.copy_.default, source, node)]
    )


def _readers(node: fx.Node) -> Iterator[tuple[fx.Node, fx.Node]]:
    """What reads a value, past its views, each with the view that it reads."""
    for user in node.users:
        if _is_view(user):
            yield from _readers(user)
        else:
            yield user, node


def _reads_memory(reader: fx.Node, read: fx.Node) -> bool:
    """Whether a reader needs a tensor in memory, where a fused kernel would compute it on the way."""
    if reader.op == "output":
        return True
    bias = _BIAS.get(reader.target)  # type: ignore[call-overload]
    if bias is not None and len(reader.args) > bias and reader.args[bias] is read:
        # Inductor adds others in a kernel after the product, and does not round them to half precision first
        return reader.target is aten.addmm.default and read.meta["val"].dtype in _HALF
    return reader.target in _PRODUCTS


def _is_view(node: fx.Node) -> bool:
    is_view = isinstance(node.target, OpOverload) and node.target.is_view
    return is_view and len(node.all_input_nodes) == 1


def _base(node: object) -> fx.Node:
    assert isinstance(node, fx.Node)
    return _base(node.args[0]) if _is_view(node) else node


# --- the rewrite ------------------------------------------------------------------------------------


def _result_bytes(node: fx.Node) -> int:
    return int(node.meta["val"].nbytes)


def _source_bytes(node: fx.Node) -> int:
    return int(node.args[0].meta["val"].nbytes)  # type: ignore[union-attr]


def _groups(nodes: Iterable[fx.Node], size: Callable[[fx.Node], int]) -> Iterator[list[fx.Node]]:
    """Neighbours in the graph's order, two or more, that stay below the limits together."""
    group: list[fx.Node] = []
    total = 0
    for node in nodes:
        more = size(node)
        if group and (total + more > LARGE or len(group) == MANY):
            if len(group) > 1:
                yield group
            group, total = [], 0
        group.append(node)
        total += more
    if len(group) > 1:
        yield group


def _cast_early(draft: Draft, casts: Sequence[fx.Node]) -> None:
    _cast(draft, casts, at=casts[0])


def _cast_late(draft: Draft, casts: Sequence[fx.Node]) -> None:
    _cast(draft, casts, at=casts[-1])


def _cast(draft: Draft, casts: Sequence[fx.Node], at: fx.Node) -> None:
    sources = [cast.args[0] for cast in casts]
    results = [cast.meta["val"] for cast in casts]
    places = [
        draft.emit(
            aten.empty_strided.default,
            list(place.size()),
            list(place.stride()),
            dtype=place.dtype,
            device=place.device,
            at=at,
            known=place,
        )
        for place in draft.fakes(results, draft.device)
    ]
    known = draft.fakes(results, draft.device)
    _hand_out(draft, draft.emit(aten._foreach_copy.default, places, sources, at=at, known=known), casts, at)


def _count(draft: Draft, counters: Sequence[fx.Node]) -> None:
    at = counters[0]
    sources = [counter.args[0] for counter in counters]
    together = draft.emit(aten._foreach_add.Scalar, sources, 1, at=at)
    _hand_out(draft, together, counters, at)


def _hand_out(draft: Draft, together: fx.Node, nodes: Sequence[fx.Node], at: fx.Node) -> None:
    results = [
        draft.emit(operator.getitem, together, i, at=at, like=node, known=together.meta["val"][i])
        for i, node in enumerate(nodes)
    ]
    for node, result in zip(nodes, results, strict=True):
        if description(node.meta["val"]) != description(result.meta["val"]):
            raise Refused(node, f"would be {description(result.meta['val'])}")
        node.replace_all_uses_with(result)
        draft.erase_unused(node)
        _pull_views_behind(result)


def _pull_views_behind(node: fx.Node) -> None:
    """Views of a value that is now computed later than it was."""
    for user in list(node.users):
        if _is_view(user):
            node.append(user)
            _pull_views_behind(user)
