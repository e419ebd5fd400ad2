"""Selections under Dynamo whose size only values tell: boolean masks as indices, `nonzero` and its like. (2.11, 2.13)

Dynamo ends a graph at `x[mask]`, because it does not know how many elements there are. Where somebody knows the number,
the graph gets the places of the elements in so many rows, and takes them as an index. These are the kernels that a mask
leads to as well, but nobody waits for the device. The backward has the places then, and does not look for them again.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, fx

from pygraph_train.torch_private.changes import around_examples
from pygraph_train.torch_private.counted_scatter import counted_scatter
from pygraph_train.torch_private.dispatch import has_symbols
from pygraph_train.torch_private.dynamo import example_of
from pygraph_train.torch_private.memory import tensor_version

__all__ = ["Count", "changed_mask", "changes", "is_count", "is_number_of_host"]

Count = Callable[[Any, fx.Node, Callable[[Tensor], int]], "int | None"]
"""Of Dynamo's translator, a node, and one of the functions below: what this returns of the node; None if unknown."""


def elements_selected(mask: Tensor) -> int:
    """How many elements are not zero."""
    return int(torch.count_nonzero(mask))


def rows_repeated(repeats: Tensor) -> int:
    """How many rows `repeat_interleave` makes.

    Raises:
        ValueError: one of the numbers is negative; torch raises an error as well.
    """
    if not repeats.numel():
        return 0
    least, total = torch.stack([repeats.amin().long(), repeats.sum()]).tolist()
    if least < 0:
        raise ValueError("repeats can not be negative")
    return int(total)


def is_count(fn: object) -> bool:
    """Whether a function is one of those that count."""
    return fn in (elements_selected, rows_repeated)


def is_number_of_host(value: object) -> bool:
    """Whether `x[mask] = value` is a masked fill, and its backward needs no places either."""
    if not isinstance(value, Tensor):
        return True
    single = all(type(n) is int and n == 1 for n in value.shape)
    return single and value.device.type == "cpu" and not value.requires_grad


def changes(count: Count) -> tuple[tuple[Any, str, Any], ...]:
    """(owner, attribute, value), for one trace."""
    return around_examples(functools.partial(_selecting, count))


def _selecting(count: Count, get_fake_value: Callable[..., Any]) -> Callable[..., Any]:
    """Before Dynamo computes what a node is like, let it be one of known size."""

    def found(node: fx.Node, tx: Any, *args: Any, **kwargs: Any) -> Any:
        rewrite = _REWRITES.get(node.target) if node.op in ("call_function", "call_method") else None
        if rewrite is not None and "example_value" not in node.meta:
            rewrite(_Selection(node, tx, count, get_fake_value))
        return get_fake_value(node, tx, *args, **kwargs)

    return found


