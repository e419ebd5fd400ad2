"""`p.data = value` in a compiled function: the tensor gets other memory, which no graph can give it.

Dynamo traces it as `set_`, and AOTAutograd leaves that at the end of the graph. A captured one would run once, and
leave the tensor in memory that every replay overwrites. Here the graph only returns the value, as a copy of the
tensor's own, and `set_` follows in Python after each run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from pygraph_train.regions.passes.draft import copy_module, has_effects, name_of, user_line, value
from pygraph_train.torch_private.dispatch import OpOverload, has_symbols, replaces_memory
from pygraph_train.torch_private.memory import storage_key

__all__ = ["Replaced", "Replacing", "without_replacements"]

_SET = torch.ops.aten.set_.source_Tensor


@dataclass(frozen=True)
class Replaced:
    """A graph without `set_`.

    Args:
        gm: returns what these inputs become, after everything else; the graph itself where there are none.
        targets: inputs that get other memory.
        refused: why the graph has to run as it was compiled, with the user's line; None where it need not.
    """

    gm: fx.GraphModule
    targets: tuple[int, ...] = ()
    refused: str | None = None


def without_replacements(gm: fx.GraphModule, saved_from: int) -> Replaced:
    """Take `set_` of inputs out of a graph of AOTAutograd. `gm` itself is not changed.

    Args:
        saved_from: outputs from this index on are for the backward only.
    """
    found = [node for node in gm.graph.nodes if _changes_memory(node)]
    if not found:
        return Replaced(gm)
    try:
        for node in found:
            _check(node, found, gm, saved_from)
    except _Refused as refused:
        return Replaced(gm, refused=str(refused))
    gm = copy_module(gm)
    inputs = [node for node in gm.graph.nodes if node.op == "placeholder"]
    sets = [node for node in gm.graph.nodes if _changes_memory(node)]
    output = gm.graph.output_node()
    outputs = list(output.args[0])  # type: ignore[arg-type]
    visible = output.meta.get("user_visible_output_idxs")
    if visible is not None:  # Inductor may choose the strides of the others
        output.meta["user_visible_output_idxs"] = [
            *visible,
            *range(len(outputs), len(outputs) + len(sets)),
        ]
    targets = tuple(inputs.index(node.args[0]) for node in sets)
    output.args = ((*outputs, *(node.args[1] for node in sets)),)
    for node in sets:
        gm.graph.erase_node(node)
    gm.recompile()
    return Replaced(gm, targets)


class Replacing:
    """A region, and `set_` after each of its runs.

    Args:
        region: in the boxed convention; the values are its last outputs.
        targets: inputs that get them.
    """

    def __init__(self, region: Callable[[list[Any]], Any], targets: Sequence[int]) -> None:
        self._boxed_call = True
        self._region = region
        self._targets = tuple(targets)

    def __call__(self, inputs: list[Any]) -> list[Any]:
        """Run the region once; the list is emptied."""
        targets = [inputs[i] for i in self._targets]
        outputs = list(self._region(inputs))
        values = outputs[-len(targets) :]
        del outputs[-len(targets) :]
        for target, its_value in zip(targets, values, strict=True):
            target.data = its_value  # `set_` would give a leaf another node that adds to its gradient
        return outputs


class _Refused(Exception):
    __pygraph_theirs__ = True

    pass


def _changes_memory(node: fx.Node) -> bool:
    op = node.target
    return isinstance(op, OpOverload) and replaces_memory(op)


def _check(node: fx.Node, found: Sequence[fx.Node], gm: fx.GraphModule, saved_from: int) -> None:
    """Raise _Refused unless a copy of the value, set after the graph, is what `set_` in the graph was."""
    target = node.args[0]
    assert isinstance(target, fx.Node)
    source = node.args[1] if node.target is _SET else None
    place = user_line(source) if isinstance(source, fx.Node) else None
    place = place or user_line(target)

    def refuse(why: str) -> None:
        where = f" ({place})" if place else ""
        raise _Refused(f"it gives an input other memory (`.data = ...`, `set_`, `resize_`){where}, {why}")

    if node.target is not _SET or not isinstance(source, fx.Node) or node.users:
        return refuse(f"by {name_of(node)}, which a graph cannot do")
    if target.op != "placeholder" or sum(has_effects(user) for user in target.users) > 1:
        return refuse("and writes to it otherwise")
    if source.op == "placeholder":
        return refuse("which is that of another input")
    fake = value(source)
    if fake is None or has_symbols([fake]):
        return refuse("of a size that is no fixed number")
    memory = _memory(source)
    nodes = list(gm.graph.nodes)
    if any(_memory(other) == memory for other in nodes if other.op in ("placeholder", "get_attr")):
        return refuse("which is that of another input")
    if any(_memory(other.args[1]) == memory for other in found if other is not node and len(other.args) > 1):
        return refuse("which another input gets as well")
    outputs = next(n for n in nodes if n.op == "output").args[0]
    if any(_memory(other) == memory for other in outputs[:saved_from]):
        return refuse("which the caller gets as well")
    if fake.untyped_storage().nbytes() != fake.numel() * fake.element_size():
        return refuse("and uses a part of it only")
    return None


def _memory(node: Any) -> Any:
    fake = value(node)
    return None if fake is None else storage_key(fake.untyped_storage())
