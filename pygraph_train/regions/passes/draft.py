"""A graph under rewrite, and what its passes report."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from pygraph_train.problems import user_line_in
from pygraph_train.torch_private.attributes import attribute
from pygraph_train.torch_private.dispatch import (
    HigherOrderOperator,
    OpOverload,
    fake_evaluation,
    writes_arguments,
)

CPU = torch.device("cpu")


@dataclass(frozen=True)
class Change:
    """Something that was transformed: by which pass, what in a short sentence, and `file:line` or None."""

    by: str
    what: str
    where: str | None


@dataclass(frozen=True)
class Left:
    """Something that still blocks capture: the operator, `file:line` or None, and why it was left."""

    op: str
    where: str | None
    why: str


class Refused(Exception):
    """A pass found that its rewrite of a node would change what the graph computes."""

    __pygraph_theirs__ = True

    def __init__(self, node: fx.Node, reason: str) -> None:
        super().__init__(f"{node.name} {reason}")
        self.reason = reason
        self.names = frozenset([node.name, *(read.name for read in node.all_input_nodes)])


@dataclass
class Draft:
    """A private copy of a region's graph that passes rewrite, with their findings.

    Attributes:
        gm: the copy; passes change its graph and the metas of its nodes.
        device: the accelerator that the region runs on.
        hand_over: whether tensors saved for the backward may stay on the device.
        staged: names of the inputs that are now expected on the device.
        late: indices of outputs that are now returned on the device.
        passthrough: output index to input index, for staged inputs that are returned unchanged.
        handed_over: indices of outputs that were CPU tensors and are now saved for the backward on the
            device.
        why: by node name, why a pass left the node alone.
        excluded: by node name, why no pass may rewrite the node: it was tried.
    """

    gm: fx.GraphModule
    device: torch.device
    hand_over: bool = False
    staged: tuple[str, ...] = ()
    late: tuple[int, ...] = ()
    passthrough: dict[int, int] = field(default_factory=dict)
    handed_over: tuple[int, ...] = ()
    changes: tuple[Change, ...] = ()
    failures: tuple[Left, ...] = ()
    why: dict[str, str] = field(default_factory=dict)
    excluded: dict[str, str] = field(default_factory=dict)

    @property
    def graph(self) -> fx.Graph:
        return self.gm.graph

    def copy(self) -> Draft:
        """A draft that can be thrown away: same findings, its own graph."""
        copied = replace(
            self,
            gm=copy_module(self.gm),
            passthrough=dict(self.passthrough),
            why=dict(self.why),
            excluded=dict(self.excluded),
        )
        for node in copied.graph.nodes:
            if node.op == "get_attr" and "val" not in node.meta:
                constant = attribute(copied.gm, str(node.target))
                if isinstance(constant, torch.Tensor):
                    node.meta["val"] = copied.fake(constant, constant.device)
        return copied

    def changed(self, by: str, what: str, where: str | None) -> None:
        """Report a change, once."""
        change = Change(by, what, where)
        if change not in self.changes:
            self.changes += (change,)

    @property
    def placeholders(self) -> list[fx.Node]:
        return [node for node in self.graph.nodes if node.op == "placeholder"]

    @property
    def outputs(self) -> Sequence[Any]:
        """What the graph returns, in order: nodes, numbers and None."""
        return self.graph.output_node().args[0]  # type: ignore[return-value]

    def emit(
        self,
        op: Callable[..., Any],
        *args: Any,
        at: fx.Node,
        like: fx.Node | None = None,
        known: Any = None,
        **kwargs: Any,
    ) -> fx.Node:
        """Insert a call before `at`, with the meta of what it computes and `like`'s place in the user's code.

        `known` is what it returns for the fake values of its inputs, where that need not be evaluated.
        """
        with self.graph.inserting_before(at):
            node = self.graph.call_function(op, args, kwargs)
        for key in ("stack_trace", "nn_module_stack", "original_aten", "seq_nr"):
            if key in (like or at).meta:
                node.meta[key] = (like or at).meta[key]
        node.meta["val"] = self.evaluate(node) if known is None else known
        return node

    def evaluate(self, node: fx.Node) -> Any:
        """What a call returns for the fake values of its inputs."""
        args = fx.map_arg(node.args, lambda n: n.meta["val"])
        kwargs = fx.map_arg(node.kwargs, lambda n: n.meta["val"])
        target: Any = node.target
        with fake_evaluation(self.gm):
            return target(*args, **kwargs)

    def fake(self, like: torch.Tensor, device: torch.device) -> torch.Tensor:
        """A fake tensor with the dtype, sizes and strides of another."""
        return self.fakes([like], device)[0]

    def fakes(self, like: Iterable[torch.Tensor], device: torch.device) -> list[torch.Tensor]:
        """Fake tensors with the dtypes, sizes and strides of others."""
        with fake_evaluation(self.gm):
            return [torch.empty_strided(t.size(), t.stride(), dtype=t.dtype, device=device) for t in like]

    def refresh(self, changed: set[fx.Node]) -> None:
        """Propagate the metas of `changed` nodes.

        Raises:
            Refused: something other than a CPU tensor's device would change.
        """
        for node in self.graph.nodes:
            stale = node in changed or not changed.isdisjoint(node.all_input_nodes)
            if node.op != "call_function" or not stale or "unbacked_bindings" in node.meta:
                continue
            try:
                old, new = node.meta.get("val"), self.evaluate(node)
            except Exception as error:
                raise Refused(node, f"does not take what it would get ({error})") from error
            same_device = self._check(node, old, new)
            if not same_device:
                node.meta["val"] = new
                changed.add(node)

    def _check(self, node: fx.Node, old: Any, new: Any) -> bool:
        """Whether the device of what a node returns is the same; the rest has to be."""
        if not isinstance(old, torch.Tensor):
            return True
        if description(old) != description(new):
            raise Refused(node, f"would be {description(new)} where it was {description(old)}")
        if new.device not in (old.device, self.device) or (is_on(old, self.device) and is_on(new, CPU)):
            raise Refused(node, f"would move from {old.device} to {new.device}")
        return old.device == new.device

    def replace(self, node: fx.Node, by: fx.Node) -> None:
        """Let the users of `node` read `by`, which must be the same but for a CPU tensor's device."""
        self._check(node, node.meta["val"], by.meta["val"])
        node.replace_all_uses_with(by)
        self.erase_unused(node)

    def erase_unused(self, node: fx.Node) -> None:
        """Erase a call without users, and its inputs where nothing else reads them."""
        queue = {node: None}
        while queue:
            unused, _ = queue.popitem()
            if unused.users or unused.op not in ("call_function", "get_attr"):
                continue
            queue.update({read: None for read in unused.all_input_nodes if not has_effects(read)})
            self.graph.erase_node(unused)