class _Selection:
    """One node whose shape may depend on values."""

    def __init__(self, node: fx.Node, tx: Any, count: Count, get_fake_value: Callable[..., Any]) -> None:
        self.node = node
        self._tx = tx
        self._count = count
        self._get_fake_value = get_fake_value

    # -- one for each kind ------------------------------------------------------------------------------

    def take(self) -> None:
        """`x[index]`"""
        if len(self.node.args) == 2 and not self.node.kwargs:
            self._replace_masks()

    def put(self) -> None:
        """`x[index] = value`, which writes with a mask as it is where the value is a number of the host."""
        if len(self.node.args) > 2:
            masks = sum(map(_is_mask, _parts(self.node.args[1])))
            if masks > 1 or not is_number_of_host(example_of(self.node.args[2])):
                self._replace_masks()

    def places(self) -> None:
        """`nonzero`, `argwhere`, and `where` with a condition alone."""
        node = self.node
        as_tuple = node.target is torch.where or node.kwargs.get("as_tuple", False)
        known = len(node.args) == 1 and not set(node.kwargs) - {"as_tuple"} and type(as_tuple) is bool
        rows = self._places_of(node.args[0]) if known else None
        if rows is not None:
            node.op, node.kwargs = "call_method", {}
            node.target, node.args = ("unbind", (rows, 1)) if as_tuple else ("detach", (rows,))

    def masked_select(self) -> None:
        """`x.masked_select(mask)`, where no gradient is asked for: its backward is none of an index."""
        node = self.node
        x, mask = [*node.args, None, None][:2]
        given, chosen = example_of(x), example_of(mask)
        if len(node.args) != 2 or node.kwargs or not isinstance(given, Tensor) or not _is_mask(mask):
            return
        if (
            has_symbols([given, chosen])
            or given.shape != chosen.shape
            or (given.requires_grad and torch.is_grad_enabled())
        ):
            return
        index = self._columns_of(mask)
        if index is not None:
            node.op, node.target, node.args = "call_function", operator.getitem, (x, index)

    def masked_scatter(self) -> None:
        """`x.masked_scatter(mask, source)`, where the source asks for a gradient: the backward selects."""
        node = self.node
        examples = list(map(example_of, node.args))
        if len(examples) != 3 or node.kwargs or not all(isinstance(x, Tensor) for x in examples):
            return
        x, mask, source = examples
        if not source.requires_grad or not _is_mask(node.args[1]) or has_symbols(examples):
            return
        widths = [*(1,) * (x.dim() - mask.dim()), *mask.shape]
        if len(widths) != x.dim() or any(n not in (1, size) for n, size in zip(widths, x.shape, strict=True)):
            return
        count = self._count(self._tx, node.args[1], elements_selected)  # type: ignore[arg-type]
        count = None if count is None else count * x.numel() // max(mask.numel(), 1)
        if count is not None and count <= source.numel():
            node.op, node.target, node.args = "call_function", counted_scatter, (*node.args, count)

    def repeat_interleave(self) -> None:
        """`x.repeat_interleave(repeats)`"""
        node = self.node
        if node.kwargs.get("output_size") is not None or len(node.args) > 3 or not node.args:
            return
        alone = len(node.args) == 1 and "repeats" not in node.kwargs
        repeats = node.args[0] if alone else node.kwargs.get("repeats", [*node.args, None][1])
        example = example_of(repeats)
        if not isinstance(repeats, fx.Node) or not isinstance(example, Tensor) or has_symbols([example]):
            return
        if example.dim() != 1 or (example.numel() == 1 and not alone):
            return
        size = self._count(self._tx, repeats, rows_repeated)
        if size is not None:
            node.kwargs = {**node.kwargs, "output_size": size}

    # -- what they have in common -----------------------------------------------------------------------

    def _replace_masks(self) -> None:
        """Let the index of a node have places instead of masks, all or none."""
        index = self.node.args[1]
        parts = _parts(index)
        if not _fit(example_of(self.node.args[0]), parts):
            return
        found: list[Any] = []
        for part in parts:
            columns = self._columns_of(part) if _is_mask(part) else (part,)
            if columns is None:
                return
            found += columns
        if len(found) > len(parts) or any(map(_is_mask, parts)):
            self.node.args = (self.node.args[0], tuple(found), *self.node.args[2:])

    def _columns_of(self, mask: Any) -> tuple[fx.Node, ...] | None:
        """The places of a mask, as one index for each dimension."""
        rows = self._places_of(mask)
        if rows is None:
            return None
        return tuple(self._make("select", (rows, 1, dim)) for dim in range(example_of(mask).dim()))

    def _places_of(self, values: Any) -> fx.Node | None:
        """Where elements are not zero, as `nonzero` has it: columns lie one after the other."""
        example = example_of(values)
        if not isinstance(values, fx.Node) or not isinstance(example, Tensor) or not example.dim():
            return None
        size = self._count(self._tx, values, elements_selected)
        if size is None:
            return None
        rows = self._make(torch.nonzero_static, (values,), {"size": size})
        rows.meta[_VERSION] = tensor_version(example)
        if example.device.type != "cpu":
            return rows
        if example.dim() == 1:
            return self._make("as_strided", (rows, (size, 1), (1, size)))
        for name, args in (("t", ()), ("contiguous", ()), ("t", ())):
            rows = self._make(name, (rows, *args))
        return rows

    def _make(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> fx.Node:
        """A node before the one of the selection."""
        op = "call_method" if isinstance(target, str) else "call_function"
        with self.node.graph.inserting_before(self.node):
            made = self.node.graph.create_node(op, target, args, kwargs or {})
        made.meta = dict(self.node.meta)
        made.meta["example_value"] = self._get_fake_value(made, self._tx, allow_non_graph_fake=True)
        return made


_REWRITES: dict[Any, Callable[[_Selection], None]] = {
    **{operator.getitem: _Selection.take, operator.setitem: _Selection.put},
    **dict.fromkeys(("index_put", "index_put_", torch.index_put, torch.index_put_), _Selection.put),
    **dict.fromkeys(("nonzero", "argwhere", torch.nonzero, torch.argwhere, torch.where), _Selection.places),
    **dict.fromkeys(("masked_select", torch.masked_select), _Selection.masked_select),
    **dict.fromkeys(("masked_scatter", torch.masked_scatter), _Selection.masked_scatter),
    **dict.fromkeys(("repeat_interleave", torch.repeat_interleave), _Selection.repeat_interleave),
}
"""Functions, and names of methods."""


def changed_mask(graph: fx.Graph) -> fx.Node | None:
    """Places in a graph whose mask the step changes later, if there are any.

    Autograd saves a mask, and complains of its change in the backward. With places it would go on.
    """
    found = (node for node in graph.nodes if _VERSION in node.meta)
    return next((x for x in found if tensor_version(example_of(x.args[0])) != x.meta[_VERSION]), None)


_VERSION = "version of the mask"


def _parts(index: Any) -> tuple[Any, ...]:
    return tuple(index) if isinstance(index, (tuple, list)) else (index,)


def _is_mask(part: Any) -> bool:
    example = example_of(part)
    return isinstance(part, fx.Node) and isinstance(example, Tensor) and example.dtype == torch.bool


def _fit(target: Any, parts: tuple[Any, ...]) -> bool:
    """Whether each mask in an index has the shape of the dimensions that it stands for. torch raises an error if not,
    and places would not."""
    if not isinstance(target, Tensor) or not any(map(_is_mask, parts)):
        return False
    if has_symbols([target, *map(example_of, parts)]):
        return False
    taken = [_dimensions(part) for part in parts]
    if None in taken or sum(part is Ellipsis for part in parts) > 1:
        return False
    rest, dim = target.dim() - sum(n for n in taken if n is not None), 0
    if rest < 0:
        return False
    for part, n in zip(parts, taken, strict=True):
        if _is_mask(part) and target.shape[dim : dim + (n or 0)] != example_of(part).shape:
            return False
        dim += rest if part is Ellipsis else (n or 0)
    return True


def _dimensions(part: Any) -> int | None:
    """How many dimensions a part of an index stands for; None for one that is not looked at."""
    if part is None or part is Ellipsis:
        return 0
    if isinstance(part, slice) or type(part) is int:
        return 1
    example = example_of(part)
    if not isinstance(example, Tensor) or not example.dim() or example.dtype == torch.uint8:
        return None
    return example.dim() if example.dtype == torch.bool else 1