def copy_module(gm: fx.GraphModule) -> fx.GraphModule:
    """A graph module with its own graph: same names, same metas, also on the output."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    result = graph.graph_copy(gm.graph, copies)
    output = graph.output(result)
    output.meta = dict(gm.graph.output_node().meta)
    copied = fx.GraphModule(gm, graph, class_name=type(gm).__name__)
    copied.meta.update(gm.meta)
    return copied


def value(node: object) -> torch.Tensor | None:
    """The fake tensor that a node stands for."""
    found = node.meta.get("val") if isinstance(node, fx.Node) else None
    return found if isinstance(found, torch.Tensor) else None


def is_on(tensor: torch.Tensor | None, device: torch.device) -> bool:
    return tensor is not None and tensor.device == device


def description(tensor: torch.Tensor) -> tuple[str, ...]:
    """dtype, sizes and the strides that matter. As text: comparing symbols could add guards."""
    sizes = [str(size) for size in tensor.size()]
    strides = [str(n) for n, size in zip(tensor.stride(), sizes, strict=True) if size != "1"]
    return (str(tensor.dtype), f"[{', '.join(sizes)}]", f"[{', '.join(strides)}]")


def has_effects(node: fx.Node) -> bool:
    """Whether a call does more than return its result."""
    op = node.target
    if isinstance(op, OpOverload):
        return writes_arguments(op)
    return isinstance(op, HigherOrderOperator)


def is_written(node: fx.Node) -> bool:
    """Whether the graph changes a tensor in place, as AOTAutograd does to inputs at the graph's end."""
    copy_ = torch.ops.aten.copy_.default
    return any(
        has_effects(user) and (user.target is not copy_ or user.args[0] is node) for user in node.users
    )


def in_one_line(error: Exception) -> str:
    """An error as a note in a report: what fx and Inductor have to say goes on with whole graphs."""
    return f"{type(error).__name__}: {error}".partition("\n")[0]


def name_of(node: fx.Node) -> str:
    """The operator as the user knows it: before decompositions, where that was kept."""
    if node.op != "call_function":
        return node.name
    return str(node.meta.get("original_aten") or node.target).removesuffix(".default")


def user_line(node: fx.Node) -> str | None:
    """`file:line` of the user's innermost frame, for a node or the first of its users that has one."""
    candidates = (node, *_downstream(node, depth=4))
    return next((where for n in candidates if (where := user_line_in(n.meta.get("stack_trace")))), None)


def _downstream(node: fx.Node, depth: int) -> Iterator[fx.Node]:
    layer: Iterable[fx.Node] = [node]
    for _ in range(depth):
        layer = [user for read in layer for user in read.users]
        yield from layer
